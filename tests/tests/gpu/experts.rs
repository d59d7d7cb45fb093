//! Mixtures of experts, top-k and top-p.

use crate::Scene;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::RequestId;
use oasis_core::sampling::SamplingParams;
use oasis_cuda::executor::{CudaExecutor, StepMode};
use oasis_tests::gpu::Setup;
use oasis_tests::mixtures::{self, EXPERT_WIDTH, HIDDEN, NEAR, Reference, TOP, batch, check_draws, draws, prompts};

/// A prompt of 300 has a chunk that goes by tiles and one that is streamed.
fn setup(budget: Option<usize>, mode: StepMode) -> Setup {
    let settings = vec!["predictor.kind=draft-query".to_owned()];
    Setup { budget, settings, mode, prefill_chunk: 256, ..Setup::dense(6, 512) }
}

/// Dense, and with working sets that hold all blocks, beside the rows of a draft head.
pub fn a_mixture_says_what_it_says_on_the_cpu(scene: &Scene) {
    for normalize in [true, false] {
        let model = mixtures::model(normalize);
        let reference = Reference::new(&model);
        for (budget, mode) in [(None, StepMode::Graph), (Some(64), StepMode::Graph), (Some(64), StepMode::Streams)] {
            let (gap, different) = reference.compare(&mut setup(budget, mode).start(&scene.device, &model));
            println!("  normalize {normalize}, budget {budget:?}, {mode:?}: {different} differ, gap {gap:.4}");
            assert!(gap < NEAR, "budget {budget:?}, {mode:?}: {different} places differ, gap {gap}");
        }
    }
}

pub fn bytes_of_a_step_count_the_experts_that_have_rows(scene: &Scene) {
    let model = mixtures::model(true);
    let mut gpu = setup(None, StepMode::Graph).start(&scene.device, &model);
    let expert = (3 * HIDDEN * EXPERT_WIDTH * 2) as u64;
    // No step has run.
    let idle = gpu.step_bytes().weights;
    let token = mixtures::start(&mut gpu, RequestId(0), &prompts()[1], SamplingParams::default());
    gpu.decode(&[DecodeRow { request: RequestId(0), token }]).unwrap().remove(0).unwrap();
    // One row, two mixtures.
    assert_eq!(gpu.step_bytes().weights, idle + (2 * TOP) as u64 * expert);
}

pub fn draws_stay_among_the_candidates_of_the_cpu(scene: &Scene) {
    let model = mixtures::model(true);
    let mut gpu = setup(None, StepMode::Graph).start(&scene.device, &model);
    let said = batch(&mut gpu, &draws(), None);
    check_draws(&model, &said);
    assert_eq!(batch(&mut gpu, &draws(), None), said, "a seed gives the same tokens");
    // Rows that leave nothing out, in places of rows that did.
    let plain: Vec<_> = draws().into_iter().skip(4).collect();
    let alone = batch(&mut gpu, &plain, None);
    check_draws(&model, &[said[..4].to_vec(), alone].concat());
}

pub fn experts_of_other_widths_are_refused_before_anything_is_copied(scene: &Scene) {
    let mut spec = mixtures::model(true).spec;
    spec.moe.as_mut().expect("a mixture").intermediate = 96;
    let options = setup(None, StepMode::Graph).options(&spec);
    let error = CudaExecutor::plan(&scene.device, &spec, None, &options).unwrap_err().to_string();
    assert!(error.contains("multiples of 64") && error.contains("found 256 and 96"), "{error}");
}
