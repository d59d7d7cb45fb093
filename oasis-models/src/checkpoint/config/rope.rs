//! RoPE settings, in the spellings of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
//!
//! Formulas: transformers `modeling_rope_utils.py`.

use crate::format::error::{CheckpointError, Result};
use crate::format::map::ConfigMap;
use crate::spec::{RopeScaling, RopeSpec};

const MAX_POSITIONS: usize = 1 << 30;
const HINT: &str = "supported RoPE types: default, linear, llama3, yarn";

/// Reads the rotary embedding of a config.
///
/// `default_theta` is the base where the config names none; `max_positions` is `max_position_embeddings`, which
/// stands in for an absent `original_max_position_embeddings`.
pub(crate) fn parse_rope(config: &ConfigMap<'_>, default_theta: Option<f64>, max_positions: usize) -> Result<RopeSpec> {
    let parameters = config.object("rope_parameters")?;
    let scaling = match &parameters {
        Some(parameters) => Some(parameters.clone()),
        None => config.object("rope_scaling")?,
    };
    let inner_theta = scaling.as_ref().map(|map| map.opt_positive("rope_theta")).transpose()?.flatten();
    let theta = match inner_theta.or(config.opt_positive("rope_theta")?).or(default_theta) {
        Some(theta) => theta as f32,
        None => return Err(config.missing("rope_theta", "the base of the rotary embedding")),
    };
    for map in scaling.iter().chain([config]) {
        if map.opt_f64("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(map.refuse(
                "partial_rotary_factor",
                "1.0 or nothing",
                "partial rotary embeddings are not supported",
            ));
        }
    }
    let scaling = match scaling {
        Some(map) => parse_scaling(&map, config, max_positions)?,
        None => RopeScaling::None,
    };
    Ok(RopeSpec { theta, scaling })
}

fn parse_scaling(map: &ConfigMap<'_>, config: &ConfigMap<'_>, max_positions: usize) -> Result<RopeScaling> {
    let key = if map.get("rope_type").is_some() { "rope_type" } else { "type" };
    let original = || -> Result<usize> {
        let own = config.opt_count("original_max_position_embeddings", MAX_POSITIONS)?;
        let inner = map.opt_count("original_max_position_embeddings", MAX_POSITIONS)?;
        Ok(own.or(inner).unwrap_or(max_positions))
    };
    match map.opt_str(key)? {
        None if map.get("factor").is_none() && map.get("full_attention").is_none() => Ok(RopeScaling::None),
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: at_least_one(map, "factor", map.positive("factor")?)? }),
        Some("llama3") => {
            let scaling = RopeScaling::Llama3 {
                factor: at_least_one(map, "factor", map.positive("factor")?)?,
                low_freq_factor: map.positive("low_freq_factor")? as f32,
                high_freq_factor: map.positive("high_freq_factor")? as f32,
                original_max_positions: original()?,
            };
            check_llama3(&scaling, &map.what("high_freq_factor"))?;
            Ok(scaling)
        }
        Some("yarn") => parse_yarn(map, original()?, max_positions),
        _ => Err(map.refuse(key, "a RoPE type that is implemented", HINT)),
    }
}

fn check_llama3(scaling: &RopeScaling, what: &str) -> Result<()> {
    if let RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. } = scaling
        && high_freq_factor <= low_freq_factor
    {
        return Err(CheckpointError::invalid_config(
            what,
            format!("a number above low_freq_factor {low_freq_factor}"),
            high_freq_factor.to_string(),
            "Llama 3.1 uses low_freq_factor 1 and high_freq_factor 4",
        ));
    }
    Ok(())
}

fn parse_yarn(map: &ConfigMap<'_>, original: usize, max_positions: usize) -> Result<RopeScaling> {
    if map.opt_bool("truncate")? == Some(false) {
        return Err(map.refuse("truncate", "true or nothing", "YaRN without rounded ramp bounds is not supported"));
    }
    let factor = match map.opt_positive("factor")? {
        Some(factor) => factor,
        None => max_positions as f64 / original as f64,
    };
    let mscale = map.opt_f64("mscale")?.filter(|&scale| scale != 0.0);
    let mscale_all_dim = map.opt_f64("mscale_all_dim")?.filter(|&scale| scale != 0.0);
    let attention_factor = match (map.opt_positive("attention_factor")?, mscale, mscale_all_dim) {
        (Some(given), ..) => given,
        (None, Some(mscale), Some(all)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all),
        (None, ..) => yarn_mscale(factor, 1.0),
    };
    if !(attention_factor.is_finite() && attention_factor > 0.0) {
        return Err(map.refuse("mscale", "a scale that leaves attention above 0", HINT));
    }
    let beta_fast = map.opt_positive("beta_fast")?.unwrap_or(32.0) as f32;
    let beta_slow = map.opt_positive("beta_slow")?.unwrap_or(1.0) as f32;
    if beta_fast <= beta_slow {
        return Err(CheckpointError::invalid_config(
            map.what("beta_fast"),
            format!("a number above beta_slow {beta_slow}"),
            beta_fast.to_string(),
            "YaRN's defaults are beta_fast 32 and beta_slow 1",
        ));
    }
    Ok(RopeScaling::Yarn {
        factor: at_least_one(map, "factor", factor)?,
        beta_fast,
        beta_slow,
        original_max_positions: original,
        attention_factor: attention_factor as f32,
    })
}

/// YaRN's length-dependent temperature, `0.1 m ln(s) + 1`.
pub(crate) fn yarn_mscale(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}

fn at_least_one(map: &ConfigMap<'_>, key: &str, factor: f64) -> Result<f32> {
    if factor >= 1.0 {
        return Ok(factor as f32);
    }
    Err(CheckpointError::invalid_config(
        map.what(key),
        "an extension factor of at least 1",
        factor.to_string(),
        "RoPE scaling extends a context; remove it to run the model as trained",
    ))
}

/// Longest context that a scaled rotary embedding serves, in tokens.
///
/// `max_position_embeddings` already includes the extension for llama3; for linear it does not, and for YaRN both
/// habits exist, so the larger of it and `factor * original` counts.
pub(crate) fn scaled_positions(scaling: &RopeScaling, max_positions: usize) -> usize {
    match *scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => max_positions,
        RopeScaling::Linear { factor } => (max_positions as f64 * f64::from(factor)) as usize,
        RopeScaling::Yarn { factor, original_max_positions, .. } => {
            max_positions.max((original_max_positions as f64 * f64::from(factor)) as usize)
        }
    }
}
