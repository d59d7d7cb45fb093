//! Predictors that choose again before attention, or a layer ahead.

use crate::Scene;
use oasis_core::executor::{Executor, ExecutorStats};
use oasis_core::ids::TokenId;
use oasis_cuda::executor::Residency;
use oasis_tests::gpu::{self, Setup, Speech};

/// Blocks per KV head: far fewer than the contexts have.
const BUDGET: usize = 8;
const TOKENS: usize = 60;

fn prompts(scene: &Scene) -> [Vec<TokenId>; 3] {
    [9, 700, 1_500].map(|tokens| scene.prompts.prose(tokens, 8))
}

fn run(scene: &Scene, settings: &[&str], along: Option<&[Speech]>) -> (Vec<Speech>, ExecutorStats) {
    let mut executor = Setup::sparse(BUDGET, settings, 2, 2_000).start(&scene.device, &scene.tiny);
    let said = (prompts(scene).iter().enumerate())
        .map(|(index, prompt)| match along {
            None => Speech::alone(&mut executor, prompt, TOKENS),
            Some(along) => Speech::along(&mut executor, prompt, &along[index].tokens),
        })
        .collect();
    (said, executor.stats())
}

pub fn a_choice_that_is_never_corrected_is_that_of_last_query(scene: &Scene) {
    for selector in ["selector.fetch_ratio=0.25", "selector.kind=lfu"] {
        let (expected, plain) = run(scene, &["predictor.kind=last-query", selector], None);
        let settings = ["predictor.kind=freekv", "predictor.min_similarity=-1", selector];
        let (said, stats) = run(scene, &settings, None);
        assert!(said == expected, "{selector}");
        let counters = |s: &ExecutorStats| (s.filled_entries, s.admitted_entries, s.deferred_entries, s.cap_entries);
        assert_eq!(counters(&stats), counters(&plain), "{selector}");
        assert!(stats.admitted_entries > 0);
    }
}

pub fn a_choice_that_is_always_corrected_is_that_of_exact(scene: &Scene) {
    let fetch_all = "selector.kind=fetch-all";
    let (exact, plain) = run(scene, &["predictor.kind=exact", fetch_all], None);
    let settings = ["predictor.kind=freekv", "predictor.min_similarity=1", fetch_all];
    let (corrected, stats) = run(scene, &settings, Some(&exact));
    let (late, _) = run(scene, &["predictor.kind=last-query", fetch_all], Some(&exact));
    let error = |said: &[Speech]| {
        // The first prompt has no more blocks than slots.
        (exact.iter().zip(said).skip(1)).map(|(exact, said)| exact.compare(said).median()).fold(0.0, f64::max)
    };
    let (corrected, late) = (error(&corrected), error(&late));
    println!("  logits beside exact: {corrected:.4} corrected, {late:.4} by the step before");
    // The same blocks in other slots: the same numbers in another order.
    assert!(corrected < late / 2.0, "{corrected} corrected, {late} by the step before");
    // All steps but the first, and but those of the first prompt before it has a block, choose twice.
    let info = Setup::sparse(BUDGET, &settings, 2, 2_000).start(&scene.device, &scene.tiny).info().clone();
    let a_step = (info.geometry.layers * info.geometry.kv_heads * info.cap) as u64;
    let again = (stats.cap_entries - plain.cap_entries) / a_step;
    let (most, without_block) = (3 * (TOKENS as u64 - 2), 16 - 9);
    assert!((most - without_block..=most).contains(&again), "{again} of {most} steps chose again");
}

pub fn policies_without_device_code_are_refused_beside_them(scene: &Scene) {
    for kind in ["predictor.kind=freekv", "predictor.kind=infinigen"] {
        let mut options = Setup::sparse(BUDGET, &[kind], 1, 500).options(&scene.tiny.spec);
        let Residency::Sparse(sparse) = &mut options.residency else { unreachable!("the setup is sparse") };
        sparse.selector = None;
        let error = gpu::start(&scene.device, &scene.tiny, options).err().expect("the host cannot run it").to_string();
        assert!(error.contains("expected policies with device code") && error.contains("hint"), "{error}");
    }
}
