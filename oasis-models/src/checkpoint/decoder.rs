//! The tensors of a whole decoder, by the names of Hugging Face or of GGUF.

use super::load::{Loader, Part, RowOrder};
use crate::format::error::{CheckpointError, Result};
use crate::spec::{DecoderSpec, MoeSpec};
use crate::weights::{AttentionWeights, DecoderWeights, GatedMlp, LayerWeights, Matrix, Mlp};

/// Whose names and row order the file uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// `model.layers.0.self_attn.q_proj.weight`, one tensor an expert.
    HuggingFace,
    /// `blk.0.attn_q.weight`, experts stacked; Q and K rows interleaved for arch llama.
    Gguf,
}

/// Names of a layer's parts, without the layer's prefix.
struct Names {
    layer: &'static str,
    input_norm: &'static str,
    post_norm: &'static str,
    q: &'static str,
    k: &'static str,
    v: &'static str,
    o: &'static str,
    q_norm: &'static str,
    k_norm: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    router: &'static str,
}

const HUGGING_FACE: Names = Names {
    layer: "model.layers.",
    input_norm: "input_layernorm",
    post_norm: "post_attention_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    o: "self_attn.o_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    router: "mlp.gate",
};

const GGUF: Names = Names {
    layer: "blk.",
    input_norm: "attn_norm",
    post_norm: "ffn_norm",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    o: "attn_output",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    router: "ffn_gate_inp",
};

/// Reads (or, with a checking loader, verifies) every tensor of a decoder.
pub(crate) fn load_decoder(loader: &Loader<'_>, spec: &DecoderSpec, naming: Naming) -> Result<DecoderWeights> {
    let (embed, norm, head, names) = match naming {
        Naming::HuggingFace => ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", &HUGGING_FACE),
        Naming::Gguf => ("token_embd.weight", "output_norm.weight", "output.weight", &GGUF),
    };
    let lm_head = if spec.tied_embeddings {
        loader.ignore(head);
        None
    } else {
        Some(head)
    };
    let weights = DecoderWeights {
        embed: loader.single(embed, spec.vocab, spec.hidden)?,
        layers: (0..spec.layers)
            .map(|index| Layer { loader, spec, naming, names, index }.load())
            .collect::<Result<_>>()?,
        norm: loader.vector(norm, spec.hidden)?,
        lm_head: lm_head.map(|head| loader.single(head, spec.vocab, spec.hidden)).transpose()?,
    };
    loader.refuse_leftovers()?;
    Ok(weights)
}

struct Layer<'a, 't> {
    loader: &'a Loader<'t>,
    spec: &'a DecoderSpec,
    naming: Naming,
    names: &'static Names,
    index: usize,
}

impl Layer<'_, '_> {
    fn load(&self) -> Result<LayerWeights> {
        let (spec, names) = (self.spec, self.names);
        let moe = spec.moe.as_ref().filter(|moe| moe.sparse_layers[self.index]);
        Ok(LayerWeights {
            input_norm: self.loader.vector(&self.weight(names.input_norm), spec.hidden)?,
            attention: self.attention()?,
            post_attention_norm: self.loader.vector(&self.weight(names.post_norm), spec.hidden)?,
            mlp: match moe {
                None => Mlp::Dense(self.dense_mlp()?),
                Some(moe) => self.moe(moe)?,
            },
        })
    }

    fn name(&self, part: &str, suffix: &str) -> String {
        format!("{}{}.{part}.{suffix}", self.names.layer, self.index)
    }

    fn weight(&self, part: &str) -> String {
        self.name(part, "weight")
    }

    fn attention(&self) -> Result<AttentionWeights> {
        let (spec, names) = (self.spec, self.names);
        let (q_rows, kv_rows) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let interleaved = self.naming == Naming::Gguf && spec.family == "llama";
        let rotary = if interleaved { RowOrder::Interleaved { head_dim: spec.head_dim } } else { RowOrder::Plain };
        let qkv = |suffix: &str| {
            let part = |name, rows, order| Part { name: self.name(name, suffix), rows, order, slice: None };
            [part(names.q, q_rows, rotary), part(names.k, kv_rows, rotary), part(names.v, kv_rows, RowOrder::Plain)]
        };
        let head_norm = |name| spec.qk_norm.then(|| self.loader.vector(&self.weight(name), spec.head_dim)).transpose();
        if spec.attention_bias {
            self.refuse_output_bias()?;
        }
        Ok(AttentionWeights {
            qkv: self.loader.matrix(&qkv("weight"), spec.hidden)?,
            qkv_bias: spec.attention_bias.then(|| self.loader.joined_vector(&qkv("bias"))).transpose()?,
            q_norm: head_norm(names.q_norm)?,
            k_norm: head_norm(names.k_norm)?,
            o: self.loader.single(&self.weight(names.o), spec.hidden, q_rows)?,
        })
    }

    /// `attention_bias` also gives the output projection a bias, which is not implemented unless it is all zeros.
    fn refuse_output_bias(&self) -> Result<()> {
        let name = self.name(self.names.o, "bias");
        if !self.loader.has(&name) {
            return Ok(());
        }
        let bias = self.loader.vector(&name, self.spec.hidden)?;
        if bias.iter().all(|&value| value == 0.0) {
            return Ok(());
        }
        Err(CheckpointError::unsupported(
            format!("{}: tensor {name}", self.loader.table.name),
            "zeros",
            "other values",
            "a bias on the attention's output projection is not implemented",
        ))
    }

    fn dense_mlp(&self) -> Result<GatedMlp> {
        let (spec, names) = (self.spec, self.names);
        let gate_up = [names.gate, names.up].map(|name| Part::new(self.weight(name), spec.intermediate));
        Ok(GatedMlp {
            gate_up: self.loader.matrix(&gate_up, spec.hidden)?,
            down: self.loader.single(&self.weight(names.down), spec.hidden, spec.intermediate)?,
        })
    }

    fn moe(&self, moe: &MoeSpec) -> Result<Mlp> {
        Ok(Mlp::Moe {
            router: self.loader.single(&self.weight(self.names.router), moe.experts, self.spec.hidden)?,
            experts: (0..moe.experts).map(|expert| self.expert(moe, expert)).collect::<Result<_>>()?,
        })
    }

    fn expert(&self, moe: &MoeSpec, expert: usize) -> Result<GatedMlp> {
        let part = |name: &str, rows| match self.naming {
            Naming::HuggingFace => {
                let inner = name.strip_prefix("mlp.").unwrap_or(name);
                Part::new(self.weight(&format!("mlp.experts.{expert}.{inner}")), rows)
            }
            Naming::Gguf => {
                Part { slice: Some((expert, moe.experts)), ..Part::new(self.weight(&format!("{name}_exps")), rows) }
            }
        };
        let (spec, names) = (self.spec, self.names);
        let down: Matrix = self.loader.matrix(&[part(names.down, spec.hidden)], moe.intermediate)?;
        Ok(GatedMlp {
            gate_up: self
                .loader
                .matrix(&[part(names.gate, moe.intermediate), part(names.up, moe.intermediate)], spec.hidden)?,
            down,
        })
    }
}
