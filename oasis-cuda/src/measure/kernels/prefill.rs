//! Prefill attention.

use super::super::random::noise;
use super::{Heads, KernelBench, KernelTime, TENSOR_FLOPS};
use crate::device::{DeviceBuffer, DeviceError, HeadRows};
use crate::kernels::PrefillAttention;

impl KernelBench {
    /// Times attention of the last `q_tokens` of `kv_tokens` tokens of one request.
    ///
    /// # Errors
    /// [`DeviceError`] when there are more queries than keys, or not that much memory.
    pub fn time_prefill(&self, heads: Heads, q_tokens: usize, kv_tokens: usize) -> Result<KernelTime, DeviceError> {
        let Heads { head_dim, kv_heads, group } = heads;
        let (q_heads, shape) = (kv_heads * group, PrefillAttention { head_dim });
        let all_heads = q_heads + 2 * kv_heads;
        let qkv = noise(&self.device, kv_tokens * all_heads * head_dim * 2)?;
        let out: DeviceBuffer<u16> = self.device.zeros(q_tokens * q_heads * head_dim)?;
        let rows = HeadRows::dense(qkv.address(), kv_tokens, all_heads, head_dim);
        let queries = rows.head_range(0, q_heads).token_range(kv_tokens.saturating_sub(q_tokens), q_tokens);
        let (k, v) = (rows.head_range(q_heads, kv_heads), rows.head_range(q_heads + kv_heads, kv_heads));
        let out = HeadRows::dense(out.address(), q_tokens, q_heads, head_dim);
        let params = shape.params(&self.device, &queries, &k, &v, &out)?;
        let (kernel, grid) = (self.device.load(&self.compiler, &shape)?, shape.grid(&queries));
        // SAFETY: the buffers have the sizes that the maps say; they outlive the launches.
        let micros = unsafe { self.micros(4, |_| kernel.launch(&self.stream, grid, &params))? };
        // Every query token sees half of the queries' own keys, and all before them.
        let pairs = q_tokens as f64 * (kv_tokens as f64 - q_tokens as f64 / 2.0);
        let operations = 4.0 * (q_heads * head_dim) as f64 * pairs;
        let what = format!("prefill attention, {q_tokens} of {kv_tokens} tokens, {}", heads.name());
        let figure = format!("{:.1} TFLOP/s", operations / micros / 1e6);
        Ok(KernelTime::new(what, micros, Some(operations / TENSOR_FLOPS * 1e6), figure))
    }
}
