//! From a loaded checkpoint, or from nothing but a shape, to weights on the device.

use super::{
    DeviceAttention, DeviceExperts, DeviceHead, DeviceLayer, DeviceMatrix, DeviceMlp, DeviceModel, DeviceVector,
    FeedForward, mixture_of, rotation,
};
use crate::device::{Device, DeviceBuffer, DeviceError, Kernel, Priority, Stream};
use crate::kernels::{RandomWeights, RandomWeightsParams};
use half::bf16;
use oasis_models::draft::{Eagle3Head, Eagle3Spec};
use oasis_models::spec::{DecoderSpec, MoeSpec};
use oasis_models::weights::{AttentionWeights, DecoderWeights, GatedMlp, Matrix, MatrixData, Mlp};
use std::borrow::Cow;

/// Where weights come from.
pub(super) enum Source<'a> {
    /// A checkpoint.
    Loaded(&'a DecoderWeights, Option<&'a Eagle3Head>),
    /// Random numbers.
    Random { kernel: Kernel<RandomWeights>, stream: Stream, seed: u64 },
}

impl<'a> Source<'a> {
    pub fn loaded(weights: &'a DecoderWeights, head: Option<&'a Eagle3Head>) -> Self {
        Self::Loaded(weights, head)
    }

    pub fn random(device: &Device, seed: u64) -> Result<Self, DeviceError> {
        let kernel = device.load(&device.compiler()?, &RandomWeights)?;
        Ok(Self::Random { kernel, stream: device.stream(Priority::Middle)?, seed })
    }
}

/// Makes matrices and vectors, one after the other.
struct Maker<'a> {
    device: &'a Device,
    source: Source<'a>,
    /// Matrices made so far: a part of each one's seed.
    made: u64,
}

impl Maker<'_> {
    /// A matrix: `loaded` of a checkpoint, else random with the variance that keeps a row's size.
    fn matrix(&mut self, rows: usize, cols: usize, loaded: Option<&Matrix>) -> Result<DeviceMatrix, DeviceError> {
        let data = match loaded {
            Some(matrix) => self.device.upload(&elements(matrix, rows, cols)?)?,
            None => self.random(rows * cols, (3.0 / cols as f32).sqrt())?,
        };
        Ok(DeviceMatrix { rows, cols, data })
    }

    /// Matrices `[rows][cols]` of all experts, one after the other.
    fn matrices(
        &mut self,
        (experts, rows, cols): (usize, usize, usize),
        loaded: Option<Vec<&Matrix>>,
    ) -> Result<DeviceBuffer<bf16>, DeviceError> {
        let Some(loaded) = loaded else { return self.random(experts * rows * cols, (3.0 / cols as f32).sqrt()) };
        let mut data = self.device.zeros(experts * rows * cols)?;
        for (expert, matrix) in loaded.into_iter().enumerate() {
            data.write_at(expert * rows * cols, &elements(matrix, rows, cols)?)?;
        }
        Ok(data)
    }

    fn random(&mut self, elements: usize, width: f32) -> Result<DeviceBuffer<bf16>, DeviceError> {
        let Source::Random { kernel, stream, seed } = &self.source else {
            return Err(DeviceError::new("copying a model to the device", "the checkpoint lacks a matrix"));
        };
        let data = self.device.zeros(elements.next_multiple_of(2))?;
        self.made += 1;
        let params = RandomWeightsParams {
            data: data.address(),
            pairs: elements.div_ceil(2) as u64,
            seed: seed.wrapping_add(self.made << 40),
            width,
            mask: u32::MAX,
        };
        // SAFETY: the buffer has that many pairs and is waited for before anything else uses it.
        unsafe { kernel.launch(stream, (4 * self.device.facts.multiprocessors, 1), &params)? };
        stream.synchronize()?;
        Ok(data)
    }

    /// A norm's weight: `loaded`, else ones.
    fn vector(&self, len: usize, loaded: Option<&[f32]>) -> Result<DeviceVector, DeviceError> {
        let values: Vec<bf16> = match loaded {
            Some(values) if values.len() != len => {
                let found = format!("expected {len} elements, found {}", values.len());
                return Err(DeviceError::new("copying a vector to the device", found));
            }
            Some(values) => values.iter().map(|x| bf16::from_f32(*x)).collect(),
            None => vec![bf16::ONE; len],
        };
        self.device.upload(&values)
    }

    fn attention(
        &mut self,
        shape: AttentionShape,
        loaded: Option<&AttentionWeights>,
    ) -> Result<DeviceAttention, DeviceError> {
        let AttentionShape { q_heads, kv_heads, head_dim, inner, hidden, bias, qk_norm } = shape;
        let width = (q_heads + 2 * kv_heads) * head_dim;
        let vector = |wanted: bool, len: usize, loaded: Option<&Option<Vec<f32>>>| -> Result<_, DeviceError> {
            let loaded = loaded.and_then(|vector| vector.as_deref());
            (wanted || loaded.is_some()).then(|| self.vector(len, loaded)).transpose()
        };
        let (qkv_bias, q_norm, k_norm) = (
            vector(bias, width, loaded.map(|a| &a.qkv_bias))?,
            vector(qk_norm, head_dim, loaded.map(|a| &a.q_norm))?,
            vector(qk_norm, head_dim, loaded.map(|a| &a.k_norm))?,
        );
        let qkv = self.matrix(width, inner, loaded.map(|a| &a.qkv))?;
        let o = self.matrix(hidden, q_heads * head_dim, loaded.map(|a| &a.o))?;
        Ok(DeviceAttention { qkv, qkv_bias, q_norm, k_norm, o })
    }

    fn mlp(&mut self, hidden: usize, inner: usize, loaded: Option<&GatedMlp>) -> Result<DeviceMlp, DeviceError> {
        Ok(DeviceMlp {
            gate_up: self.matrix(2 * inner, hidden, loaded.map(|mlp| &mlp.gate_up))?,
            down: self.matrix(hidden, inner, loaded.map(|mlp| &mlp.down))?,
        })
    }

    fn experts(
        &mut self,
        hidden: usize,
        moe: &MoeSpec,
        loaded: Option<(&Matrix, &[GatedMlp])>,
    ) -> Result<DeviceExperts, DeviceError> {
        let MoeSpec { experts, intermediate: inner, .. } = *moe;
        if let Some((_, loaded)) = loaded.filter(|(_, loaded)| loaded.len() != experts) {
            let found = format!("expected {experts} experts in a layer, found {}", loaded.len());
            return Err(DeviceError::new("copying a model to the device", found));
        }
        let matrices = |part: fn(&GatedMlp) -> &Matrix| loaded.map(|(_, experts)| experts.iter().map(part).collect());
        Ok(DeviceExperts {
            router: self.matrix(experts, hidden, loaded.map(|(router, _)| router))?,
            gate_up: self.matrices((experts, 2 * inner, hidden), matrices(|mlp| &mlp.gate_up))?,
            down: self.matrices((experts, hidden, inner), matrices(|mlp| &mlp.down))?,
        })
    }

    /// The feed-forward part that the shape says a layer has.
    fn feed_forward(
        &mut self,
        spec: &DecoderSpec,
        layer: usize,
        loaded: Option<&Mlp>,
    ) -> Result<FeedForward, DeviceError> {
        match (mixture_of(spec, layer), loaded) {
            (Some(moe), None) => self.experts(spec.hidden, moe, None).map(FeedForward::Experts),
            (Some(moe), Some(Mlp::Moe { router, experts })) => {
                self.experts(spec.hidden, moe, Some((router, experts.as_slice()))).map(FeedForward::Experts)
            }
            (None, None) => self.mlp(spec.hidden, spec.intermediate, None).map(FeedForward::Dense),
            (None, Some(Mlp::Dense(mlp))) => {
                self.mlp(spec.hidden, spec.intermediate, Some(mlp)).map(FeedForward::Dense)
            }
            (mixture, Some(_)) => {
                let kinds = if mixture.is_some() { ["experts", "one MLP"] } else { ["one MLP", "experts"] };
                let found = format!("expected {} in layer {layer}, found {}", kinds[0], kinds[1]);
                Err(DeviceError::new("copying a model to the device", found))
            }
        }
    }
}

/// The elements of a matrix `[rows][cols]` in bf16.
fn elements(matrix: &Matrix, rows: usize, cols: usize) -> Result<Cow<'_, [bf16]>, DeviceError> {
    if (matrix.rows, matrix.cols) != (rows, cols) {
        let found = format!("expected [{rows}][{cols}], found [{}][{}]", matrix.rows, matrix.cols);
        return Err(DeviceError::new("copying a matrix to the device", found));
    }
    Ok(match &matrix.data {
        MatrixData::Bf16(data) => data.into(),
        MatrixData::F32(data) => data.iter().map(|x| bf16::from_f32(*x)).collect(),
    })
}

/// Shape of an attention layer's weights.
struct AttentionShape {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Elements of a row that `qkv` takes.
    inner: usize,
    hidden: usize,
    bias: bool,
    qk_norm: bool,
}

pub(super) fn decoder(
    device: &Device,
    spec: &DecoderSpec,
    source: Source<'_>,
    head: Option<&Eagle3Spec>,
    positions: usize,
) -> Result<DeviceModel, DeviceError> {
    let (weights, loaded_head) = match &source {
        Source::Loaded(weights, head) => (Some(*weights), *head),
        Source::Random { .. } => (None, None),
    };
    let mut maker = Maker { device, source, made: 0 };
    let DecoderSpec { hidden, q_heads, kv_heads, head_dim, vocab, .. } = *spec;
    let embed = maker.matrix(vocab, hidden, weights.map(|w| &w.embed))?;
    let mut layers = Vec::with_capacity(spec.layers);
    for index in 0..spec.layers {
        let loaded = weights.map(|w| &w.layers[index]);
        let shape = AttentionShape {
            q_heads,
            kv_heads,
            head_dim,
            inner: hidden,
            hidden,
            bias: spec.attention_bias,
            qk_norm: spec.qk_norm,
        };
        layers.push(DeviceLayer {
            input_norm: maker.vector(hidden, loaded.map(|l| l.input_norm.as_slice()))?,
            attention: maker.attention(shape, loaded.map(|l| &l.attention))?,
            post_attention_norm: maker.vector(hidden, loaded.map(|l| l.post_attention_norm.as_slice()))?,
            mlp: maker.feed_forward(spec, index, loaded.map(|l| &l.mlp))?,
        });
    }
    let lm_head = match weights {
        Some(weights) => weights.lm_head.as_ref().map(|m| maker.matrix(vocab, hidden, Some(m))).transpose()?,
        None if spec.tied_embeddings => None,
        None => Some(maker.matrix(vocab, hidden, None)?),
    };
    Ok(DeviceModel {
        norm: maker.vector(hidden, weights.map(|w| w.norm.as_slice()))?,
        // A draft token stands one position after the last.
        rotation: rotation(device, &spec.rope, head_dim, positions + 1)?,
        head: head.map(|head| draft_head(&mut maker, spec, head, loaded_head, positions)).transpose()?,
        spec: spec.clone(),
        embed,
        layers,
        lm_head,
    })
}

fn draft_head(
    maker: &mut Maker<'_>,
    target: &DecoderSpec,
    spec: &Eagle3Spec,
    loaded: Option<&Eagle3Head>,
    positions: usize,
) -> Result<DeviceHead, DeviceError> {
    let weights = loaded.map(|head| &head.weights);
    let Eagle3Spec { hidden, target_hidden, q_heads, kv_heads, head_dim, draft_vocab, .. } = *spec;
    let shape = AttentionShape { q_heads, kv_heads, head_dim, inner: 2 * hidden, hidden, bias: false, qk_norm: false };
    // A head of random weights guesses random tokens of its own vocabulary, all of which the target has.
    let target_ids = weights.and_then(|w| w.target_ids.as_ref());
    let target_ids = target_ids.map(|ids| ids.iter().map(|id| *id as i32).collect::<Vec<_>>());
    let embed = match weights {
        Some(weights) => weights.embed.as_ref().map(|m| maker.matrix(target.vocab, hidden, Some(m))).transpose()?,
        None if hidden != target_hidden => Some(maker.matrix(target.vocab, hidden, None)?),
        None => None,
    };
    Ok(DeviceHead {
        taps: spec.taps.unwrap_or([2, target.layers / 2, target.layers.saturating_sub(3)]),
        fc: maker.matrix(hidden, 3 * target_hidden, weights.map(|w| &w.fc))?,
        input_norm: maker.vector(hidden, weights.map(|w| w.input_norm.as_slice()))?,
        hidden_norm: maker.vector(hidden, weights.map(|w| w.hidden_norm.as_slice()))?,
        attention: maker.attention(shape, weights.map(|w| &w.attention))?,
        post_attention_norm: maker.vector(hidden, weights.map(|w| w.post_attention_norm.as_slice()))?,
        mlp: maker.mlp(hidden, spec.intermediate, weights.map(|w| &w.mlp))?,
        norm: maker.vector(hidden, weights.map(|w| w.norm.as_slice()))?,
        lm_head: maker.matrix(draft_vocab, hidden, weights.map(|w| &w.lm_head))?,
        target_ids: target_ids.map(|ids| maker.device.upload(&ids)).transpose()?,
        rotation: rotation(maker.device, &spec.rope, head_dim, positions)?,
        spec: spec.clone(),
        embed,
    })
}
