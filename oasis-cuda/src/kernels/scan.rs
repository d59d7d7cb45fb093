//! Scores of all complete blocks by a linear summarizer.

use super::{Address, KernelParams, KernelSpec, file, unit_with_policy};
use crate::compile::Unit;
use crate::layout::tile_bytes;
use oasis_core::policy::DeviceCode;

/// Shape of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Query heads of a KV head: 1 to 16.
    pub group: usize,
    /// Query tokens of a request.
    pub queries: usize,
    /// The one that blocks are ranked by.
    pub query: usize,
    /// Join the scores of a group by their maximum; else by their sum.
    pub max: bool,
    /// Tiles in flight per warp.
    pub stages: usize,
    /// Device code of the summarizer.
    pub summarizer: DeviceCode,
    /// Bytes of a block's summary.
    pub bytes: usize,
}

impl Scan {
    /// Tiles in flight per warp for summaries of `bytes` bytes a block.
    pub fn stages(bytes: usize) -> usize {
        if bytes < 192 { 4 } else { 2 }
    }

    /// CTAs on a multiprocessor beside a step's products: arithmetic bounds the scan of small summaries, and more warps hide
    /// its latencies.
    pub fn ctas_per_multiprocessor(bytes: usize) -> u32 {
        match bytes {
            0..192 => 3,
            192..384 => 2,
            _ => 1,
        }
    }
}

/// Parameters of a scan.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ScanParams {
    /// bf16 `[requests][queries][kv_heads * group][head_dim]`.
    pub q: Address,
    /// `[requests][kv_heads][max_tiles]` tiles of 16 blocks.
    pub summaries: Address,
    /// i32 `[requests + 1]`: tiles of a KV head before each request.
    pub start: Address,
    /// i32 `[requests]`: complete blocks.
    pub blocks: Address,
    /// f32 `[requests][kv_heads][max_tiles * 16]`; places beyond the last block are left alone.
    pub scores: Address,
    /// Requests.
    pub requests: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// Most tiles of a KV head.
    pub max_tiles: i32,
}

// SAFETY: the fields are those of `Params` in scan.cu.
unsafe impl KernelParams for ScanParams {}

impl KernelSpec for Scan {
    type Params = ScanParams;
    const ENTRY: &'static str = "scan_summaries";

    fn unit(&self) -> Unit {
        let defines = [
            ("HEAD_DIM", self.head_dim),
            ("GROUP", self.group),
            ("QUERIES", self.queries),
            ("QUERY", self.query),
            ("AGGREGATE_MAX", usize::from(self.max)),
            ("STAGES", self.stages),
            ("SUMMARY_BYTES", self.bytes),
        ];
        unit_with_policy(file!("scan.cu"), &defines, "SUMMARIZER", self.summarizer)
    }

    fn threads(&self) -> u32 {
        128
    }

    fn shared_bytes(&self) -> usize {
        // A warp's tiles begin at multiples of a block's rows: its bytes but for scales, which are few.
        let rows = (self.bytes / 128 * 128).max(128);
        4 * self.stages * tile_bytes(self.bytes).next_multiple_of(rows)
    }
}
