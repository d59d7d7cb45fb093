//! Prefill attention: causal, one request a launch.

use super::{KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;
use crate::device::{Device, DeviceError, HeadRows, TensorMap};

/// Shape of prefill attention. Any number of query heads a KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillAttention {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
}

/// Parameters of prefill attention, made by [`PrefillAttention::params`].
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PrefillAttentionParams {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    out: TensorMap,
    q_tokens: i32,
    kv_tokens: i32,
    group: i32,
    section: i32,
    scale: f32,
}

// SAFETY: the fields are those of `Params` in prefill_attention.cu.
unsafe impl KernelParams for PrefillAttentionParams {}

/// How a tile is cut; chosen by measurement, see prefill_attention.cu.
struct Tiling {
    warpgroups: usize,
    keys: usize,
    stages: usize,
}

/// Bytes of keys and values that are read again and again at a time: they stay in the L2 cache.
const SECTION_BYTES: usize = 26 << 20;

impl PrefillAttention {
    fn tiling(&self) -> Tiling {
        match self.head_dim {
            ..=64 => Tiling { warpgroups: 3, keys: 128, stages: 3 },
            _ => Tiling { warpgroups: 2, keys: 128, stages: 2 },
        }
    }

    /// Parameters for the last `q.tokens` tokens of a request whose keys and values so far, those of these tokens
    /// included, are `k` and `v`. Query head `h` reads KV head `h / (q.heads / k.heads)`; `out` is shaped as `q`.
    /// Scores are scaled by `1 / sqrt(head_dim)`.
    ///
    /// # Errors
    /// [`DeviceError`] when the shapes do not fit together, or as [`Device::tensor_map`].
    pub fn params(
        &self,
        device: &Device,
        q: &HeadRows,
        k: &HeadRows,
        v: &HeadRows,
        out: &HeadRows,
    ) -> Result<PrefillAttentionParams, DeviceError> {
        let shape = |rows: &HeadRows| (rows.tokens, rows.heads, rows.head_dim);
        let fits = shape(q) == shape(out)
            && shape(k) == shape(v)
            && [q.head_dim, k.head_dim] == [self.head_dim; 2]
            && q.heads.checked_rem(k.heads) == Some(0)
            && q.tokens <= k.tokens;
        if !fits {
            let found = [q, k, v, out].map(shape);
            return Err(DeviceError::new(
                "preparing prefill attention",
                format!(
                    "expected [tokens, heads, {}] of q as of out and of k as of v, heads of q a multiple of those of k, \
                     no more tokens of q than of k; found q, k, v, out {found:?}",
                    self.head_dim
                ),
            ));
        }
        let Tiling { keys, .. } = self.tiling();
        let group = q.heads / k.heads;
        let head_bytes = k.tokens * self.head_dim * 4;
        let kv_heads =
            (1..=k.heads).rev().find(|heads| k.heads.is_multiple_of(*heads) && heads * head_bytes <= SECTION_BYTES);
        Ok(PrefillAttentionParams {
            q: device.tensor_map(q, 64)?,
            k: device.tensor_map(k, keys)?,
            v: device.tensor_map(v, keys)?,
            out: device.tensor_map(out, 64)?,
            q_tokens: q.tokens as i32,
            kv_tokens: k.tokens as i32,
            group: group as i32,
            section: (kv_heads.unwrap_or(1) * group) as i32,
            scale: std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt(),
        })
    }

    /// Grid of a launch over the queries `q`: a CTA each tile.
    pub fn grid(&self, q: &HeadRows) -> (u32, u32) {
        ((q.tokens.div_ceil(64 * self.tiling().warpgroups) * q.heads) as u32, 1)
    }
}

impl KernelSpec for PrefillAttention {
    type Params = PrefillAttentionParams;
    const ENTRY: &'static str = "prefill_attention";

    fn unit(&self) -> Unit {
        let Tiling { warpgroups, keys, stages } = self.tiling();
        let defines = [("HEAD_DIM", self.head_dim), ("WARPGROUPS", warpgroups), ("KEYS", keys), ("STAGES", stages)];
        unit(file!("prefill_attention.cu"), &defines)
    }

    fn threads(&self) -> u32 {
        128 * (1 + self.tiling().warpgroups as u32)
    }

    fn shared_bytes(&self) -> usize {
        let Tiling { warpgroups, keys, stages } = self.tiling();
        let barriers = 8 * (1 + 4 * stages);
        // 1,024 bytes to begin at a multiple of them.
        1024 + 2 * self.head_dim * (64 * warpgroups + 2 * keys * stages) + barriers
    }
}
