//! EAGLE-3 draft heads: config.json and safetensors in the public layout (SafeAILab/EAGLE, SpecForge, SGLang).

use super::config::{check_heads, limits, rope::parse_rope};
use super::load::{Loader, Part, Precision, Progress};
use super::source::Source;
use crate::draft::{Eagle3Head, Eagle3Spec, Eagle3Weights};
use crate::format::error::{CheckpointError, Result};
use crate::format::map::{ConfigMap, parse_object};
use crate::format::table::{Provenance, TensorTable};
use crate::spec::DecoderSpec;
use crate::weights::{AttentionWeights, GatedMlp};

/// Architectures that mean this layout.
const ARCHITECTURES: [&str; 4] =
    ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"];

/// Switches of variants whose arithmetic differs; harmless when absent, `null` or `false`.
const VARIANTS: [&str; 9] = [
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mask_hidden",
    "attention_bias",
    "mlp_bias",
    "bias",
    "quantization_config",
];

/// An opened draft head: everything but the weights.
#[derive(Debug)]
pub struct HeadCheckpoint {
    spec: Eagle3Spec,
    vocab: usize,
    table: TensorTable,
    name: String,
}

/// Opens a draft head without reading its weights.
///
/// `source` is a folder with config.json and model.safetensors (or its index and shards), or the name of an embedded
/// head ([`super::EMBEDDED_HEADS`]).
///
/// # Errors
/// [`CheckpointError`]: nothing there, damaged files, pickled weights, a variant of EAGLE that is not implemented.
pub fn open_head(source: &str) -> Result<HeadCheckpoint> {
    let folder = match Source::head(source)? {
        Source::Embedded(folder) | Source::Folder(folder) => folder,
        Source::Gguf(bytes) => {
            return Err(CheckpointError::unsupported(
                bytes.name,
                "a folder with config.json and model.safetensors",
                "a GGUF file",
                "draft heads are read in their original layout",
            ));
        }
    };
    let (text, file) = folder.config()?;
    let (spec, vocab) = parse_head_config(&text, &file)?;
    Ok(HeadCheckpoint { spec, vocab, table: folder.weights()?, name: source.to_owned() })
}

/// Reads the config.json of a head; also returns the target's vocabulary size.
pub(crate) fn parse_head_config(text: &str, file: &str) -> Result<(Eagle3Spec, usize)> {
    let object = parse_object(text, file)?;
    let config = ConfigMap::new(&object, file);
    refuse_variants(&config)?;
    let hidden = config.count("hidden_size", limits::WIDTH)?;
    let q_heads = config.count("num_attention_heads", limits::HEADS)?;
    let kv_heads = config.opt_count("num_key_value_heads", limits::HEADS)?.unwrap_or(q_heads);
    let head_dim = config.opt_count("head_dim", limits::HEAD_DIM)?.unwrap_or(hidden / q_heads).max(1);
    let vocab = config.count("vocab_size", limits::VOCAB)?;
    let max_positions = config.opt_count("max_position_embeddings", limits::POSITIONS)?.unwrap_or(2048);
    let spec = Eagle3Spec {
        hidden,
        target_hidden: config.opt_count("target_hidden_size", limits::WIDTH)?.unwrap_or(hidden),
        intermediate: config.count("intermediate_size", limits::WIDTH)?,
        q_heads,
        kv_heads,
        head_dim,
        draft_vocab: config.opt_count("draft_vocab_size", vocab)?.unwrap_or(vocab),
        norm_eps: config.positive("rms_norm_eps")? as f32,
        rope: parse_rope(&config, Some(10_000.0), max_positions)?,
        taps: taps(&config)?,
    };
    check_heads(file, q_heads, kv_heads, head_dim)?;
    Ok((spec, vocab))
}

fn refuse_variants(config: &ConfigMap<'_>) -> Result<()> {
    let hint = "only plain EAGLE-3 heads are implemented";
    let known = |value: &serde_json::Value| value.as_str().is_some_and(|name| ARCHITECTURES.contains(&name));
    let architectures = config.get("architectures").and_then(|list| list.as_array());
    if !architectures.is_some_and(|list| list.iter().any(known)) {
        return Err(config.refuse("architectures", &format!("one of {}", ARCHITECTURES.join(", ")), hint));
    }
    if config.get("transformer_layer_config").is_some() {
        let hint = "flatten the config of a speculators head to the layout of SpecForge";
        return Err(config.refuse("transformer_layer_config", "a flat config", hint));
    }
    let eagle = config.object("eagle_config")?;
    for map in eagle.iter().chain([config]) {
        for key in VARIANTS {
            if map.get(key).is_some_and(|value| value.as_bool() != Some(false)) {
                return Err(map.refuse(key, "false or nothing", hint));
            }
        }
        if map.opt_bool("use_aux_hidden_state")? == Some(false) {
            return Err(map.refuse("use_aux_hidden_state", "true or nothing", "EAGLE-1 and 2 are not implemented"));
        }
        if map.opt_f64("logit_scale")?.is_some_and(|scale| scale != 1.0) {
            return Err(map.refuse("logit_scale", "1 or nothing", hint));
        }
    }
    if config.opt_usize("num_hidden_layers")?.is_some_and(|layers| layers != 1) {
        return Err(config.refuse("num_hidden_layers", "1", hint));
    }
    if config.opt_str("model_type")?.is_some_and(|family| family != "llama") {
        return Err(config.refuse("model_type", "llama", hint));
    }
    if config.opt_str("hidden_act")?.is_some_and(|act| act != "silu") {
        return Err(config.refuse("hidden_act", "silu", hint));
    }
    if config.opt_bool("tie_word_embeddings")? == Some(true) {
        return Err(config.refuse("tie_word_embeddings", "false or nothing", hint));
    }
    Ok(())
}

/// Tapped layers as layer INPUTS: ids under `eagle_config` are layer outputs, top-level ids are inputs already.
fn taps(config: &ConfigMap<'_>) -> Result<Option<[usize; 3]>> {
    let key = "eagle_aux_hidden_state_layer_ids";
    let eagle = config.object("eagle_config")?;
    let inner = eagle.as_ref().map(|eagle| eagle.usize_list(key)).transpose()?.flatten();
    let (ids, shift) = match inner {
        Some(ids) => (ids, 1),
        None => match config.usize_list(key)? {
            Some(ids) => (ids, 0),
            None => return Ok(None),
        },
    };
    match <[usize; 3]>::try_from(ids.as_slice()) {
        Ok(ids) if ids.is_sorted_by(|a, b| a < b) && ids[2] < limits::LAYERS => Ok(Some(ids.map(|id| id + shift))),
        _ => Err(CheckpointError::invalid_config(
            config.what(key),
            "three layer ids in ascending order",
            format!("{ids:?}"),
            "the head taps the target's residual stream at three depths",
        )),
    }
}

impl HeadCheckpoint {
    /// Shape and arithmetic.
    pub fn spec(&self) -> &Eagle3Spec {
        &self.spec
    }

    /// Origin, size and element type.
    pub fn provenance(&self) -> Provenance {
        self.table.provenance(&self.name)
    }

    /// Checks that the head belongs to a target: widths, vocabulary, tapped layers. Warns through `tracing` where the
    /// taps are not the usual ones.
    ///
    /// # Errors
    /// [`CheckpointError::HeadMismatch`].
    pub fn check_fits(&self, target: &DecoderSpec) -> Result<()> {
        let spec = &self.spec;
        let mismatch = |what: &str, expected: String, found: String| {
            let hint = format!("choose a head that was trained for this {} model", target.family);
            Err(CheckpointError::head_mismatch(format!("draft head {}: {what}", self.name), expected, found, hint))
        };
        if spec.target_hidden != target.hidden {
            let expected = format!("the target's hidden_size {}", target.hidden);
            return mismatch("width of the tapped vectors", expected, spec.target_hidden.to_string());
        }
        if self.vocab != target.vocab {
            return mismatch("vocab_size", format!("the target's {}", target.vocab), self.vocab.to_string());
        }
        let default = [2, target.layers / 2, target.layers.saturating_sub(3)];
        match spec.taps {
            Some(taps) if taps[2] >= target.layers => {
                return mismatch("tapped layers", format!("inputs of {} layers", target.layers), format!("{taps:?}"));
            }
            // A target of so few layers that the default repeats one has no default.
            Some(taps) if taps != default && default.is_sorted_by(|a, b| a < b) => tracing::warn!(
                head = %self.name,
                ?taps,
                ?default,
                "the head taps the inputs of other layers than EAGLE-3's default; ids under eagle_config were read as layer outputs"
            ),
            None if target.layers < 6 => {
                return mismatch(
                    "tapped layers",
                    "a target of at least 6 layers".to_owned(),
                    target.layers.to_string(),
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Verifies names, shapes and element types of the head's tensors; reads no data. Returns the stored bytes that
    /// [`HeadCheckpoint::load`] will convert.
    ///
    /// # Errors
    /// As [`super::Checkpoint::check_weights`].
    pub fn check_weights(&self) -> Result<u64> {
        let loader = Loader::checking(&self.table);
        self.load_from(&loader)?;
        Ok(loader.bytes())
    }

    /// Reads the head for a target, after [`HeadCheckpoint::check_fits`] and [`HeadCheckpoint::check_weights`].
    ///
    /// # Errors
    /// As those two, and [`CheckpointError::HeadMismatch`] where `d2t` leads outside the target's vocabulary.
    pub fn load(
        &self,
        target: &DecoderSpec,
        precision: Precision,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Eagle3Head> {
        self.check_fits(target)?;
        let total = self.check_weights()?;
        let weights = self.load_from(&Loader::reading(&self.table, precision, total, progress))?;
        Ok(Eagle3Head { spec: self.spec.clone(), weights })
    }

    fn load_from(&self, loader: &Loader<'_>) -> Result<Eagle3Weights> {
        let spec = &self.spec;
        let layer = if loader.has("layers.0.self_attn.q_proj.weight") { "layers.0" } else { "midlayer" };
        let name = |part: &str| format!("{layer}.{part}.weight");
        let (q_rows, kv_rows) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let qkv = [("q", q_rows), ("k", kv_rows), ("v", kv_rows)]
            .map(|(part, rows)| Part::new(name(&format!("self_attn.{part}_proj")), rows));
        let gate_up = ["gate", "up"].map(|part| Part::new(name(&format!("mlp.{part}_proj")), spec.intermediate));
        let own_embedding = spec.target_hidden != spec.hidden;
        for unused in ["t2d"].into_iter().chain((!own_embedding).then_some("embed_tokens.weight")) {
            loader.ignore(unused);
        }
        let weights = Eagle3Weights {
            fc: loader.single("fc.weight", spec.hidden, 3 * spec.target_hidden)?,
            input_norm: loader.vector(&name("input_layernorm"), spec.hidden)?,
            hidden_norm: loader.vector(&name("hidden_norm"), spec.hidden)?,
            attention: AttentionWeights {
                qkv: loader.matrix(&qkv, 2 * spec.hidden)?,
                qkv_bias: None,
                q_norm: None,
                k_norm: None,
                o: loader.single(&name("self_attn.o_proj"), spec.hidden, q_rows)?,
            },
            post_attention_norm: loader.vector(&name("post_attention_layernorm"), spec.hidden)?,
            mlp: GatedMlp {
                gate_up: loader.matrix(&gate_up, spec.hidden)?,
                down: loader.single(&name("mlp.down_proj"), spec.hidden, spec.intermediate)?,
            },
            norm: loader.vector("norm.weight", spec.hidden)?,
            lm_head: loader.single("lm_head.weight", spec.draft_vocab, spec.hidden)?,
            target_ids: self.target_ids(loader)?,
            embed: own_embedding.then(|| loader.single("embed_tokens.weight", self.vocab, spec.hidden)).transpose()?,
        };
        loader.refuse_leftovers()?;
        Ok(weights)
    }

    /// `d2t` holds offsets: draft id `i` means target id `i + d2t[i]`.
    fn target_ids(&self, loader: &Loader<'_>) -> Result<Option<Vec<u32>>> {
        let spec = &self.spec;
        if !loader.has("d2t") && spec.draft_vocab == self.vocab {
            return Ok(None);
        }
        let offsets = loader.integers("d2t", spec.draft_vocab)?;
        let ids = offsets.into_iter().zip(0_i64..).map(|(offset, id)| {
            let target = id.checked_add(offset).and_then(|target| u32::try_from(target).ok());
            target.filter(|&target| (target as usize) < self.vocab).ok_or_else(|| {
                CheckpointError::head_mismatch(
                    format!("draft head {}: d2t[{id}]", self.name),
                    format!("an offset to a token id below vocab_size {}", self.vocab),
                    offset.to_string(),
                    "the head's file is damaged or its vocabulary is another model's",
                )
            })
        });
        let ids = ids.collect::<Result<Vec<_>>>()?;
        let identity = spec.draft_vocab == self.vocab && ids.iter().zip(0..).all(|(&id, index)| id == index);
        Ok(if identity { None } else { Some(ids) })
    }
}
