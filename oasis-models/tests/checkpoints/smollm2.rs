//! SmolLM2-135M-Instruct: a real GGUF file.

use oasis_models::checkpoint::{self, Precision};
use oasis_models::spec::RopeScaling;
use oasis_models::tokenizer::ChatMessage;
use oasis_models::weights::{Matrix, Mlp};
use safetensors::SafeTensors;

use crate::common::{self, floats, values};

/// Rows `first..` and leading columns of a matrix.
fn part(matrix: &Matrix, first: usize, rows: usize, cols: usize) -> Vec<f32> {
    let all = values(matrix);
    (first..first + rows).flat_map(|row| all[row * matrix.cols..row * matrix.cols + cols].to_vec()).collect()
}

#[test]
fn spec_and_weights_are_those_of_the_reference_converter() {
    let Some(path) = common::smollm2() else { return };
    let opened = checkpoint::open(path.to_str().unwrap()).unwrap();
    let spec = opened.spec();
    assert_eq!((spec.family.as_str(), spec.hidden, spec.layers), ("llama", 576, 30));
    assert_eq!((spec.q_heads, spec.kv_heads, spec.head_dim, spec.intermediate), (9, 3, 64, 1536));
    assert_eq!((spec.vocab, spec.max_positions, spec.norm_eps), (49_152, 8192, 1e-5));
    assert_eq!((spec.rope.theta, &spec.rope.scaling), (100_000.0, &RopeScaling::None));
    assert!(spec.tied_embeddings && !spec.qk_norm && !spec.attention_bias);
    assert_eq!((spec.eos.as_slice(), spec.bos), ([2].as_slice(), None));
    assert_eq!(opened.provenance().dtype, "Q4_1");

    let weights = opened.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    let reference = include_bytes!("../data/smollm2_rows.safetensors");
    let reference = SafeTensors::deserialize(reference).unwrap();
    let rounded = |name: &str| -> Vec<f32> {
        floats(&reference, name).into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect()
    };
    let qkv = &weights.layers[3].attention.qkv;
    assert_eq!(part(qkv, 64, 64, 16), rounded("q"));
    assert_eq!(part(qkv, 576 + 128, 64, 16), rounded("k"));
    assert_eq!(part(qkv, 576 + 192 + 100, 4, 576), rounded("v"));
    assert_eq!(part(&weights.layers[29].attention.o, 571, 5, 576), rounded("o"));
    let Mlp::Dense(mlp) = &weights.layers[7].mlp else { panic!("expected a dense MLP") };
    assert_eq!(part(&mlp.down, 0, 2, 1536), rounded("down"));
    assert_eq!(part(&mlp.gate_up, 1536 + 1535, 1, 576), rounded("up"));
    assert_eq!(part(&weights.embed, 49_150, 2, 576), rounded("embed"));
    assert_eq!(weights.norm, floats(&reference, "norm"));

    let head = checkpoint::open_head("smollm2-135m-eagle3").unwrap();
    head.check_fits(spec).unwrap();
}

#[test]
fn the_chat_template_and_tokenizer_give_the_reference_prompt() {
    let (Some(path), Some(reference)) = (common::smollm2(), common::shared("models/smollm2-135m/refs.json")) else {
        return;
    };
    let opened = checkpoint::open(path.to_str().unwrap()).unwrap();
    let reference = common::json(&reference);
    let messages = [ChatMessage::new("user", "What is the capital of France?")];
    let prompt = opened.chat_template().unwrap().render(&messages, true).unwrap() + "The capital of France is";
    assert_eq!(prompt, reference["text"].as_str().unwrap());
    let ids = opened.tokenizer().unwrap().encode_prompt(&prompt).unwrap();
    let expected: Vec<u32> = serde_json::from_value(reference["ids"].clone()).unwrap();
    assert_eq!(ids, expected);
}
