//! Prefill attention.

use crate::rig::{Outcome, Rig, floats, name, poisoned};
use half::bf16;
use oasis_cuda::device::{DeviceBuffer, DeviceError, HeadRows, Kernel};
use oasis_cuda::kernels::PrefillAttention;
use oasis_cuda::measure::kernels::{Heads, KernelBench};
use rayon::prelude::*;

/// Tokens of memory beyond the request's.
const BEYOND: usize = 15;

/// A request on the device, of which the last `q_tokens` tokens are the queries.
struct Request {
    shape: PrefillAttention,
    q_heads: usize,
    kv_heads: usize,
    q_tokens: usize,
    kv_tokens: usize,
    /// `[kv_tokens][q_heads + 2 * kv_heads][head_dim]`.
    qkv: Vec<bf16>,
    device: Buffers,
}

struct Buffers {
    /// As the request's, but what must not be read is NaN: queries of the tokens before, and what lies beyond.
    qkv: DeviceBuffer<bf16>,
    /// The same K and V as `[2 * kv_heads][kv_tokens][head_dim]`.
    kv_by_head: Option<DeviceBuffer<bf16>>,
    /// `[kv_tokens + BEYOND][q_heads][head_dim]`, of which the queries' tokens are written.
    out: DeviceBuffer<bf16>,
}

impl Request {
    fn new(rig: &mut Rig, head_dim: usize, heads: (usize, usize), tokens: (usize, usize)) -> Outcome<Self> {
        let ((q_heads, kv_heads), (q_tokens, kv_tokens)) = (heads, tokens);
        let row = (q_heads + 2 * kv_heads) * head_dim;
        let qkv = rig.random.bf16s(kv_tokens * row);
        let mut given = qkv.clone();
        for token in given.chunks_mut(row).take(kv_tokens - q_tokens) {
            token[..q_heads * head_dim].fill(bf16::NAN);
        }
        given.resize((kv_tokens + BEYOND) * row, bf16::NAN);
        let out = poisoned(&rig.device, (kv_tokens + BEYOND) * q_heads * head_dim)?;
        let device = Buffers { qkv: rig.device.upload(&given)?, kv_by_head: None, out };
        Ok(Self { shape: PrefillAttention { head_dim }, q_heads, kv_heads, q_tokens, kv_tokens, qkv, device })
    }

    /// Lets the kernel read K and V in another layout.
    fn move_kv(&mut self, rig: &Rig) -> Outcome<()> {
        let heads = self.q_heads..self.q_heads + 2 * self.kv_heads;
        let rows = heads.flat_map(|head| (0..self.kv_tokens).map(move |token| (token, head)));
        let kv: Vec<bf16> = rows.flat_map(|(token, head)| self.row(token, head)).copied().collect();
        self.device.kv_by_head = Some(rig.device.upload(&kv)?);
        Ok(())
    }

    /// Launches of the kernel, on the rig's stream.
    fn launcher<'a>(
        &self,
        rig: &Rig,
        kernel: &'a Kernel<PrefillAttention>,
    ) -> Outcome<impl Fn() -> Result<(), DeviceError> + use<'a>> {
        let PrefillAttention { head_dim } = self.shape;
        let (q, kv) = (self.q_heads, self.kv_heads);
        let rows = HeadRows::dense(self.device.qkv.address(), self.kv_tokens, q + 2 * kv, head_dim);
        let last = |rows: HeadRows| rows.token_range(self.kv_tokens - self.q_tokens, self.q_tokens);
        let queries = last(rows.head_range(0, q));
        let kv_rows = match &self.device.kv_by_head {
            None => rows.head_range(q, 2 * kv),
            Some(buffer) => {
                let (token_bytes, head_bytes) = (head_dim * 2, self.kv_tokens * head_dim * 2);
                HeadRows { address: buffer.address(), token_bytes, head_bytes, ..rows }
            }
        };
        let (k, v) = (kv_rows.head_range(0, kv), kv_rows.head_range(kv, kv));
        let out = last(HeadRows::dense(self.device.out.address(), self.kv_tokens, q, head_dim));
        let params = self.shape.params(&rig.device, &queries, &k, &v, &out)?;
        let (stream, grid) = (rig.stream.clone(), self.shape.grid(&queries));
        // SAFETY: the request's buffers have the sizes that the maps say; they outlive what is measured or compared.
        Ok(move || unsafe { kernel.launch(&stream, grid, &params) })
    }

    fn row(&self, token: usize, head: usize) -> &[bf16] {
        let head_dim = self.shape.head_dim;
        &self.qkv[(token * (self.q_heads + 2 * self.kv_heads) + head) * head_dim..][..head_dim]
    }

    /// Attention of one query token and head in double precision.
    fn reference(&self, token: usize, head: usize) -> Vec<f64> {
        let position = self.kv_tokens - self.q_tokens + token;
        let kv_head = self.q_heads + head / (self.q_heads / self.kv_heads);
        let q = self.row(position, head);
        let scale = 1.0 / (self.shape.head_dim as f64).sqrt();
        let score = |key: usize| -> f64 { floats(q).zip(floats(self.row(key, kv_head))).map(|(q, k)| q * k).sum() };
        let scores: Vec<f64> = (0..=position).map(|key| score(key) * scale).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.shape.head_dim];
        for (key, weight) in weights.iter().enumerate() {
            for (out, v) in out.iter_mut().zip(floats(self.row(key, kv_head + self.kv_heads))) {
                *out += weight / sum * v;
            }
        }
        out
    }

    /// Compares the outputs of `rows`, as (token, head), and what lies before and behind them.
    fn compare(&self, rig: &mut Rig, what: &str, rows: &[(usize, usize)]) -> Outcome<()> {
        let all = self.device.out.read()?;
        let head_dim = self.shape.head_dim;
        let width = self.q_heads * head_dim;
        let (before, out) = all.split_at((self.kv_tokens - self.q_tokens) * width);
        let (out, after) = out.split_at(self.q_tokens * width);
        let want: Vec<f64> = rows.par_iter().flat_map_iter(|(token, head)| self.reference(*token, *head)).collect();
        let got =
            rows.iter().flat_map(|(token, head)| floats(&out[(token * self.q_heads + head) * head_dim..][..head_dim]));
        let what = format!(
            "d {head_dim}, {}/{} heads, {} of {} tokens{what}",
            self.q_heads, self.kv_heads, self.q_tokens, self.kv_tokens
        );
        let what = name::<PrefillAttention>(&what);
        rig.compare(&what, got, &want, 1e-2);
        let untouched = before.iter().chain(after).filter(|value| value.to_bits() == 0xffff).count();
        rig.same(format!("{what}: around"), &[untouched], &[before.len() + after.len()]);
        Ok(())
    }
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    // Groups of 1, 3, 4 and 8; around the edges of tiles; the last token, and chunks after keys that are there already.
    let tokens = [
        (1, 1),
        (1, 16),
        (1, 127),
        (1, 128),
        (1, 129),
        (1, 200),
        (63, 64),
        (64, 64),
        (127, 127),
        (128, 128),
        (129, 129),
        (192, 192),
        (193, 500),
        (256, 384),
        (70, 1025),
        (640, 700),
    ];
    for head_dim in [64, 128] {
        let kernel = rig.device.load(&rig.compiler, &PrefillAttention { head_dim })?;
        for tokens in tokens {
            for (i, heads) in [(2, 2), (6, 2), (8, 2), (8, 1)].into_iter().enumerate() {
                let mut request = Request::new(rig, head_dim, heads, tokens)?;
                if i % 2 == 1 {
                    request.move_kv(rig)?;
                }
                let what = if i % 2 == 1 { ", KV by head" } else { "" };
                let launch = request.launcher(rig, &kernel)?;
                launch()?;
                let rows: Vec<_> = (0..tokens.0).flat_map(|t| (0..heads.0).map(move |h| (t, h))).collect();
                request.compare(rig, what, &rows)?;
            }
        }
    }
    for (head_dim, heads, tokens) in [
        (128, (32, 8), (16_384, 16_384)),
        (128, (32, 8), (1, 16_384)),
        (128, (32, 4), (1_000, 32_000)),
        (64, (9, 3), (10_007, 10_007)),
        (64, (9, 3), (1, 10_007)),
    ] {
        let request = Request::new(rig, head_dim, heads, tokens)?;
        let kernel = rig.device.load(&rig.compiler, &request.shape)?;
        let launch = request.launcher(rig, &kernel)?;
        launch()?;
        let mut rows = vec![(0, 0), (tokens.0 - 1, heads.0 - 1)];
        rows.extend((0..200).map(|_| (rig.random.below(tokens.0), rig.random.below(heads.0))));
        request.compare(rig, ", sampled", &rows)?;
    }
    Ok(())
}

pub fn time(rig: &mut Rig, bench: &KernelBench) -> Outcome<()> {
    for (head_dim, kv_heads, group, (q_tokens, kv_tokens)) in [
        (128, 8, 4, (4_096, 4_096)),
        (128, 8, 4, (16_384, 16_384)),
        (128, 8, 4, (32_000, 32_000)),
        (128, 8, 4, (8_192, 32_000)),
        (128, 8, 4, (1, 16_384)),
        (128, 4, 8, (16_384, 16_384)),
        (64, 3, 3, (16_384, 16_384)),
    ] {
        rig.push(bench.time_prefill(Heads { head_dim, kv_heads, group }, q_tokens, kv_tokens)?);
    }
    Ok(())
}
