//! Prefill and decode on two nodes say what one node says, whatever happens to the network, or say why not.

mod access;
mod answers;
mod faults;
mod moves;
mod one_sided;
mod random;

use oasis_core::engine::GenerateRequest;
use oasis_models::cpu::CpuOptions;
use oasis_tests::nodes::{Said, Setup, run};
use oasis_tests::synthetic;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(200);

/// Random weights, blocks of 4 tokens, K of 3 blocks.
fn setup(predictor: &str, selector: &str) -> Setup {
    let options = CpuOptions { block_tokens: 4, prefill_chunk: 16, threads: 1, kv_memory: 0 };
    let settings = [format!("predictor.kind={predictor}"), format!("selector.kind={selector}")];
    Setup::new(synthetic::model(7), options, 3, &settings.each_ref().map(String::as_str))
}

fn alone(setup: &Setup, requests: &[GenerateRequest]) -> Vec<Said> {
    let said = requests.iter().map(|request| run(&mut setup.single(), std::slice::from_ref(request), |_, _, _| ()).1);
    let said: Vec<Said> = said.flatten().collect();
    assert!(said.iter().all(|said| said.finished), "{said:?}");
    said
}
