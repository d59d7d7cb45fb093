//! What executors hold, count, and refuse.

use crate::{NEAR, Scene};
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_cuda::executor::CudaExecutor;
use oasis_tests::gpu::{Setup, Speech, assert_nothing_held, step_all};
use oasis_tests::models::{self, start, step};

const PREDICTORS: [&str; 4] =
    ["predictor.kind=draft-query", "predictor.kind=last-query", "predictor.kind=exact", "predictor.kind=infinigen"];

fn sequence(id: u64, prompt: &[TokenId], max_new_tokens: usize) -> Sequence {
    let sampling = SamplingParams::default();
    Sequence { request: RequestId(id), prompt: prompt.to_vec(), max_new_tokens, sampling }
}

/// Where a request is released.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Admitted,
    /// After so many calls.
    Prefilling(usize),
    /// After so many decode steps.
    Decoding(usize),
}

fn run_until(executor: &mut CudaExecutor, phase: Phase, prompt: &[TokenId]) {
    assert_eq!(executor.admit(sequence(1, prompt, 40)).unwrap(), Admission::Admitted);
    assert!(executor.stats().device.total() > 0);
    let mut token = None;
    let calls = match phase {
        Phase::Admitted => 0,
        Phase::Prefilling(calls) => calls,
        Phase::Decoding(_) => usize::MAX,
    };
    for _ in 0..calls {
        if let PrefillProgress::Done(first) = executor.prefill(RequestId(1)).unwrap() {
            token = Some(first);
            break;
        }
    }
    if let Phase::Decoding(steps) = phase {
        let mut token = token.expect("a prompt that was read to its end");
        (0..steps).for_each(|_| token = step(executor, RequestId(1), token));
    }
}

pub fn a_release_in_any_phase_leaves_nothing_behind(scene: &Scene) {
    let (victim, prompt) = (scene.prompts.prose(1_500, 0), scene.prompts.prose(330, 8));
    let phases = [
        Phase::Admitted,
        Phase::Prefilling(1),
        Phase::Prefilling(3),
        Phase::Decoding(0),
        Phase::Decoding(1),
        Phase::Decoding(2),
        Phase::Decoding(30),
    ];
    let sparse = PREDICTORS.map(|kind| Setup::sparse(8, &[kind, "selector.fetch_ratio=0.25"], 2, 1_600));
    for setup in sparse.into_iter().chain([Setup::dense(2, 1_600)]) {
        let want = Speech::alone(&mut setup.start(&scene.device, &scene.tiny), &prompt, 50);
        let mut executor = setup.start(&scene.device, &scene.tiny);
        for phase in phases {
            run_until(&mut executor, phase, &victim);
            executor.release(RequestId(1));
            assert_nothing_held(&executor);
            executor.release(RequestId(1));
            let got = Speech::alone(&mut executor, &prompt, 50);
            assert!(got == want, "{setup:?}, {phase:?}: {}", want.compare(&got));
            assert_nothing_held(&executor);
        }
    }
}

pub fn entries_are_counted(scene: &Scene) {
    // The first has fewer blocks than slots, the second none at first.
    let prompts = [200, 9, 700].map(|tokens| scene.prompts.prose(tokens, 9));
    let (budget, tokens) = (16, 40);
    for kind in PREDICTORS {
        for selector in ["selector.fetch_ratio=0.2", "selector.kind=static", "selector.kind=fetch-all"] {
            let settings = [kind, selector];
            let mut executor = Setup::sparse(budget, &settings, 2, 800).start(&scene.device, &scene.tiny);
            let info = executor.info().clone();
            let heads = (info.geometry.layers * info.geometry.kv_heads) as u64;
            let mut cpu = models::sparse(&scene.tiny.cpu, budget, &settings, Tracer::default());
            for prompt in &prompts {
                let before = executor.stats();
                Speech::along(&mut executor, prompt, &Speech::alone(&mut cpu, prompt, tokens).tokens);
                let stats = executor.stats();
                let steps = tokens as u64 - 1;
                assert_eq!(stats.tokens - before.tokens, steps);
                assert_eq!(stats.cap_entries - before.cap_entries, steps * heads * info.cap as u64);
                let admitted = stats.admitted_entries - before.admitted_entries;
                // The first step fills.
                assert!(admitted <= (steps - 1) * heads * info.cap as u64, "{settings:?}: {admitted} admitted");
                let chosen = prompt.len() > budget * 16 && !selector.ends_with("static");
                assert_eq!(admitted > 0, chosen, "{settings:?}, prompt of {}: {admitted} admitted", prompt.len());
                // Where a prompt has no block, the first that is complete fills.
                let filled = (prompt.len() / 16).clamp(1, budget) as u64 * heads;
                assert_eq!(stats.filled_entries - before.filled_entries, filled, "{settings:?}, {}", prompt.len());
                assert_eq!(
                    stats.link_bytes,
                    stats.admitted_entries * info.geometry.block_bytes() as u64 / info.geometry.kv_heads as u64
                );
            }
            let (gpu, cpu) = (executor.stats(), cpu.stats());
            assert_eq!(gpu.tokens, cpu.tokens, "{settings:?}");
            println!(
                "  {settings:?}: admitted {} (CPU {}), deferred {} ({})",
                gpu.admitted_entries, cpu.admitted_entries, gpu.deferred_entries, cpu.deferred_entries
            );
        }
    }
}

pub fn a_draft_head_holds_its_window(scene: &Scene) {
    let head = &scene.tiny.head.spec;
    let block = (2 * 16 * head.kv_heads * head.head_dim * size_of::<u16>()) as u64;
    for (window, setting) in [(8, "kv.draft_blocks=8"), (usize::MAX, "kv.draft_blocks=all")] {
        let mut executor = Setup::sparse(8, &[PREDICTORS[0], setting], 1, 1_600).start(&scene.device, &scene.tiny);
        for tokens in [20, 120, 700] {
            let prompt = scene.prompts.prose(tokens, 2);
            assert_eq!(executor.admit(sequence(1, &prompt, 17)).unwrap(), Admission::Admitted);
            // The last token's KV is never kept.
            let blocks = (tokens + 16).div_ceil(16).min(window) as u64;
            assert_eq!(executor.stats().device.draft, blocks * block, "{setting}, {tokens} tokens");
            executor.release(RequestId(1));
        }
        assert_nothing_held(&executor);
    }
}

pub fn requests_wait_for_rows_and_host_memory(scene: &Scene) {
    let prompt = scene.prompts.prose(320, 1);
    let wait =
        |executor: &mut CudaExecutor, id: u64, what: &str| match executor.admit(sequence(id, &prompt, 17)).unwrap() {
            Admission::Wait { reason } => assert!(reason.contains(what), "{reason}"),
            other => panic!("expected to wait for {what}, found {other:?}"),
        };
    for setup in [Setup::dense(2, 400), Setup::sparse(8, &[], 2, 400)] {
        let mut executor = setup.start(&scene.device, &scene.tiny);
        for id in [1, 2] {
            assert_eq!(executor.admit(sequence(id, &prompt, 17)).unwrap(), Admission::Admitted);
        }
        wait(&mut executor, 3, "rows");
        executor.release(RequestId(1));
        assert_eq!(executor.admit(sequence(3, &prompt, 17)).unwrap(), Admission::Admitted);
    }
    // 21 blocks each: room for one and a half.
    let geometry = Setup::sparse(8, &[], 2, 400).start(&scene.device, &scene.tiny).info().geometry;
    let request = (geometry.layers * 21 * geometry.block_bytes()) as u64;
    let setup = Setup { host: request * 3 / 2, ..Setup::sparse(8, &[], 2, 400) };
    let mut executor = setup.start(&scene.device, &scene.tiny);
    assert_eq!(executor.admit(sequence(1, &prompt, 17)).unwrap(), Admission::Admitted);
    let store = executor.stats().store;
    assert_eq!((store.reserved, store.requests), (request, 1));
    wait(&mut executor, 2, "needed");
    executor.release(RequestId(1));
    assert_eq!(executor.admit(sequence(2, &prompt, 17)).unwrap(), Admission::Admitted);
    executor.release(RequestId(2));
    assert_nothing_held(&executor);
    let setup = Setup { host: request - 1, ..setup };
    match setup.start(&scene.device, &scene.tiny).admit(sequence(1, &prompt, 17)).unwrap() {
        Admission::Refused { reason } => assert!(reason.contains("store.capacity"), "{reason}"),
        other => panic!("expected a refusal, found {other:?}"),
    }
}

pub fn impossible_requests_are_refused(scene: &Scene) {
    let prompt = scene.prompts.prose(300, 1);
    let mut executor = Setup::sparse(8, &[], 2, 310).start(&scene.device, &scene.tiny);
    let with = |sampling| Sequence { sampling, ..sequence(1, &prompt, 4) };
    let greedy = SamplingParams::default();
    let alien = [prompt.clone(), vec![TokenId::from(executor.info().vocab)]].concat();
    let cases = [
        (sequence(1, &prompt, 12), "310"),
        (with(SamplingParams { temperature: -1.0, ..greedy }), "temperature"),
        (with(SamplingParams { temperature: f32::NAN, ..greedy }), "temperature"),
        (with(SamplingParams { temperature: 1.0, top_p: 1.5, ..greedy }), "top_p"),
        (with(SamplingParams { temperature: 1.0, top_p: f32::NAN, ..greedy }), "top_p"),
        (sequence(1, &alien, 2), "4096"),
    ];
    for (sequence, what) in cases {
        match executor.admit(sequence).unwrap() {
            Admission::Refused { reason } => assert!(reason.contains(what), "{reason}"),
            other => panic!("{what}: expected a refusal, found {other:?}"),
        }
        assert_nothing_held(&executor);
    }
    assert!(executor.admit(sequence(1, &[], 4)).is_err());
    assert_eq!(executor.admit(sequence(1, &prompt, 11)).unwrap(), Admission::Admitted);
    assert!(executor.admit(sequence(1, &prompt, 4)).is_err(), "admitted twice");
    assert!(executor.prefill(RequestId(7)).is_err());
    executor.release(RequestId(1));

    // Rows that cannot run end with an error; the one that can goes on.
    let mut row = vec![(RequestId(2), vec![start(&mut executor, RequestId(2), &prompt, 5)])];
    assert_eq!(executor.admit(sequence(3, &prompt, 4)).unwrap(), Admission::Admitted);
    let good = DecodeRow { request: RequestId(2), token: row[0].1[0] };
    let alien = DecodeRow { token: TokenId::from(executor.info().vocab), ..good };
    let results = executor
        .decode(&[good, good, DecodeRow { request: RequestId(3), ..good }, DecodeRow { request: RequestId(4), ..good }])
        .unwrap();
    assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, false, false]);
    assert!(executor.decode(&[alien]).unwrap()[0].is_err());
    row[0].1.push(*results[0].as_ref().unwrap());
    (0..3).for_each(|_| step_all(&mut executor, &mut row));
    let beyond = DecodeRow { token: *row[0].1.last().unwrap(), ..good };
    let error = executor.decode(&[beyond]).unwrap().remove(0).unwrap_err();
    assert!(error.0.contains("no more steps"), "{error}");
}

pub fn a_context_is_used_to_its_end(scene: &Scene) {
    // The draft token of the last step stands beyond the longest context, in a block of its own or not.
    for context in [320, 331] {
        let prompt = scene.prompts.prose(context - 20, 2);
        let sparse = PREDICTORS.map(|kind| Setup::sparse(12, &[kind], 1, context));
        for setup in sparse.into_iter().chain([Setup::dense(1, context)]) {
            let roomy = Setup { max_context: context + 100, ..setup.clone() };
            let want = Speech::alone(&mut roomy.start(&scene.device, &scene.tiny), &prompt, 21);
            let got = Speech::along(&mut setup.start(&scene.device, &scene.tiny), &prompt, &want.tokens);
            let parity = want.compare(&got);
            assert!(parity.median() < 5e-2 && parity.gap < NEAR, "{setup:?}: {parity}");
        }
    }
    // Chunks of a prompt that are no whole blocks.
    let prompt = scene.prompts.prose(100, 2);
    for kind in PREDICTORS {
        let say = |prefill_chunk| {
            let setup = Setup { prefill_chunk, ..Setup::sparse(3, &[kind], 1, 200) };
            Speech::alone(&mut setup.start(&scene.device, &scene.tiny), &prompt, 40)
        };
        let (whole, parts) = (say(512), say(1));
        let parity = whole.compare(&Speech { logits: parts.logits.clone(), tokens: whole.tokens.clone() });
        if parts.tokens == whole.tokens {
            assert!(parity.median() < 5e-2, "{kind}: {parity}");
        } else {
            let place = parts.tokens.iter().zip(&whole.tokens).position(|(a, b)| a != b).expect("tokens differ");
            assert!(whole.gap(place, parts.tokens[place]) < NEAR, "{kind}: parts at {place}");
        }
    }
}
