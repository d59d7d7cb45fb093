//! A cap that follows the link: the device's own measurements, and selections that obey.

use crate::Scene;
use oasis_core::executor::{Executor, ExecutorStats};
use oasis_core::ids::TokenId;
use oasis_cuda::executor::{CudaExecutor, StepMode};
use oasis_tests::gpu::{Setup, Speech};
use std::time::Duration;

/// Blocks per KV head: fewer than the contexts have.
const BUDGET: usize = 24;
const TOKENS: usize = 60;

fn start(scene: &Scene, mode: StepMode, settings: &[&str]) -> CudaExecutor {
    let settings: Vec<&str> = std::iter::once("predictor.kind=last-query").chain(settings.iter().copied()).collect();
    Setup { mode, ..Setup::sparse(BUDGET, &settings, 2, 2_000) }.start(&scene.device, &scene.tiny)
}

fn prompts(scene: &Scene) -> [Vec<TokenId>; 3] {
    [9, 700, 1_500].map(|tokens| scene.prompts.prose(tokens, 4))
}

pub fn a_cap_that_cannot_move_is_a_constant_one(scene: &Scene) {
    for mode in [StepMode::Graph, StepMode::Streams] {
        let [mut constant, mut follows] = [
            &["selector.fetch_ratio=0.25"][..],
            &["selector.kind=adaptive-cap", "selector.min_ratio=0.25", "selector.max_ratio=0.25"],
        ]
        .map(|settings| start(scene, mode, settings));
        for prompt in prompts(scene) {
            let expected = Speech::alone(&mut constant, &prompt, TOKENS);
            assert_eq!(Speech::alone(&mut follows, &prompt, TOKENS), expected, "{mode:?}, prompt of {}", prompt.len());
        }
        let counters = |s: ExecutorStats| (s.filled_entries, s.admitted_entries, s.deferred_entries, s.cap_entries);
        assert_eq!(counters(follows.stats()), counters(constant.stats()), "{mode:?}");
        assert!(constant.link_cap().is_none() && follows.link_cap().is_some());
    }
}

pub fn a_cap_follows_what_the_device_measures_of_the_link(scene: &Scene) {
    let run = |mode, load: &str| {
        let settings = ["selector.kind=adaptive-cap", "selector.min_ratio=0.05", "selector.max_ratio=1.0", load];
        let mut executor = start(scene, mode, &settings);
        for prompt in prompts(scene) {
            Speech::alone(&mut executor, &prompt, TOKENS);
        }
        (executor.link_cap().expect("a cap that follows the link"), executor.stats())
    };
    for mode in [StepMode::Graph, StepMode::Streams] {
        let ((low, low_rate), low_stats) = run(mode, "selector.load=0.000001");
        let ((high, high_rate), high_stats) = run(mode, "selector.load=0.9");
        println!("  {mode:?}: cap {low} at {low_rate:?}, {high} at {high_rate:?}");
        for rate in [low_rate, high_rate] {
            let rate = rate.expect("something was carried");
            // An entry of 4 to 8 KiB, and a layer of a small model, on any link and device.
            assert!(rate.entry > Duration::from_nanos(20) && rate.entry < Duration::from_millis(1), "{rate:?}");
            assert!(rate.interval > Duration::from_nanos(500) && rate.interval < Duration::from_millis(50), "{rate:?}");
        }
        assert_eq!(low, 1, "the least, as the link has no time");
        assert!((low..=BUDGET).contains(&high), "{high}");
        // Layers that the host launches one by one leave the link time.
        if mode == StepMode::Streams {
            assert!(high > low, "{high}");
            assert!(high_stats.admitted_entries > low_stats.admitted_entries, "{high_stats:?}, {low_stats:?}");
        }
    }
}
