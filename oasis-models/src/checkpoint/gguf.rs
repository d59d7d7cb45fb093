//! GGUF metadata to a [`DecoderSpec`].

use crate::checkpoint::config::{check_heads, limits, rope};
use crate::format::error::{CheckpointError, Result};
use crate::format::gguf::Gguf;
use crate::format::map::ConfigMap;
use crate::spec::{DecoderSpec, MoeSpec, RopeScaling, RopeSpec};

const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Per-architecture keys: `llama.block_count` and so on.
struct Keys<'a> {
    config: ConfigMap<'a>,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn count(&self, key: &str, max: usize) -> Result<usize> {
        self.config.count(&self.key(key), max)
    }

    fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.config.opt_count(&self.key(key), max)
    }

    fn opt_positive(&self, key: &str) -> Result<Option<f64>> {
        self.config.opt_positive(&self.key(key))
    }

    fn refuse(&self, key: &str, expected: &str, hint: &str) -> CheckpointError {
        self.config.refuse(&self.key(key), expected, hint)
    }
}

impl Gguf {
    /// The decoder that the metadata describes; `bos` is left empty, as it depends on the tokenizer's settings.
    pub fn spec(&self) -> Result<DecoderSpec> {
        let config = self.config();
        let arch = config
            .opt_str("general.architecture")?
            .ok_or_else(|| config.missing("general.architecture", "a model family"))?;
        let family = match arch {
            "llama" | "qwen3" => arch,
            "qwen3moe" => "qwen3_moe",
            _ => {
                let hint = "this family is not implemented";
                return Err(config.refuse("general.architecture", "llama, qwen3 or qwen3moe", hint));
            }
        };
        let keys = Keys { config: config.clone(), arch };
        self.refuse_unsupported(&keys)?;
        let hidden = keys.count("embedding_length", limits::WIDTH)?;
        let q_heads = keys.count("attention.head_count", limits::HEADS)?;
        let kv_heads = keys.opt_count("attention.head_count_kv", limits::HEADS)?.unwrap_or(q_heads);
        let head_dim = self.head_dim(&keys, hidden, q_heads)?;
        let layers = keys.count("block_count", limits::LAYERS)?;
        let embedding = self.table.find("token_embd.weight")?;
        let vocab = embedding.shape.first().copied().filter(|&vocab| vocab <= limits::VOCAB).unwrap_or(1);
        let max_positions = keys.count("context_length", limits::POSITIONS)?;
        let rope = RopeSpec {
            theta: keys.opt_positive("rope.freq_base")?.unwrap_or(10_000.0) as f32,
            scaling: self.rope_scaling(&keys, head_dim, max_positions)?,
        };
        let moe = if arch == "qwen3moe" { Some(moe(&keys, layers)?) } else { None };
        let dense_width = keys.opt_count("feed_forward_length", limits::WIDTH)?;
        let spec = DecoderSpec {
            family: family.to_owned(),
            hidden,
            layers,
            q_heads,
            kv_heads,
            head_dim,
            intermediate: match (dense_width, &moe) {
                (Some(width), _) => width,
                (None, Some(moe)) => moe.intermediate,
                (None, None) => keys.count("feed_forward_length", limits::WIDTH)?,
            },
            vocab,
            norm_eps: config.positive(&keys.key("attention.layer_norm_rms_epsilon"))? as f32,
            max_positions: rope::scaled_positions(&rope.scaling, max_positions),
            rope,
            tied_embeddings: !self.table.entries.contains_key("output.weight"),
            qk_norm: arch != "llama",
            attention_bias: self.table.entries.contains_key("blk.0.attn_q.bias"),
            moe,
            eos: eos(&config, vocab)?,
            bos: None,
        };
        check_heads(&self.table.name, spec.q_heads, spec.kv_heads, spec.head_dim)?;
        Ok(spec)
    }

    fn refuse_unsupported(&self, keys: &Keys<'_>) -> Result<()> {
        let config = &keys.config;
        for key in ["attention.head_count", "attention.head_count_kv", "feed_forward_length"] {
            if self.arrays.contains_key(&keys.key(key)) {
                return Err(CheckpointError::unsupported(
                    config.what(&keys.key(key)),
                    "one number for all layers",
                    "a list",
                    "models whose layers differ in shape are not implemented",
                ));
            }
        }
        if keys.config.opt_usize(&keys.key("attention.sliding_window"))?.is_some_and(|window| window > 0) {
            let hint = "sliding-window attention is not implemented";
            return Err(keys.refuse("attention.sliding_window", "0 or nothing", hint));
        }
        if keys.arch != "qwen3moe" && config.opt_usize(&keys.key("expert_count"))?.is_some_and(|count| count > 0) {
            return Err(keys.refuse("expert_count", "0 or nothing", "experts are implemented for qwen3moe only"));
        }
        for key in ["logit_scale", "embedding_scale", "residual_scale", "attention.scale"] {
            if config.opt_f64(&keys.key(key))?.is_some_and(|scale| scale != 0.0 && scale != 1.0) {
                return Err(keys.refuse(key, "1 or nothing", "this scaling is not implemented"));
            }
        }
        Ok(())
    }

    fn head_dim(&self, keys: &Keys<'_>, hidden: usize, q_heads: usize) -> Result<usize> {
        let head_dim = match keys.opt_count("attention.key_length", limits::HEAD_DIM)? {
            Some(length) => length,
            None if hidden.is_multiple_of(q_heads) => hidden / q_heads,
            None => keys.count("attention.key_length", limits::HEAD_DIM)?,
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if keys.opt_count(key, limits::HEAD_DIM)?.is_some_and(|length| length != head_dim) {
                return Err(keys.refuse(key, &format!("the head width {head_dim}"), "partial RoPE is not implemented"));
            }
        }
        Ok(head_dim)
    }

    fn rope_scaling(&self, keys: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<RopeScaling> {
        if self.table.entries.contains_key("rope_freqs.weight") {
            return self.llama3_scaling(head_dim);
        }
        let factor = keys.opt_positive("rope.scaling.factor")?.unwrap_or(1.0);
        match keys.config.opt_str(&keys.key("rope.scaling.type"))? {
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") if factor >= 1.0 => Ok(RopeScaling::Linear { factor: factor as f32 }),
            Some("yarn") if factor >= 1.0 => {
                let original = keys.opt_count("rope.scaling.original_context_length", limits::POSITIONS)?;
                let attention = keys.opt_positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
                Ok(RopeScaling::Yarn {
                    factor: factor as f32,
                    beta_fast: keys.opt_positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0) as f32,
                    beta_slow: keys.opt_positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0) as f32,
                    original_max_positions: original.unwrap_or(max_positions),
                    attention_factor: (attention * rope::yarn_mscale(factor, 1.0)) as f32,
                })
            }
            _ => Err(keys.refuse(
                "rope.scaling.type",
                "none, linear or yarn, with a factor of at least 1",
                "see the key's documentation",
            )),
        }
    }

    /// GGUF stores Llama 3's scaling as one divisor a frequency; its parameters are found again from the divisors.
    fn llama3_scaling(&self, head_dim: usize) -> Result<RopeScaling> {
        let name = "rope_freqs.weight";
        let entry = self.table.weights(name, &[head_dim / 2])?;
        let mut divisors = Vec::new();
        self.table.read_rows(entry, 1, &mut |_, row| divisors.extend_from_slice(row))?;
        if divisors.iter().all(|&divisor| divisor == 1.0) {
            return Ok(RopeScaling::None);
        }
        let factor = divisors.iter().copied().fold(1.0, f32::max);
        let theta = self.config().opt_positive("llama.rope.freq_base")?.unwrap_or(10_000.0);
        let close = divisors.iter().enumerate().all(|(i, &divisor)| {
            let expected = llama3_divisor(theta, head_dim, i, f64::from(factor));
            (f64::from(divisor) / expected - 1.0).abs() < 1e-3
        });
        if !close {
            return Err(CheckpointError::unsupported(
                self.table.what(name, entry),
                "the divisors of Llama 3 scaling (low 1, high 4, 8192 positions)",
                "other divisors",
                "this RoPE scaling is not implemented",
            ));
        }
        Ok(RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 })
    }
}

/// Divisor of frequency `i` under Llama 3 scaling with the constants all its releases use.
fn llama3_divisor(theta: f64, head_dim: usize, i: usize, factor: f64) -> f64 {
    let (low, high, original) = (1.0, 4.0, 8192.0);
    let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head_dim as f64);
    if wavelength < original / high {
        return 1.0;
    }
    if wavelength > original / low {
        return factor;
    }
    let smooth = (original / wavelength - low) / (high - low);
    1.0 / ((1.0 - smooth) / factor + smooth)
}

fn moe(keys: &Keys<'_>, layers: usize) -> Result<MoeSpec> {
    let experts = keys.count("expert_count", limits::EXPERTS)?;
    if keys.config.opt_bool(&keys.key("expert_weights_norm"))? == Some(false) {
        return Err(keys.refuse("expert_weights_norm", "true or nothing", "llama.cpp always normalises for qwen3moe"));
    }
    Ok(MoeSpec {
        experts,
        experts_per_token: keys.count("expert_used_count", experts)?,
        intermediate: keys.count("expert_feed_forward_length", limits::WIDTH)?,
        normalize: true,
        sparse_layers: vec![true; layers],
    })
}

fn eos(config: &ConfigMap<'_>, vocab: usize) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in EOS_KEYS {
        for id in config.token_ids(key, vocab)? {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    Ok(ids)
}
