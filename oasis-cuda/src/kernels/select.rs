//! Top-K and capped admission.

use super::{Address, KernelParams, KernelSpec, file, unit_with_policy};
use crate::compile::Unit;
use oasis_core::policy::DeviceCode;

/// Shape of a selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Select {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Slots of a KV head, K.
    pub slots: usize,
    /// Threads of a CTA.
    pub threads: usize,
    /// Scores a thread holds.
    pub items: usize,
    /// Device code of the selector.
    pub selector: DeviceCode,
    /// Whether the cap is [`SelectParams::link_cap`], which follows the link.
    pub follows_link: bool,
}

impl Select {
    /// Most slots of a KV head that a multiprocessor's shared memory has room to choose for.
    pub const MOST_SLOTS: usize = 5_000;
    /// Victims and misses with their keys, then the slot and the block of every rank.
    const SLOT_BYTES: usize = 2 * 16 + 2 * 4;

    /// The shape for contexts of up to `blocks` blocks and a constant cap; `None` above 16,384 blocks (262,144 tokens).
    pub fn for_blocks(head_dim: usize, slots: usize, blocks: usize, selector: DeviceCode) -> Option<Self> {
        // Few threads with many scores each leave room for other CTAs of an SM.
        let (threads, items) = match blocks {
            0..=1024 => (256, 4),
            1025..=2048 => (256, 8),
            2049..=4096 => (512, 8),
            4097..=8192 => (256, 32),
            8193..=16_384 => (512, 32),
            _ => return None,
        };
        Some(Self { head_dim, slots, threads, items, selector, follows_link: false })
    }
}

/// Parameters of a selection; the grid is `[requests][kv_heads]`, KV heads fastest.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SelectParams {
    /// f32 `[requests][kv_heads][stride]`.
    pub scores: Address,
    /// i32 `[requests]`: position of the newest token; -1 for padding.
    pub position: Address,
    /// i32 `[requests][kv_heads][slots]`: block in each slot, negative where it is free. Updated.
    pub slot_block: Address,
    /// u32 `[requests][kv_heads][slots]`: step that last wanted it. Updated.
    pub last_selected: Address,
    /// u32 `[requests][kv_heads][slots]`: steps that have wanted it since it came. Updated by selectors whose order of
    /// victims depends on it.
    pub times_selected: Address,
    /// u64 `[requests]`: address of the layer's entries `[blocks][kv_heads]` in mapped host memory.
    pub host: Address,
    /// `[requests][kv_heads][slots]` entries.
    pub entries: Address,
    /// `[requests][kv_heads][2]` entries; block `b` lies at `b % 2`.
    pub tail: Address,
    /// One [`CopyList`](super::CopyList).
    pub list: Address,
    /// [`EntryCopy`](super::EntryCopy) `[requests * kv_heads * (slots + 2)]`.
    pub copies: Address,
    /// u32 `[1]`: this step, counted from 1.
    pub step: Address,
    /// KV heads.
    pub kv_heads: i32,
    /// Scores of a KV head, at least as many as it has blocks.
    pub stride: i32,
    /// Slots of a KV head, K.
    pub slots: i32,
    /// Most admissions a KV head, C.
    pub cap: i32,
    /// First blocks that are wanted whatever their score, at most [`slots`](Self::slots).
    pub sinks: i32,
    /// Last complete blocks that are, at most [`slots`](Self::slots).
    pub recent: i32,
    /// u32 `[1]`: where [`Select::follows_link`], takes the place of [`cap`](Self::cap).
    pub link_cap: Address,
    /// One [`LinkStamps`](super::LinkStamps), where [`Select::follows_link`]; none for selections that do not count. Written.
    pub stamps: Address,
}

// SAFETY: the fields are those of `Params` in select.cu.
unsafe impl KernelParams for SelectParams {}

impl KernelSpec for Select {
    type Params = SelectParams;
    const ENTRY: &'static str = "select_blocks";

    fn unit(&self) -> Unit {
        let defines = [
            ("HEAD_DIM", self.head_dim),
            ("THREADS", self.threads),
            ("ITEMS", self.items),
            ("FOLLOWS_LINK", usize::from(self.follows_link)),
        ];
        unit_with_policy(file!("select.cu"), &defines, "SELECTOR", self.selector)
    }

    fn threads(&self) -> u32 {
        self.threads as u32
    }

    fn shared_bytes(&self) -> usize {
        self.slots * Self::SLOT_BYTES
    }
}
