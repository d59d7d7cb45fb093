//! A small Qwen3-MoE of random weights, and what its executors may say.

use crate::gpu::Twin;
use crate::models::{dense, greedy};
use half::bf16;
use oasis_core::executor::{Admission, DecodeRow, Executor, PrefillProgress, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_core::testkit::Random;
use oasis_models::cpu::{CpuExecutor, CpuModel};
use oasis_models::draft::{Eagle3Head, Eagle3Spec, Eagle3Weights};
use oasis_models::spec::{DecoderSpec, MoeSpec, RopeScaling, RopeSpec};
use oasis_models::weights::{AttentionWeights, DecoderWeights, GatedMlp, LayerWeights, Matrix, MatrixData, Mlp};
use std::sync::Arc;

/// Width of the residual stream.
pub const HIDDEN: usize = 256;
/// Inner width of an expert.
pub const EXPERT_WIDTH: usize = 128;
/// Experts of a token.
pub const TOP: usize = 4;

const Q_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 512;
const EXPERTS: usize = 32;
const DENSE_WIDTH: usize = 384;
/// The layer in the middle is dense.
const SPARSE_LAYERS: [bool; 3] = [true, false, true];

/// Tokens may differ where the reference's logit of the one is as near to its largest, in parts of the distance between
/// the largest and the mean.
pub const NEAR: f32 = 2e-2;

/// Tokens that are compared of each prompt.
const TOKENS: usize = 40;

/// Values that bf16 holds: both devices have the same weights.
fn matrix(random: &mut Random, rows: usize, cols: usize, scale: f32) -> Matrix {
    let scale = scale / (cols as f32).sqrt();
    let data = random.floats(rows * cols).iter().map(|x| bf16::from_f32(x * scale)).collect();
    Matrix { rows, cols, data: MatrixData::Bf16(data) }
}

fn attention(random: &mut Random, inputs: usize, normed: bool) -> AttentionWeights {
    let norm = |scale: f32| normed.then(|| vec![scale; HEAD_DIM]);
    AttentionWeights {
        qkv: matrix(random, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, inputs, 1.0),
        qkv_bias: None,
        // Some positions are preferred to others.
        q_norm: norm(2.0),
        k_norm: norm(1.0),
        o: matrix(random, HIDDEN, Q_HEADS * HEAD_DIM, 1.0),
    }
}

fn mlp(random: &mut Random, inner: usize) -> GatedMlp {
    GatedMlp { gate_up: matrix(random, 2 * inner, HIDDEN, 2.0), down: matrix(random, HIDDEN, inner, 1.5) }
}

fn head(random: &mut Random, rope: &RopeSpec) -> Eagle3Head {
    let spec = Eagle3Spec {
        hidden: HIDDEN,
        target_hidden: HIDDEN,
        intermediate: DENSE_WIDTH,
        q_heads: Q_HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        draft_vocab: VOCAB,
        norm_eps: 1e-6,
        rope: rope.clone(),
        taps: Some([0, 1, 2]),
    };
    let weights = Eagle3Weights {
        fc: matrix(random, HIDDEN, 3 * HIDDEN, 1.0),
        input_norm: vec![1.0; HIDDEN],
        hidden_norm: vec![1.0; HIDDEN],
        attention: attention(random, 2 * HIDDEN, false),
        post_attention_norm: vec![1.0; HIDDEN],
        mlp: mlp(random, DENSE_WIDTH),
        norm: vec![1.0; HIDDEN],
        lm_head: matrix(random, VOCAB, HIDDEN, 1.0),
        target_ids: None,
        embed: None,
    };
    Eagle3Head { spec, weights }
}

/// The model, and a draft head for it; `normalize` as in [`MoeSpec`].
pub fn model(normalize: bool) -> Twin {
    let random = &mut Random::new(11);
    let rope = RopeSpec { theta: 10_000.0, scaling: RopeScaling::None };
    let spec = DecoderSpec {
        family: "qwen3_moe".to_owned(),
        hidden: HIDDEN,
        layers: SPARSE_LAYERS.len(),
        q_heads: Q_HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        intermediate: DENSE_WIDTH,
        vocab: VOCAB,
        norm_eps: 1e-6,
        max_positions: 1024,
        rope: rope.clone(),
        tied_embeddings: false,
        qk_norm: true,
        attention_bias: false,
        moe: Some(MoeSpec {
            experts: EXPERTS,
            experts_per_token: TOP,
            intermediate: EXPERT_WIDTH,
            normalize,
            sparse_layers: SPARSE_LAYERS.to_vec(),
        }),
        eos: Vec::new(),
        bos: None,
    };
    let layers = SPARSE_LAYERS.map(|sparse| LayerWeights {
        input_norm: vec![1.0; HIDDEN],
        attention: attention(random, HIDDEN, true),
        post_attention_norm: vec![1.0; HIDDEN],
        mlp: match sparse {
            true => Mlp::Moe {
                // The experts that are chosen last count for little: rounding may choose others.
                router: matrix(random, EXPERTS, HIDDEN, 6.0),
                experts: (0..EXPERTS).map(|_| mlp(random, EXPERT_WIDTH)).collect(),
            },
            false => Mlp::Dense(mlp(random, DENSE_WIDTH)),
        },
    });
    let weights = DecoderWeights {
        embed: matrix(random, VOCAB, HIDDEN, 16.0),
        layers: layers.to_vec(),
        norm: vec![1.0; HIDDEN],
        lm_head: Some(matrix(random, VOCAB, HIDDEN, 4.0)),
    };
    let head = head(random, &rope);
    Twin::new(spec, weights, Arc::new(head))
}

/// The model on the CPU with two experts of every mixture in each other's place.
pub fn swapped(model: &Twin) -> Arc<CpuModel> {
    let mut weights = model.weights.clone();
    for layer in &mut weights.layers {
        if let Mlp::Moe { experts, .. } = &mut layer.mlp {
            experts.swap(3, 4);
        }
    }
    Arc::new(CpuModel::new(model.spec.clone(), weights, Some(model.head.clone())))
}

/// Prompts of 1, 17 and 300 tokens.
pub fn prompts() -> Vec<Vec<TokenId>> {
    let random = &mut Random::new(5);
    [1, 17, 300].map(|tokens| (0..tokens).map(|_| TokenId::from(random.below(VOCAB))).collect()).to_vec()
}

/// Admits a request and reads its prompt; gives the first token.
///
/// # Panics
/// When it is not taken.
pub fn start(
    executor: &mut impl Executor,
    request: RequestId,
    prompt: &[TokenId],
    sampling: SamplingParams,
) -> TokenId {
    let sequence = Sequence { request, prompt: prompt.to_vec(), max_new_tokens: TOKENS, sampling };
    assert_eq!(executor.admit(sequence).unwrap(), Admission::Admitted);
    loop {
        if let PrefillProgress::Done(token) = executor.prefill(request).unwrap() {
            return token;
        }
    }
}

/// What requests say in one batch: along given tokens, or along their own.
///
/// # Panics
/// When one is not taken, or fails.
pub fn batch(
    executor: &mut impl Executor,
    requests: &[(Vec<TokenId>, SamplingParams)],
    along: Option<&[Vec<TokenId>]>,
) -> Vec<Vec<TokenId>> {
    let ids: Vec<RequestId> = (0..requests.len() as u64).map(RequestId).collect();
    let first = ids.iter().zip(requests).map(|(id, (prompt, sampling))| start(executor, *id, prompt, *sampling));
    let mut said: Vec<Vec<TokenId>> = first.map(|token| vec![token]).collect();
    for place in 0..TOKENS - 1 {
        let token = |row: usize| along.map_or(said[row][place], |along| along[row][place]);
        let rows: Vec<DecodeRow> =
            ids.iter().enumerate().map(|(row, request)| DecodeRow { request: *request, token: token(row) }).collect();
        let next = executor.decode(&rows).unwrap();
        said.iter_mut().zip(next).for_each(|(said, token)| said.push(token.unwrap()));
    }
    ids.into_iter().for_each(|id| executor.release(id));
    said
}

/// How far the logit of `token` lies below the largest, in parts of the distance between the largest and the mean.
fn gap(logits: &[f32], token: TokenId) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mean = logits.iter().sum::<f32>() / logits.len() as f32;
    (largest - logits[token.index()]) / (largest - mean)
}

/// What the CPU says of each prompt alone, and the logits behind each token.
pub struct Reference {
    prompts: Vec<Vec<TokenId>>,
    said: Vec<(Vec<TokenId>, Vec<Vec<f32>>)>,
}

impl Reference {
    /// Of the prompts of [`prompts`].
    pub fn new(model: &Twin) -> Self {
        let (prompts, mut cpu) = (prompts(), dense(&model.cpu, 512));
        Self { said: prompts.iter().map(|prompt| greedy(&mut cpu, prompt, TOKENS)).collect(), prompts }
    }

    /// The largest gap at places where `executor` says something else, and how many these are.
    pub fn compare(&self, executor: &mut impl Executor) -> (f32, usize) {
        let requests: Vec<_> = self.prompts.iter().map(|prompt| (prompt.clone(), SamplingParams::default())).collect();
        let along: Vec<Vec<TokenId>> = self.said.iter().map(|(tokens, _)| tokens.clone()).collect();
        let (mut widest, mut different) = (0.0_f32, 0);
        for (got, (want, logits)) in batch(executor, &requests, Some(&along)).iter().zip(&self.said) {
            for place in (0..TOKENS).filter(|place| got[*place] != want[*place]) {
                widest = widest.max(gap(&logits[place], got[place]));
                different += 1;
            }
        }
        (widest, different)
    }
}

/// The least logit that a token may have: that of the last one that top-k and then top-p keep.
fn edge(logits: &[f32], sampling: SamplingParams) -> f32 {
    let SamplingParams { temperature, top_k, top_p, .. } = sampling;
    let mut sorted = logits.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted.truncate(if top_k == 0 { VOCAB } else { top_k });
    let weight = |logit: f32| (f64::from(logit - sorted[0]) / f64::from(temperature)).exp();
    let limit = f64::from(top_p) * sorted.iter().map(|logit| weight(*logit)).sum::<f64>();
    let mut sum = 0.0;
    let enough = sorted.iter().position(|logit| {
        sum += weight(*logit);
        sum >= limit
    });
    sorted[enough.unwrap_or(sorted.len() - 1)]
}

/// Logits of the CPU behind each of the tokens that another executor drew.
fn logits_along(cpu: &mut CpuExecutor, prompt: &[TokenId], drawn: &[TokenId]) -> Vec<Vec<f32>> {
    let request = RequestId(1);
    start(cpu, request, prompt, SamplingParams::default());
    let mut logits = vec![cpu.logits(request).unwrap().to_vec()];
    for token in &drawn[..drawn.len() - 1] {
        cpu.decode(&[DecodeRow { request, token: *token }]).unwrap().remove(0).unwrap();
        logits.push(cpu.logits(request).unwrap().to_vec());
    }
    cpu.release(request);
    logits
}

/// Draws with top-k, top-p, both, and neither, and greedy ones among them.
pub fn draws() -> Vec<(Vec<TokenId>, SamplingParams)> {
    let ways = [(1.5, 5, 1.0), (1.5, 0, 0.6), (1.5, 20, 0.8), (1.5, 1, 1.0), (1.5, 0, 1.0), (0.0, 3, 0.5)];
    let sampling = ways.into_iter().zip(7..).map(|((temperature, top_k, top_p), seed)| SamplingParams {
        temperature,
        top_k,
        top_p,
        seed,
    });
    sampling.map(|sampling| (prompts()[1].clone(), sampling)).collect()
}

/// Checks that every token that [`draws`] said is one that the CPU might draw.
///
/// # Panics
/// When one is not, or when too few draws are unlikely ones for the check to mean anything.
pub fn check_draws(model: &Twin, said: &[Vec<TokenId>]) {
    let mut cpu = dense(&model.cpu, 512);
    let (mut beyond, mut lower) = (0, 0);
    for ((prompt, sampling), said) in draws().iter().zip(said) {
        let logits = logits_along(&mut cpu, prompt, said);
        for (place, (logits, token)) in logits.iter().zip(said).enumerate() {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mean = logits.iter().sum::<f32>() / VOCAB as f32;
            let least = match sampling.temperature {
                0.0 => largest,
                _ => edge(logits, *sampling),
            };
            let logit = logits[token.index()];
            assert!(logit >= least - NEAR * (largest - mean), "{sampling:?}: token {place}: {logit} below {least}");
            if sampling.temperature > 0.0 && sampling.top_k != 1 {
                lower += usize::from(logit < largest);
            }
            if sampling.top_k == 0 && sampling.top_p == 1.0 {
                let narrow = SamplingParams { top_k: 5, ..*sampling };
                beyond += usize::from(logit < edge(logits, narrow));
            }
        }
    }
    assert!(lower > 20, "only {lower} draws are not the likeliest token");
    assert!(beyond > 5, "only {beyond} draws of all tokens would have been cut: the cuts are never tried");
}
