//! GGUF files written by the test from the safetensors fixtures: both must give the same weights.

use std::collections::BTreeSet;
use std::path::Path;

use oasis_models::checkpoint::{self, Checkpoint, CheckpointError, Precision};
use oasis_models::spec::{DecoderSpec, RopeScaling};
use safetensors::SafeTensors;

use crate::common::{self, floats};
use crate::gguf_writer::{GgufWriter, with_tokenizer};
use crate::safetensors_weights::assert_same;

/// llama.cpp's order of query and key rows: rotary pairs adjacent (convert_hf_to_gguf.py, `permute`).
fn interleave(rows: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let count = rows.len() / cols;
    let source = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % 2 * (head_dim / 2) + within / 2
    };
    (0..count).flat_map(|row| rows[source(row) * cols..(source(row) + 1) * cols].iter().copied()).collect()
}

fn metadata(arch: &str, spec: &DecoderSpec) -> GgufWriter {
    let key = |key: &str| format!("{arch}.{key}");
    let writer = GgufWriter::default()
        .text("general.architecture", arch)
        .u32(&key("block_count"), spec.layers as u32)
        .u32(&key("embedding_length"), spec.hidden as u32)
        .u32(&key("feed_forward_length"), spec.intermediate as u32)
        .u32(&key("attention.head_count"), spec.q_heads as u32)
        .u32(&key("attention.head_count_kv"), spec.kv_heads as u32)
        .u32(&key("attention.key_length"), spec.head_dim as u32)
        .u32(&key("context_length"), 2048)
        .f32(&key("rope.freq_base"), spec.rope.theta)
        .f32(&key("attention.layer_norm_rms_epsilon"), spec.norm_eps);
    match &spec.moe {
        None => writer,
        Some(moe) => writer
            .u32(&key("expert_count"), moe.experts as u32)
            .u32(&key("expert_used_count"), moe.experts_per_token as u32)
            .u32(&key("expert_feed_forward_length"), moe.intermediate as u32),
    }
}

const LAYER: [(&str, &str); 12] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
];

/// The fixture as llama.cpp would store it.
fn convert(arch: &str, spec: &DecoderSpec, safetensors: &Path) -> GgufWriter {
    let bytes = std::fs::read(safetensors).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut writer = with_tokenizer(metadata(arch, spec), spec.vocab);
    let mut done = BTreeSet::new();
    let mut add = |writer: GgufWriter, from: &str, to: &str| {
        let Ok(tensor) = file.tensor(from) else { return writer };
        let mut data = floats(&file, from);
        if arch == "llama" && (to.ends_with("attn_q.weight") || to.ends_with("attn_k.weight")) {
            data = interleave(&data, spec.hidden, spec.head_dim);
        }
        done.insert(from.to_owned());
        writer.tensor(to, tensor.shape(), &data)
    };
    let outer = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
    for (from, to) in outer {
        writer = add(writer, &format!("{from}.weight"), &format!("{to}.weight"));
    }
    for layer in 0..spec.layers {
        for (from, to) in LAYER {
            writer = add(writer, &format!("model.layers.{layer}.{from}.weight"), &format!("blk.{layer}.{to}.weight"));
        }
        for part in ["gate", "up", "down"] {
            let Some(moe) = &spec.moe else { continue };
            let name = |expert| format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            let stacked: Vec<f32> = (0..moe.experts).flat_map(|expert| floats(&file, &name(expert))).collect();
            let shape = [&[moe.experts], file.tensor(&name(0)).unwrap().shape()].concat();
            writer = writer.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, &stacked);
        }
    }
    assert!(done.len() >= 30 || spec.moe.is_some());
    writer
}

fn open(bytes: &[u8]) -> checkpoint::Result<Checkpoint> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    checkpoint::open(path.to_str().unwrap())
}

#[test]
fn gguf_and_safetensors_of_a_model_give_the_same_weights_and_spec() {
    for (name, arch) in [("llama", "llama"), ("qwen3", "qwen3"), ("qwen3-tied", "qwen3"), ("qwen3-moe", "qwen3moe")] {
        let Some(folder) = common::shared(&format!("models/fixtures/{name}")) else { return };
        let reference = checkpoint::open(folder.to_str().unwrap()).unwrap();
        let file = convert(arch, reference.spec(), &folder.join("model.safetensors")).bytes();
        let opened = open(&file).unwrap();
        let mut expected = reference.spec().clone();
        expected.eos = vec![3];
        assert_eq!(opened.spec(), &expected, "{name}");
        assert_same(&opened.load_weights(Precision::Auto, &mut |_| {}).unwrap(), &folder.join("model.safetensors"));
        assert_eq!(opened.tokenizer().unwrap().encode("aab<|end|>").unwrap(), [0, 2, 3]);
        let messages = [oasis_models::tokenizer::ChatMessage::new("user", "hi")];
        assert_eq!(opened.chat_template().unwrap().render(&messages, true).unwrap(), "<|end|>hi");
    }
}

/// A whole model of one layer, small enough for mutation: hidden 32, 2 heads of 16, Q8_0 projections.
pub fn tiny() -> GgufWriter {
    let spec = DecoderSpec {
        layers: 1,
        hidden: 32,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 16,
        intermediate: 32,
        vocab: 8,
        ..checkpoint::open("oasis-tiny").unwrap().spec().clone()
    };
    let mut writer = with_tokenizer(metadata("llama", &spec), 8);
    let block = [[0x00, 0x3c].as_slice(), &[1; 32]].concat();
    for (name, rows) in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)] {
        writer = writer.raw_tensor(&format!("blk.0.{name}.weight"), &[rows, 32], 8, &block.repeat(rows));
    }
    for name in ["ffn_gate", "ffn_up", "ffn_down"] {
        writer = writer.raw_tensor(&format!("blk.0.{name}.weight"), &[32, 32], 8, &block.repeat(32));
    }
    for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        writer = writer.tensor(&format!("{name}.weight"), &[32], &[1.0; 32]);
    }
    writer.raw_tensor("token_embd.weight", &[8, 32], 8, &block.repeat(8))
}

#[test]
fn quantised_matrices_become_bf16_and_output_is_tied_when_absent() {
    let opened = open(&tiny().bytes()).unwrap();
    assert!(opened.spec().tied_embeddings);
    let weights = opened.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    assert!(matches!(weights.embed.data, oasis_models::weights::MatrixData::Bf16(_)));
    assert!(common::values(&weights.layers[0].mlp.clone().into_dense().gate_up).iter().all(|&value| value == 1.0));
    assert_eq!(opened.provenance().dtype, "Q8_0");
}

trait IntoDense {
    fn into_dense(self) -> oasis_models::weights::GatedMlp;
}

impl IntoDense for oasis_models::weights::Mlp {
    fn into_dense(self) -> oasis_models::weights::GatedMlp {
        match self {
            Self::Dense(mlp) => mlp,
            Self::Moe { .. } => panic!("expected a dense MLP"),
        }
    }
}

#[test]
fn rope_scaling_keys_and_frequency_divisors_are_read() {
    let scaling = |writer: GgufWriter| open(&writer.bytes()).map(|opened| opened.spec().rope.scaling.clone());
    let base = || tiny().text("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.0);
    let yarn = scaling(base().u32("llama.rope.scaling.original_context_length", 512)).unwrap();
    assert_eq!(
        yarn,
        RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_positions: 512,
            attention_factor: 0.1 * 4_f32.ln() + 1.0
        }
    );
    assert_eq!(scaling(tiny().tensor("rope_freqs.weight", &[8], &[1.0; 8])).unwrap(), RopeScaling::None);
    let odd = scaling(tiny().tensor("rope_freqs.weight", &[8], &[1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    assert!(matches!(odd, Err(CheckpointError::Unsupported(_))));
}

#[test]
fn llama3_divisors_give_back_their_parameters() {
    let (theta, dim, factor) = (1e6_f64, 16, 8.0_f64);
    let divisors: Vec<f32> = (0..dim / 2)
        .map(|i| {
            let wavelength = std::f64::consts::TAU * theta.powf(2.0 * f64::from(i) / f64::from(dim));
            let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
            (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
        })
        .collect();
    let opened = open(&tiny().tensor("rope_freqs.weight", &[8], &divisors).bytes()).unwrap();
    assert_eq!(
        opened.spec().rope.scaling,
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 }
    );
    opened.check_weights().unwrap();
}

#[test]
fn what_is_not_implemented_is_refused() {
    let cases = [
        (tiny().u32("llama.attention.sliding_window", 512), "sliding_window"),
        (tiny().u32("llama.expert_count", 8), "expert_count"),
        (tiny().u32("llama.rope.dimension_count", 8), "dimension_count"),
        (tiny().f32("llama.logit_scale", 0.5), "logit_scale"),
        (tiny().text("llama.rope.scaling.type", "longrope"), "scaling.type"),
    ];
    for (writer, key) in cases {
        let error = open(&writer.bytes()).unwrap_err();
        assert!(matches!(error, CheckpointError::Unsupported(_)) && error.problem().what.contains(key), "{error}");
    }
    let mut unknown_version = tiny().bytes();
    unknown_version[4] = 9;
    assert!(matches!(open(&unknown_version), Err(CheckpointError::Unsupported(_))));
    assert!(matches!(open(b"GGML and so on"), Err(CheckpointError::Malformed(_))));
    let whole = tiny().bytes();
    for keep in [0, 3, 24, 200, whole.len() / 2, whole.len() - 1100] {
        assert!(matches!(open(&whole[..keep]), Err(CheckpointError::Truncated(_))), "{keep}");
    }
    let extra = open(&tiny().tensor("blk.0.attn_q_norm.weight", &[16], &[1.0; 16]).bytes()).unwrap();
    assert!(matches!(extra.check_weights(), Err(CheckpointError::UnexpectedTensor(_))));
    let mut overlapping = tiny().bytes();
    let name = b"blk.0.attn_k.weight";
    let at = overlapping.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // Dimensions, two sizes and the type lie between the name and the offset.
    overlapping[at + 24..at + 32].copy_from_slice(&0_u64.to_le_bytes());
    let error = open(&overlapping).unwrap_err();
    assert!(matches!(error, CheckpointError::Malformed(_)) && error.problem().hint.contains("overlap"), "{error}");
}
