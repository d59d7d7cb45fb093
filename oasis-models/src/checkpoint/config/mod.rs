//! config.json of the supported families to a [`DecoderSpec`].

pub(crate) mod rope;
mod unsupported;

use crate::format::map::{ConfigMap, parse_object};

use crate::format::error::{CheckpointError, Result};
use crate::spec::{DecoderSpec, MoeSpec};

/// Bounds on what a config may claim, far above any real model, so that products of sizes cannot overflow.
pub(crate) mod limits {
    /// Width of the residual stream, of an MLP, of all heads together.
    pub const WIDTH: usize = 1 << 22;
    /// Layers.
    pub const LAYERS: usize = 4096;
    /// Heads of one kind.
    pub const HEADS: usize = 1 << 14;
    /// Elements of a head.
    pub const HEAD_DIM: usize = 1 << 12;
    /// Token ids.
    pub const VOCAB: usize = 1 << 26;
    /// Positions.
    pub const POSITIONS: usize = 1 << 30;
    /// Experts of a layer.
    pub const EXPERTS: usize = 1 << 14;
}

/// Reads the text of a config.json.
///
/// `file` names it in messages. Both the transformers 5 spelling (`rope_parameters`, `num_local_experts`) and the
/// older one (`rope_theta`, `rope_scaling`, `num_experts`) are understood. `eos` holds the config's own ids and `bos`
/// is left empty: it depends on the tokenizer's settings.
///
/// # Errors
/// [`CheckpointError::InvalidConfig`] for a missing or impossible value, [`CheckpointError::Unsupported`] for a
/// family or a setting that is not implemented.
pub fn parse_config(text: &str, file: &str) -> Result<DecoderSpec> {
    let object = parse_object(text, file)?;
    let config = ConfigMap::new(&object, file);
    let family = config.opt_str("model_type")?.ok_or_else(|| config.missing("model_type", "a model family"))?;
    if !["llama", "qwen3", "qwen3_moe"].contains(&family) {
        return Err(config.refuse("model_type", "llama, qwen3 or qwen3_moe", "this family is not implemented"));
    }
    let qwen = family != "llama";
    let hidden = config.count("hidden_size", limits::WIDTH)?;
    let layers = config.count("num_hidden_layers", limits::LAYERS)?;
    unsupported::refuse_unsupported(&config, family, layers)?;
    let q_heads = config.count("num_attention_heads", limits::HEADS)?;
    let kv_heads = config.opt_count("num_key_value_heads", limits::HEADS)?.unwrap_or(q_heads);
    let head_dim = match config.opt_count("head_dim", limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if qwen => 128,
        None if hidden.is_multiple_of(q_heads) => hidden / q_heads,
        None => {
            return Err(config.missing("head_dim", "the width of a head, as hidden_size is no multiple of the heads"));
        }
    };
    let vocab = config.count("vocab_size", limits::VOCAB)?;
    let max_positions = config.count("max_position_embeddings", limits::POSITIONS)?;
    let default_theta = (!qwen).then_some(10_000.0);
    let rope = rope::parse_rope(&config, default_theta, max_positions)?;
    let spec = DecoderSpec {
        family: family.to_owned(),
        hidden,
        layers,
        q_heads,
        kv_heads,
        head_dim,
        intermediate: config.count("intermediate_size", limits::WIDTH)?,
        vocab,
        norm_eps: config.positive("rms_norm_eps")? as f32,
        max_positions: rope::scaled_positions(&rope.scaling, max_positions),
        rope,
        tied_embeddings: config.opt_bool("tie_word_embeddings")?.unwrap_or(false),
        qk_norm: qwen,
        attention_bias: config.opt_bool("attention_bias")?.unwrap_or(false),
        moe: if family == "qwen3_moe" { Some(parse_moe(&config, layers)?) } else { None },
        eos: config.token_ids("eos_token_id", vocab)?,
        bos: None,
    };
    check_heads(file, spec.q_heads, spec.kv_heads, spec.head_dim)?;
    Ok(spec)
}

/// Ids of `eos_token_id` in a generation_config.json.
pub(crate) fn parse_generation_eos(text: &str, file: &str, vocab: usize) -> Result<Vec<u32>> {
    let object = parse_object(text, file)?;
    ConfigMap::new(&object, file).token_ids("eos_token_id", vocab)
}

fn parse_moe(config: &ConfigMap<'_>, layers: usize) -> Result<MoeSpec> {
    let key = if config.get("num_local_experts").is_some() { "num_local_experts" } else { "num_experts" };
    let experts = config.count(key, limits::EXPERTS)?;
    let dense = config.usize_list("mlp_only_layers")?.unwrap_or_default();
    let step = config.opt_count("decoder_sparse_step", limits::LAYERS)?.unwrap_or(1);
    Ok(MoeSpec {
        experts,
        experts_per_token: config.count("num_experts_per_tok", experts)?,
        intermediate: config.count("moe_intermediate_size", limits::WIDTH)?,
        normalize: config.opt_bool("norm_topk_prob")?.unwrap_or(false),
        sparse_layers: (0..layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step)).collect(),
    })
}

/// Checks the relations between head counts that attention and RoPE rely on.
pub(crate) fn check_heads(file: &str, q_heads: usize, kv_heads: usize, head_dim: usize) -> Result<()> {
    let hint = "the config does not describe a model that can be run";
    if !q_heads.is_multiple_of(kv_heads) {
        return Err(CheckpointError::invalid_config(
            format!("{file}: key/value heads"),
            format!("a divisor of the {q_heads} query heads"),
            kv_heads.to_string(),
            hint,
        ));
    }
    if !head_dim.is_multiple_of(2) || q_heads * head_dim > limits::WIDTH {
        return Err(CheckpointError::invalid_config(
            format!("{file}: head width"),
            format!("an even number, at most {} over all {q_heads} heads", limits::WIDTH),
            head_dim.to_string(),
            hint,
        ));
    }
    Ok(())
}
