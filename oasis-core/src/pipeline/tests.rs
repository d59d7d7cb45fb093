use super::*;
use crate::ids::{BlockId, KvHead, SlotId};
use crate::policy::{PredictBatch, SelectBatch};
use crate::testkit::block_on;
use crate::testkit::doubles::{
    ByScore, CopyWith, FirstKey, MapStore, PredictWith, SelectWith, copy_transport, lru_selector,
};
use crate::testkit::faulty::{Faults, FaultyStore, FaultyTransport};
use crate::working_set::{Admission, TransferPlan};
use foreground::{Foreground, GEOMETRY, entry};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

mod foreground;
mod model;

const R1: RequestId = RequestId(1);
const R2: RequestId = RequestId(2);

fn parts(budget: usize, cap: usize) -> PipelineParts {
    PipelineParts {
        geometry: GEOMETRY,
        budget,
        summarizer: Arc::new(FirstKey),
        predictor: Box::new(ByScore::default()),
        selector: lru_selector(cap),
        transport: copy_transport(),
        store: Arc::new(MapStore::default()),
        priority: WorkerPriority::Normal,
        tracer: Tracer::default(),
    }
}

/// A transport whose every gather reports its number on the channel and then waits for a word to go on.
fn gated() -> (Box<dyn Transport>, Receiver<usize>, std::sync::mpsc::SyncSender<()>) {
    let (started, starts) = channel();
    let (open, gate) = sync_channel(100);
    let mut calls = 0;
    let transport = CopyWith(move |_| {
        let _ = started.send(calls);
        calls += 1;
        gate.recv_timeout(Duration::from_secs(20)).map_err(anyhow::Error::from)
    });
    (Box::new(transport), starts, open)
}

#[test]
fn a_slow_transfer_of_one_layer_does_not_delay_another() {
    let (transport, starts, open) = gated();
    let mut fg = Foreground::new(PipelineParts { transport, ..parts(2, 1) });
    fg.prefill(R1, 17);
    fg.hand_in_all();
    open.send(()).unwrap();
    // Layer 0 is through, layer 1 is being moved and does not get on.
    assert_eq!(fg.take_back(LayerId(0)).filled, 2 * GEOMETRY.kv_heads);
    assert_eq!([starts.recv().unwrap(), starts.recv().unwrap()], [0, 1]);
    assert!(fg.pipeline.is_in_flight(LayerId(1)));
    open.send(()).unwrap();
    assert_eq!(fg.pipeline.wait(LayerId(1)).unwrap().layer, LayerId(1));
    assert!(fg.pipeline.wait(LayerId(1)).is_none(), "nothing is in flight any more");
    // Layer 2 fails now, nobody waits for it, and the pipeline can be dropped.
    drop(open);
}

#[test]
fn stages_of_different_layers_run_at_the_same_time() {
    let nap = || std::thread::sleep(Duration::from_millis(40));
    let tracer = Tracer::recording();
    let mut predictor = ByScore::default();
    let mut fg = Foreground::new(PipelineParts {
        predictor: Box::new(PredictWith(move |batch: &PredictBatch<'_>, ranking: &mut Ranking| {
            nap();
            predictor.predict(batch, ranking);
        })),
        selector: Box::new(SelectWith { cap: 1, plan: move |_: &SelectBatch<'_>, _: &mut TransferPlan| nap() }),
        transport: Box::new(CopyWith(move |_| {
            nap();
            Ok(())
        })),
        tracer: tracer.clone(),
        ..parts(2, 1)
    });
    fg.prefill(R1, 17);
    fg.hand_in_all();
    fg.take_back_all();
    let spans = tracer.spans();
    let overlap = |a: Track, b: Track| -> f64 {
        let of = |track| spans.iter().filter(move |s| s.track == track);
        of(a).flat_map(|x| of(b).map(move |y| x.overlap_us(y))).sum()
    };
    assert!(overlap(Track::Predict, Track::Select) > 1000.0, "{spans:?}");
    assert!(overlap(Track::Select, Track::Transfer) > 1000.0, "{spans:?}");
    assert!(overlap(Track::Foreground, Track::Transfer) > 1000.0, "{spans:?}");

    let mut json = Vec::new();
    tracer.write_chrome_trace(&mut json).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(trace["traceEvents"].as_array().unwrap().len(), Track::ALL.len() + tracer.spans().len());
}

/// Runs one step that fails in `stage` and a second one that does not.
fn survives(parts: PipelineParts, expect: &str) {
    let mut fg = Foreground::new(parts);
    fg.prefill(R1, 17);
    fg.prefill(R2, 9);
    fg.hand_in_all();
    for layer in (0..GEOMETRY.layers).map(LayerId::from) {
        let done = fg.take_back(layer);
        for member in &done.errors {
            let error = member.as_ref().expect("every request of the batch failed").to_string();
            assert!(layer.0 > 0 || error.contains(expect), "{error}");
        }
    }
    assert!(fg.holds_everything(), "the device memory of every layer came back");
    fg.restart();
    fg.hand_in_all();
    fg.take_back_all();
    fg.check_slots();
}

/// Fails with `boom` on each layer's first call.
fn first_calls_panic() -> impl FnMut() + Send {
    let mut calls = 0;
    move || {
        calls += 1;
        assert!(calls > GEOMETRY.layers, "boom {calls}");
    }
}

#[test]
fn a_panicking_policy_is_an_error_and_the_memory_comes_back() {
    let (mut inner, mut fuse) = (ByScore::default(), first_calls_panic());
    let predictor = Box::new(PredictWith(move |batch: &PredictBatch<'_>, ranking: &mut Ranking| {
        fuse();
        inner.predict(batch, ranking);
    }));
    survives(PipelineParts { predictor, ..parts(2, 1) }, "the predict stage panicked: boom 1");

    let mut fuse = first_calls_panic();
    let plan = move |_: &SelectBatch<'_>, _: &mut TransferPlan| fuse();
    let selector = Box::new(SelectWith { cap: 1, plan });
    survives(PipelineParts { selector, ..parts(2, 1) }, "the select stage panicked: boom 1");
}

#[test]
fn a_panicking_transport_is_an_error_and_the_memory_comes_back() {
    // A failing gather is tried again for every request, so three calls a layer.
    let mut calls = 0;
    let transport = Box::new(CopyWith(move |_| {
        calls += 1;
        assert!(calls > 3 * GEOMETRY.layers, "boom {calls}");
        Ok(())
    }));
    survives(PipelineParts { transport, ..parts(2, 1) }, "the transfer stage panicked: boom");
}

#[test]
fn a_plan_that_breaks_its_contract_is_reported() {
    let mut calls = 0;
    let plan = move |batch: &SelectBatch<'_>, plan: &mut TransferPlan| {
        calls += 1;
        if calls <= GEOMETRY.layers {
            let block = batch.want.head(0, KvHead(0))[0].block;
            plan.push(0, KvHead(0), Admission { block, slot: SlotId(0) });
        }
    };
    let selector = Box::new(SelectWith { cap: 1, plan });
    survives(
        PipelineParts { selector, ..parts(2, 1) },
        "breaks its contract: request 0 of the batch, KV head 0: block",
    );
}

#[test]
fn a_failing_read_ends_only_the_request_concerned() {
    // The read of the whole batch fails, then that of the first request; the second one's succeeds.
    let store = Arc::new(FaultyStore {
        inner: Arc::new(MapStore::default()),
        puts: Faults::none(),
        fetches: Faults::at([0, 1]),
    });
    let mut fg = Foreground::new(PipelineParts { store, ..parts(2, 1) });
    fg.prefill(R1, 17);
    fg.prefill(R2, 17);
    fg.hand_in_all();
    let errors = fg.take_back(LayerId(0)).errors;
    let error = errors[0].as_ref().expect("the first request's read failed").to_string();
    assert_eq!(error, "moving KV entries failed: fetch: injected fault in call 1");
    assert!(errors[1].is_none());
    fg.check_slots_of(R2);
    fg.take_back_all();
}

#[test]
fn a_failing_link_is_tried_again_for_each_request() {
    let faults = Arc::new(Faults::at([0, 2]));
    let transport = Box::new(FaultyTransport { inner: copy_transport(), faults: faults.clone() });
    let mut fg = Foreground::new(PipelineParts { transport, ..parts(2, 1) });
    fg.prefill(R1, 17);
    fg.prefill(R2, 17);
    fg.hand_in_all();
    let errors = fg.take_back(LayerId(0)).errors;
    assert!(errors[0].is_none());
    assert!(errors[1].as_ref().expect("the second request's transfer failed").to_string().contains("gather 2"));
    fg.check_slots_of(R1);
    fg.take_back_all();
    assert_eq!(faults.calls(), 3 + (GEOMETRY.layers as u64 - 1));
}

#[test]
fn a_failing_write_of_a_tail_block_ends_only_the_request_concerned() {
    // Prefill writes once a request and layer; the first write after that is R1's tail block.
    let store = Arc::new(FaultyStore {
        inner: Arc::new(MapStore::default()),
        puts: Faults::at([2 * GEOMETRY.layers as u64]),
        fetches: Faults::none(),
    });
    let mut fg = Foreground::new(PipelineParts { store, ..parts(9, 1) });
    fg.prefill(R1, 4 * 4 - 1);
    fg.prefill(R2, 4 * 4 - 1);
    fg.hand_in_all();
    let errors = fg.take_back(LayerId(0)).errors;
    assert!(errors[0].as_ref().is_some_and(|e| e.to_string().contains("put: injected fault")));
    assert!(errors[1].is_none());
    fg.check_slots_of(R2);
    fg.take_back_all();
}

#[test]
fn a_request_released_while_its_entries_move_harms_nobody() {
    let (transport, starts, open) = gated();
    let mut fg = Foreground::new(PipelineParts { transport, ..parts(2, 1) });
    fg.prefill(R1, 17);
    fg.prefill(R2, 17);
    fg.hand_in_all();
    starts.recv().unwrap();
    // Layer 0 has its entries and holds them; the other layers find the first request gone.
    fg.store.release(R1);
    (0..GEOMETRY.layers).for_each(|_| open.send(()).unwrap());
    assert!(fg.take_back(LayerId(0)).errors.iter().all(Option::is_none));
    for layer in (1..GEOMETRY.layers).map(LayerId::from) {
        let errors = fg.take_back(layer).errors;
        assert!(errors[0].as_ref().is_some_and(|e| e.to_string().contains("not in the store")), "{errors:?}");
        assert!(errors[1].is_none());
    }
    fg.cancel(R1);
    fg.check_slots();
}

#[test]
fn dropping_a_pipeline_with_work_in_flight_neither_hangs_nor_leaks() {
    for half_done in [false, true] {
        let (summarizer, store): (Arc<dyn Summarizer>, Arc<dyn KvStore>) =
            (Arc::new(FirstKey), Arc::new(MapStore::default()));
        let parts = PipelineParts { summarizer: summarizer.clone(), store: store.clone(), ..parts(2, 1) };
        let mut fg = Foreground::new(parts);
        fg.prefill(R1, 17);
        if half_done {
            fg.hand_in_queries_only(LayerId(0));
        } else {
            fg.hand_in_all();
        }
        let offload = fg.offload_again(R1);
        let (dropped, drops) = channel();
        std::thread::spawn(move || {
            drop(fg);
            dropped.send(()).unwrap();
        });
        drops.recv_timeout(Duration::from_secs(30)).expect("dropping the pipeline hangs");
        assert!(offload.wait().is_err(), "the block is in the store already");
        assert_eq!((Arc::strong_count(&summarizer), Arc::strong_count(&store)), (1, 1), "a worker still lives");
    }
}

#[test]
fn queue_depths_and_stage_times_are_counted() {
    let (transport, starts, open) = gated();
    let mut fg = Foreground::new(PipelineParts { transport, ..parts(2, 1) });
    fg.prefill(R1, 17);
    let before = fg.pipeline.metrics();
    fg.hand_in_all();
    starts.recv().unwrap();
    // The transfer of layer 0 stands still: the others must queue behind it.
    while fg.pipeline.metrics().transfer.queued < GEOMETRY.layers - 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    (0..GEOMETRY.layers).for_each(|_| open.send(()).unwrap());
    fg.take_back_all();
    let metrics = fg.pipeline.metrics();
    let layers = GEOMETRY.layers as u64;
    assert_eq!(metrics.predict.tasks - before.predict.tasks, layers);
    assert_eq!(metrics.stage(Stage::Select).tasks - before.select.tasks, layers, "two messages a layer, one task");
    assert_eq!((metrics.waits, metrics.transfer.queued), (layers, 0));
    assert!(metrics.transfer.deepest_queue >= GEOMETRY.layers - 1);
    assert!(metrics.predict.longest <= metrics.predict.busy && metrics.predict.mean() <= metrics.predict.longest);
}

#[test]
fn the_first_fill_is_not_capped_and_later_steps_are() {
    let mut fg = Foreground::new(parts(3, 1));
    fg.prefill(R1, 6 * 4 + 1);
    fg.hand_in_all();
    let first = fg.take_back(LayerId(0));
    assert_eq!((first.filled, first.admitted, first.deferred), (3 * GEOMETRY.kv_heads, 0, 0));
    fg.take_back_all();
    for _ in 0..3 {
        fg.hand_in_all();
        let done = fg.take_back(LayerId(0));
        assert!(done.filled == 0 && done.admitted <= GEOMETRY.kv_heads && done.deferred <= 2 * GEOMETRY.kv_heads);
        fg.take_back_all();
        fg.check_slots();
    }
}

#[test]
fn a_completed_tail_block_is_promoted_without_crossing_the_link() {
    let transport = Box::new(CopyWith(|entries| anyhow::bail!("{entries} entries crossed the link")));
    let mut fg = Foreground::new(PipelineParts { transport, ..parts(8, 8) });
    // No complete block yet: the tail block is the first one.
    fg.prefill(R1, 3);
    for _ in 0..9 {
        fg.hand_in_all();
        fg.take_back_all();
        fg.check_slots();
    }
    let resident = fg.resident(R1, LayerId(1));
    assert_eq!((resident.tail.block(), resident.tail.tokens()), (BlockId(3), 0));
    assert_eq!(resident.in_block_order(KvHead(1)).len(), 3);
    let keys =
        (0..3).map(|b| EntryKey { request: R1, layer: LayerId(1), block: BlockId(b), head: KvHead(1) }).collect();
    let stored = fg.pipeline.fetch(keys).unwrap();
    for (block, stored) in stored.entries.iter().enumerate() {
        let expected = entry(R1, LayerId(1), KvHead(1), BlockId::from(block));
        assert_eq!(bytemuck::cast_slice::<u8, f32>(stored.bytes()), expected);
    }
}

#[test]
fn a_completed_tail_block_stays_in_the_store_when_every_resident_is_wanted() {
    // The predictor wants the residents, blocks 0 and 1, whatever the scores say.
    let want = |_: &PredictBatch<'_>, ranking: &mut Ranking| {
        for head in (0..GEOMETRY.kv_heads).map(KvHead::from) {
            let blocks = [0, 1].map(|b| crate::working_set::RankedBlock { block: BlockId(b), score: 1.0 });
            ranking.set(0, head, blocks.to_vec());
        }
    };
    let mut fg = Foreground::new(PipelineParts { predictor: Box::new(PredictWith(want)), ..parts(2, 2) });
    fg.prefill(R1, 2 * 4 + 3);
    fg.hand_in_all();
    fg.take_back_all();
    let resident = fg.resident(R1, LayerId(0));
    assert_eq!(resident.tail.block(), BlockId(3));
    assert!(!resident.set.head(KvHead(0)).contains(BlockId(2)));
    let key = EntryKey { request: R1, layer: LayerId(0), block: BlockId(2), head: KvHead(0) };
    assert!(block_on(fg.store.fetch(&[key])).is_ok(), "it is in the store all the same");
}

#[test]
fn reads_and_writes_of_a_prefill_answer_with_the_stores_errors() {
    let mut fg = Foreground::new(parts(2, 1));
    fg.prefill(R1, 9);
    let key = |request, block| EntryKey { request, layer: LayerId(0), block, head: KvHead(0) };
    assert_eq!(fg.pipeline.fetch(vec![key(R1, BlockId(1)), key(R1, BlockId(0))]).unwrap().entries.len(), 2);
    assert!(matches!(fg.pipeline.fetch(vec![key(R2, BlockId(0))]), Err(StoreError::Missing(k)) if k.request == R2));
    assert!(matches!(fg.offload_again(R1).wait(), Err(StoreError::Refused { request: R1, .. })));
}
