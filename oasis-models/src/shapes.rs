//! Shapes of well-known models, for measurements with random weights. From their `config.json` on the Hugging Face hub.

use crate::draft::Eagle3Spec;
use crate::spec::{DecoderSpec, MoeSpec, RopeScaling, RopeSpec};

/// Names that [`named`] knows.
pub const NAMES: [&str; 3] = ["qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b"];

/// A decoder's shape and that of an EAGLE-3 head for it; `None` for a name that is not in [`NAMES`].
pub fn named(name: &str) -> Option<(DecoderSpec, Eagle3Spec)> {
    let spec = match name {
        // Qwen/Qwen3-8B
        "qwen3-8b" => decoder("qwen3", [4096, 36, 32, 8, 128, 12_288, 151_936], 40_960, 1e6, 1e-6),
        // meta-llama/Llama-3.1-8B-Instruct
        "llama-3.1-8b" => DecoderSpec {
            qk_norm: false,
            rope: RopeSpec {
                theta: 500_000.0,
                scaling: RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_positions: 8192,
                },
            },
            ..decoder("llama", [4096, 32, 32, 8, 128, 14_336, 128_256], 131_072, 500_000.0, 1e-5)
        },
        // Qwen/Qwen3-30B-A3B
        "qwen3-30b-a3b" => DecoderSpec {
            moe: Some(MoeSpec {
                experts: 128,
                experts_per_token: 8,
                intermediate: 768,
                normalize: true,
                sparse_layers: vec![true; 48],
            }),
            ..decoder("qwen3_moe", [2048, 48, 32, 4, 128, 6144, 151_936], 40_960, 1e6, 1e-6)
        },
        _ => return None,
    };
    let head = Eagle3Spec {
        hidden: spec.hidden,
        target_hidden: spec.hidden,
        intermediate: spec.intermediate,
        q_heads: spec.q_heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        draft_vocab: 32_000,
        norm_eps: spec.norm_eps,
        rope: RopeSpec { theta: spec.rope.theta, scaling: RopeScaling::None },
        taps: None,
    };
    Some((spec, head))
}

/// A Qwen3-like decoder; `sizes` are hidden, layers, q_heads, kv_heads, head_dim, intermediate, vocab.
fn decoder(family: &str, sizes: [usize; 7], max_positions: usize, theta: f32, norm_eps: f32) -> DecoderSpec {
    let [hidden, layers, q_heads, kv_heads, head_dim, intermediate, vocab] = sizes;
    DecoderSpec {
        family: family.to_owned(),
        hidden,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        intermediate,
        vocab,
        norm_eps,
        max_positions,
        rope: RopeSpec { theta, scaling: RopeScaling::None },
        tied_embeddings: false,
        qk_norm: true,
        attention_bias: false,
        moe: None,
        eos: Vec::new(),
        bos: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_shape_whose_heads_divide() {
        for name in NAMES {
            let (spec, head) = named(name).expect("the name is known");
            assert!(spec.q_heads.is_multiple_of(spec.kv_heads) && head.target_hidden == spec.hidden, "{name}");
        }
        assert!(named("qwen3").is_none());
    }
}
