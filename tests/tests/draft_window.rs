//! The draft head's window, `kv.draft_blocks`.

use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState};
use oasis_tests::models::{dense, oasis_tiny, read, sparse};
use oasis_tests::prompts::Prompts;
use std::sync::Arc;

const REQUEST: RequestId = RequestId(1);
const PROMPT: usize = 200;
const STEPS: usize = 40;

fn prompt(model: &CpuModel) -> PromptState {
    read(model, &Prompts::new().prose(PROMPT, 0), 512)
}

/// Tokens of a greedy answer, and in bits what the head said in every step.
fn answer(executor: &mut CpuExecutor, prompt: &PromptState) -> (Vec<TokenId>, Vec<Vec<u32>>) {
    let mut tokens = vec![executor.resume(prompt, REQUEST, STEPS, SamplingParams::default()).unwrap()];
    let mut drafts = Vec::new();
    while tokens.len() < STEPS {
        let row = DecodeRow { request: REQUEST, token: tokens[tokens.len() - 1] };
        tokens.push(executor.decode(&[row]).unwrap().remove(0).unwrap());
        drafts.extend(executor.draft(REQUEST).map(|(logits, _)| logits.iter().map(|logit| logit.to_bits()).collect()));
    }
    (tokens, drafts)
}

fn windowed(model: &Arc<CpuModel>, budget: usize, blocks: &str) -> CpuExecutor {
    sparse(model, budget, &[&format!("kv.draft_blocks={blocks}"), "predictor.kind=draft-query"], Tracer::default())
}

#[test]
fn a_window_changes_what_the_head_says_from_where_the_context_is_longer() {
    let model = oasis_tiny();
    let prompt = prompt(&model);
    let (tokens, all) = answer(&mut windowed(&model, 8, "\"all\""), &prompt);
    // 200 prompt tokens and the 39 that are run come to 15 blocks.
    assert!(answer(&mut windowed(&model, 8, "15"), &prompt) == (tokens, all.clone()));
    // The head's row of the first step stands at position 199, in block 12; the step at position 208 begins block 13.
    let (_, narrow) = answer(&mut windowed(&model, 8, "13"), &prompt);
    let first_other = all.iter().zip(&narrow).position(|(all, narrow)| all != narrow);
    assert_eq!(first_other, Some(208 - 199));
}

#[test]
fn a_window_changes_no_token_of_a_step_that_sees_everything() {
    let model = oasis_tiny();
    let prompt = prompt(&model);
    let (expected, _) = answer(&mut dense(&model, 512), &prompt);
    let (tokens, drafts) = answer(&mut windowed(&model, 99, "2"), &prompt);
    assert_eq!(tokens, expected);
    assert_eq!(drafts.len(), STEPS - 1);
}

#[test]
fn device_memory_holds_the_window_alone() {
    let model = oasis_tiny();
    let prompt = prompt(&model);
    let draft = |blocks: &str| {
        let mut executor = windowed(&model, 8, blocks);
        executor.resume(&prompt, REQUEST, STEPS, SamplingParams::default()).unwrap();
        executor.stats().device.draft
    };
    // The prompt, and all tokens of the answer but the last.
    assert_eq!(draft("\"all\"") * 3 * 16, draft("3") * (PROMPT + STEPS - 1) as u64);
}
