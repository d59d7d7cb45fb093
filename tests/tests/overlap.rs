//! Prediction, selection and transfer run behind the foreground, as the trace tells it.

use oasis_core::executor::Executor;
use oasis_core::ids::{LayerId, RequestId, Step};
use oasis_core::pipeline::{Span, Tracer, Track};
use oasis_core::policy::{Aggregate, PredictBatch, SelectBatch, rank_by_score};
use oasis_core::testkit::doubles::{CopyWith, PredictWith, SelectWith, lru_selector};
use oasis_core::working_set::{Ranking, TransferPlan};
use oasis_models::cpu::{CpuExecutor, Residency, SparseParts};
use oasis_tests::models::{oasis_tiny, options, parts, sparse, start, step};
use oasis_tests::prompts::Prompts;
use std::collections::BTreeSet;
use std::time::Duration;

const LAYERS: u32 = 6;
const STEPS: u64 = 24;
/// Most that are made until one shows what is looked for.
const RECORDINGS: usize = 20;

/// Decodes behind 3,000 tokens; gives the spans.
fn record(settings: &[&str]) -> (Tracer, Vec<Span>) {
    let (model, tracer) = (oasis_tiny(), Tracer::recording());
    let executor = sparse(&model, 64, settings, tracer.clone());
    let spans = decode(executor, &tracer);
    (tracer, spans)
}

/// Every stage takes longer than the foreground takes for a layer.
fn record_slow_stages() -> Vec<Span> {
    let (model, tracer) = (oasis_tiny(), Tracer::recording());
    let (mut scores, mut lru) = (Vec::new(), lru_selector(3));
    let pause = || std::thread::sleep(Duration::from_millis(4));
    let predictor = PredictWith(move |batch: &PredictBatch<'_>, ranking: &mut Ranking| {
        pause();
        rank_by_score(batch, Aggregate::Sum, &mut scores, ranking);
    });
    let plan = move |batch: &SelectBatch<'_>, plan: &mut TransferPlan| {
        pause();
        lru.plan(batch, plan);
    };
    let transport = CopyWith(move |_| {
        pause();
        Ok(())
    });
    let parts = SparseParts {
        predictor: Box::new(predictor),
        selector: Box::new(SelectWith { cap: 3, plan }),
        transport: Box::new(transport),
        ..parts(&model, 64, 16, &[])
    };
    let executor = CpuExecutor::new(model, Residency::Sparse(parts), options(512), tracer.clone()).unwrap();
    decode(executor, &tracer)
}

fn decode(mut executor: CpuExecutor, tracer: &Tracer) -> Vec<Span> {
    let request = RequestId(1);
    let mut token = start(&mut executor, request, &Prompts::new().prose(3000, 0), STEPS as usize + 1);
    for _ in 0..STEPS {
        token = step(&mut executor, request, token);
    }
    executor.release(request);
    assert!(executor.stats().admitted_entries > 0, "nothing was moved");
    tracer.spans()
}

fn of(spans: &[Span], track: Track) -> impl Iterator<Item = &Span> {
    spans.iter().filter(move |span| span.track == track)
}

/// Tasks of a stage after the first step.
fn tasks(spans: &[Span], track: Track) -> Vec<Span> {
    let tasks: Vec<Span> = of(spans, track).filter(|s| s.step > Step(1)).copied().collect();
    assert_eq!(tasks.len() as u64, (STEPS - 1) * u64::from(LAYERS), "{track:?}: a task a layer and step");
    tasks
}

/// Microseconds in which `task` runs beside foreground work, not waiting, on layers that `counts` counts.
fn beside(task: &Span, spans: &[Span], counts: impl Fn(&Span) -> bool) -> f64 {
    of(spans, Track::Foreground).filter(|s| s.name != "wait" && counts(s)).map(|s| s.overlap_us(task)).sum()
}

/// Each stage must show it in one of some recordings: where other processes have the cores, stages find none idle.
fn expect_of_all_tracks(record: impl Fn() -> Vec<Span>, shows: impl Fn(&[Span], Track) -> bool) {
    let mut left = vec![Track::Predict, Track::Select, Track::Transfer];
    for _ in 0..RECORDINGS {
        let spans = record();
        left.retain(|track| !shows(&spans, *track));
        if left.is_empty() {
            return;
        }
    }
    panic!("{left:?}: not in {RECORDINGS} recordings");
}

#[test]
fn every_background_stage_runs_beside_foreground_work() {
    let recorded = || record(&["selector.kind=fetch-all"]).1;
    expect_of_all_tracks(recorded, |spans, track| {
        let tasks = tasks(spans, track);
        let total: f64 = tasks.iter().map(|task| task.duration_us).sum();
        let hidden: f64 = tasks.iter().map(|task| beside(task, spans, |_| true)).sum();
        println!("{}: {hidden:.0} of {total:.0} us beside foreground work", track.name());
        hidden > 0.0
    });
}

#[test]
fn a_slow_stage_runs_beside_the_foreground_work_of_other_layers() {
    expect_of_all_tracks(record_slow_stages, |spans, track| {
        let tasks = tasks(spans, track);
        let others = |task: &Span| beside(task, spans, |work| work.layer != task.layer);
        let overlapped = tasks.iter().filter(|task| others(task) > 0.0).count();
        let hidden: f64 = tasks.iter().map(others).sum();
        println!("{}: {hidden:.0} us beside other layers in {overlapped} of {} tasks", track.name(), tasks.len());
        overlapped >= tasks.len() / 4
    });
}

#[test]
fn lookahead_waits_for_a_layer_before_its_own_projections_and_for_no_other() {
    let spans = record_slow_stages();
    let foreground: Vec<&Span> = of(&spans, Track::Foreground).filter(|s| s.step >= Step(1)).collect();
    let (mut waits, mut others_in_flight) = (0, 0);
    for (index, wait) in foreground.iter().enumerate().filter(|(_, s)| s.name == "wait") {
        let transfer = of(&spans, Track::Transfer)
            .find(|t| t.name == "transfer" && t.layer == wait.layer && t.step == wait.step)
            .expect("what is waited for was transferred");
        assert!(transfer.end_us() <= wait.end_us(), "layer {}: the wait ends before the transfer", wait.layer);
        waits += 1;
        let Some(next) = foreground.get(index + 1).filter(|next| next.name != "wait") else {
            // The last layers are waited for when the request ends.
            assert_eq!(wait.step, Step(STEPS));
            continue;
        };
        assert_eq!((next.name, next.layer, next.step), ("qkv", wait.layer, Step(wait.step.0 + 1)));
        others_in_flight += usize::from(of(&spans, Track::Transfer).any(|t| {
            t.name == "transfer" && t.step == wait.step && t.layer > wait.layer && t.end_us() > wait.end_us()
        }));
    }
    assert_eq!(waits, STEPS * u64::from(LAYERS));
    println!("{others_in_flight} of {waits} waits end while a later layer of the same step is still in flight");
    assert!(others_in_flight > waits as usize / 4, "{others_in_flight} of {waits}");
}

#[test]
fn the_exact_predictor_waits_between_projections_and_attention() {
    let (_, spans) = record(&["predictor.kind=exact", "selector.kind=fetch-all"]);
    let foreground: Vec<&Span> = of(&spans, Track::Foreground).filter(|s| s.step > Step(1)).collect();
    let mut waits = 0;
    for triple in foreground.windows(3).filter(|triple| triple[1].name == "wait") {
        let [before, wait, after] = triple else { unreachable!() };
        assert_eq!((before.name, after.name), ("qkv", "attention"));
        assert!([before, after].iter().all(|s| s.layer == wait.layer && s.step == wait.step));
        waits += 1;
    }
    assert_eq!(waits, (STEPS - 1) * u64::from(LAYERS), "one a layer and step");
}

#[test]
fn the_chrome_trace_has_four_named_tracks_and_every_span() {
    let (tracer, spans) = record(&[]);
    let mut bytes = Vec::new();
    tracer.write_chrome_trace(&mut bytes).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let (names, complete): (Vec<_>, Vec<_>) = events.iter().partition(|e| e["ph"] == "M");
    let names: Vec<&str> = names.iter().map(|e| e["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["foreground", "predict", "select", "transfer"]);
    assert_eq!(complete.len(), spans.len());
    let tracks: BTreeSet<u64> = complete.iter().map(|e| e["tid"].as_u64().unwrap()).collect();
    assert_eq!(tracks, BTreeSet::from([0, 1, 2, 3]), "a track without a span");
    for (event, span) in complete.iter().zip(&spans) {
        assert_eq!(event["ph"], "X");
        assert_eq!(event["name"], span.name);
        assert_eq!(event["tid"].as_u64(), Some(span.track as u64));
        assert_eq!(event["args"]["layer"].as_u64().map(|l| LayerId(l as u32)), Some(span.layer));
        assert!(event["ts"].as_f64().unwrap() >= 0.0 && event["dur"].as_f64().unwrap() >= 0.0);
    }
    let offloads = spans.iter().filter(|s| s.name == "offload").count();
    assert_eq!(offloads, LAYERS as usize, "one write of the prompt's blocks a layer");
}
