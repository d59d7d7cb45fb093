//! Logits against transformers' (float32), and the chunked prefill against the token-by-token decode.

use oasis_core::ids::{RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_models::cpu::CpuModel;
use oasis_tests::models::{dense, load, sparse, start, step};
use oasis_tests::references::{shared, smollm2};
use safetensors::SafeTensors;
use std::path::Path;
use std::sync::Arc;

const TOLERANCE: f32 = 2e-3;

struct Reference(Vec<u8>);

impl Reference {
    fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap())
    }

    fn tokens(&self, name: &str) -> Vec<TokenId> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let bytes = file.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(8).map(|b| TokenId(i64::from_le_bytes(b.try_into().unwrap()) as u32)).collect()
    }

    fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        let width = tensor.shape()[tensor.shape().len() - 1];
        let values: Vec<f32> =
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        values.chunks_exact(width).map(<[f32]>::to_vec).collect()
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| if a.is_finite() { (a - b).abs() } else { f32::INFINITY }).fold(0.0, f32::max)
}

/// Prefills `prompt` tokens in chunks, decodes the rest token by token; gives the logits from the last prompt token on.
fn forced(model: &Arc<CpuModel>, tokens: &[TokenId], prompt: usize, chunk: usize) -> Vec<Vec<f32>> {
    let (mut executor, request) = (dense(model, chunk), RequestId(1));
    start(&mut executor, request, &tokens[..prompt], tokens.len() - prompt + 1);
    let mut logits = vec![executor.logits(request).unwrap().to_vec()];
    for &token in &tokens[prompt..] {
        step(&mut executor, request, token);
        logits.push(executor.logits(request).unwrap().to_vec());
    }
    logits
}

#[test]
fn every_fixture_family_matches_transformers_in_both_config_spellings() {
    let Some(fixtures) = shared("models/fixtures") else { return };
    let mut seen = 0;
    for folder in std::fs::read_dir(fixtures).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        let reference = Reference::open(&folder.join("reference.safetensors"));
        let (tokens, expected) = (reference.tokens("tokens"), reference.rows("logits"));
        for config in ["config.json", "config.v4.json"] {
            let copy = tempfile::tempdir().unwrap();
            std::fs::copy(folder.join(config), copy.path().join("config.json")).unwrap();
            std::fs::copy(folder.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
            let model = load(copy.path().to_str().unwrap(), None);
            // Decode from the first token on, from the middle, and a whole prefill, each in another chunk size.
            for (prompt, chunk) in [(1, 1), (150, 37), (163, 64), (300, 512)] {
                let got = forced(&model, &tokens, prompt, chunk);
                for (position, got) in got.iter().enumerate().map(|(i, got)| (prompt - 1 + i, got)) {
                    let difference = largest_difference(got, &expected[position]);
                    assert!(
                        difference <= TOLERANCE,
                        "{} {config}: position {position} of a prompt of {prompt}: {difference}",
                        folder.display()
                    );
                }
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 7, "seven fixtures are expected");
}

/// Both logits of the last positions: the target's, and the head's row that pairs their taps with the next token.
fn check_model(model: &Arc<CpuModel>, reference: &Reference) {
    let tokens = reference.tokens("ids");
    let (expected, expected_draft) = (reference.rows("logits_tail"), reference.rows("draft_logits_tail"));
    let tail = expected.len();
    let first = tokens.len() - tail;
    for (name, prompt) in [("token by token", first + 1), ("one prefill", tokens.len())] {
        let got = forced(model, &tokens, prompt, 512);
        for (got, expected) in got.iter().rev().zip(expected.iter().rev()) {
            let difference = largest_difference(got, expected);
            assert!(difference <= TOLERANCE, "{name}: target logits differ by {difference}");
        }
    }

    // After the last position the greedy next token is appended, as in the reference.
    let mut next = tokens[first + 1..].to_vec();
    let last = expected.last().unwrap();
    next.push(TokenId::from((0..last.len()).fold(0, |best, i| if last[i] > last[best] { i } else { best })));
    let (mut executor, request) = (sparse(model, 1 << 20, &[], Tracer::default()), RequestId(1));
    start(&mut executor, request, &tokens[..=first], tail + 1);
    for (&token, expected) in next.iter().zip(&expected_draft) {
        step(&mut executor, request, token);
        let difference = largest_difference(executor.draft(request).unwrap().0, expected);
        assert!(difference <= TOLERANCE, "draft logits differ by {difference}");
    }
}

#[test]
fn oasis_tiny_and_its_head_match_the_references() {
    let Some(path) = shared("models/oasis-tiny/reference.safetensors") else { return };
    check_model(&oasis_tests::models::oasis_tiny(), &Reference::open(&path));
}

#[test]
fn smollm2_and_its_head_match_the_references() {
    let (Some(path), Some(gguf)) = (shared("models/smollm2-135m/reference.safetensors"), smollm2()) else { return };
    let head = oasis_tests::references::workspace().join("oasis-models/assets/smollm2-135m-eagle3");
    check_model(&load(gguf.to_str().unwrap(), head.to_str()), &Reference::open(&path));
}
