//! A number that two nodes compare before one takes over a request of the other.

use crate::cpu::model::CpuModel;
use crate::draft::{Eagle3Head, Eagle3Weights};
use crate::spec::DecoderSpec;
use crate::weights::{AttentionWeights, DecoderWeights, GatedMlp, LayerWeights, Matrix, MatrixData, Mlp};
use std::fmt::Debug;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// Hash of a description, such as a [`DecoderSpec`](crate::spec::DecoderSpec).
pub fn fingerprint_of(description: &impl Debug) -> u64 {
    let mut hash = XxHash3_64::with_seed(0);
    hash.write(format!("{description:?}").as_bytes());
    hash.finish()
}

/// Hash of shape, arithmetic and every weight, those of the draft head included, in the precision they are kept in: equal
/// where the same tokens come out. Reads all weights once.
pub fn fingerprint(spec: &DecoderSpec, weights: &DecoderWeights, head: Option<&Eagle3Head>) -> u64 {
    let mut print = Fingerprint(XxHash3_64::with_seed(0));
    print.text(spec);
    print.decoder(weights);
    if let Some(head) = head {
        print.text(&head.spec);
        print.head(&head.weights);
    }
    print.0.finish()
}

impl CpuModel {
    /// The [`fingerprint`] of its weights.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(&self.decoder.spec, &self.decoder.weights, self.draft.as_ref().map(|draft| draft.head()))
    }
}

struct Fingerprint(XxHash3_64);

impl Fingerprint {
    fn text(&mut self, value: &impl Debug) {
        self.0.write(format!("{value:?}").as_bytes());
    }

    fn vector(&mut self, vector: &[f32]) {
        self.0.write_u64(vector.len() as u64);
        self.0.write(bytemuck::cast_slice(vector));
    }

    fn vectors<'a>(&mut self, vectors: impl IntoIterator<Item = &'a Vec<f32>>) {
        vectors.into_iter().for_each(|vector| self.vector(vector));
    }

    fn matrix(&mut self, matrix: &Matrix) {
        self.text(&(matrix.rows, matrix.cols));
        match &matrix.data {
            MatrixData::F32(data) => self.0.write(bytemuck::cast_slice(data)),
            MatrixData::Bf16(data) => self.0.write(bytemuck::cast_slice(data)),
        }
    }

    fn attention(&mut self, attention: &AttentionWeights) {
        let AttentionWeights { qkv, qkv_bias, q_norm, k_norm, o } = attention;
        self.matrix(qkv);
        self.vectors([qkv_bias, q_norm, k_norm].into_iter().flatten());
        self.matrix(o);
    }

    fn mlp(&mut self, mlp: &GatedMlp) {
        self.matrix(&mlp.gate_up);
        self.matrix(&mlp.down);
    }

    fn layer(&mut self, layer: &LayerWeights) {
        let LayerWeights { input_norm, attention, post_attention_norm, mlp } = layer;
        self.vectors([input_norm, post_attention_norm]);
        self.attention(attention);
        match mlp {
            Mlp::Dense(mlp) => self.mlp(mlp),
            Mlp::Moe { router, experts } => {
                self.matrix(router);
                experts.iter().for_each(|expert| self.mlp(expert));
            }
        }
    }

    fn decoder(&mut self, weights: &DecoderWeights) {
        let DecoderWeights { embed, layers, norm, lm_head } = weights;
        self.matrix(embed);
        layers.iter().for_each(|layer| self.layer(layer));
        self.vector(norm);
        lm_head.iter().for_each(|matrix| self.matrix(matrix));
    }

    fn head(&mut self, weights: &Eagle3Weights) {
        let Eagle3Weights {
            fc,
            input_norm,
            hidden_norm,
            attention,
            post_attention_norm,
            mlp,
            norm,
            lm_head,
            target_ids,
            embed,
        } = weights;
        self.matrix(fc);
        self.vectors([input_norm, hidden_norm, post_attention_norm, norm]);
        self.attention(attention);
        self.mlp(mlp);
        self.matrix(lm_head);
        embed.iter().for_each(|matrix| self.matrix(matrix));
        if let Some(ids) = target_ids {
            self.0.write(bytemuck::cast_slice(ids));
        }
    }
}
