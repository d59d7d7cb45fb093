//! Settings of known families that change the arithmetic and are not implemented: refused, never ignored.

use serde_json::Value;

use crate::format::error::Result;
use crate::format::map::ConfigMap;

/// Keys that scale or cap something; harmless when absent, `null`, `false` or 1.
const SCALES: [&str; 10] = [
    "logit_scale",
    "logits_scaling",
    "logit_softcapping",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "scale_depth",
];

/// Keys that switch something on; harmless when absent, `null`, `false`, empty or 0.
const SWITCHES: [&str; 9] = [
    "mlp_bias",
    "lm_head_bias",
    "use_qk_norm",
    "no_rope_layers",
    "quantization_config",
    "compression_config",
    "num_nextn_predict_layers",
    "attention_chunk_size",
    "alibi",
];

/// Refuses every setting that would need arithmetic the executors do not have.
pub(super) fn refuse_unsupported(config: &ConfigMap<'_>, family: &str, layers: usize) -> Result<()> {
    if config.opt_str("hidden_act")?.is_some_and(|act| act != "silu") {
        return Err(config.refuse("hidden_act", "silu", "other activations are not implemented"));
    }
    for key in SCALES {
        if config.get(key).is_some_and(|value| *value != Value::Bool(false) && value.as_f64() != Some(1.0)) {
            return Err(config.refuse(key, "1 or nothing", "this scaling is not implemented"));
        }
    }
    for key in SWITCHES {
        let off = |value: &Value| match value {
            Value::Bool(on) => !on,
            Value::Array(items) => items.is_empty(),
            Value::Number(number) => number.as_f64() == Some(0.0),
            _ => false,
        };
        if config.get(key).is_some_and(|value| !off(value)) {
            let hint = match key {
                "quantization_config" => "load the unquantised checkpoint, or a GGUF file of it",
                _ => "this setting is not implemented",
            };
            return Err(config.refuse(key, "false or nothing", hint));
        }
    }
    refuse_sliding_window(config, family, layers)
}

fn refuse_sliding_window(config: &ConfigMap<'_>, family: &str, layers: usize) -> Result<()> {
    let hint = "sliding-window attention is not implemented";
    if let Some(types) = config.get("layer_types") {
        let full = |value: &Value| value.as_str() == Some("full_attention");
        if !types.as_array().is_some_and(|types| types.iter().all(full)) {
            return Err(config.refuse("layer_types", "full_attention for every layer", hint));
        }
        return Ok(());
    }
    if config.opt_usize("sliding_window")?.is_none() {
        return Ok(());
    }
    // Qwen keeps a window size that it does not use; its first `max_window_layers` layers never use it.
    let in_use = match config.opt_bool("use_sliding_window")? {
        Some(on) => on,
        None => family == "llama",
    };
    let first = config.opt_usize("max_window_layers")?.unwrap_or(0);
    if in_use && (family != "qwen3" || first < layers) {
        return Err(config.refuse("sliding_window", "nothing, or use_sliding_window false", hint));
    }
    Ok(())
}
