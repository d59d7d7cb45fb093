//! Layout of a request's file, and the checks of what is read back.
//!
//! ```text
//! file    head (1 page) | record of layer 0, block 0 | layer 0, block 1 | ... | layer 1, block 0 | ...
//! record  head (whole pages): names, length, one checksum an entry | entries [kv_heads][entry_bytes] | zeros to a page
//! ```
//!
//! Entries follow each other without gaps, so that one of a multiple of 4 KiB is read by exactly its own pages. Its
//! checksum is not among them: a live request's checksums are in memory (8 bytes an entry) and know the very bytes that
//! were put, so that whole entries of another request or block fail like flipped bits. Those in the record's head, which
//! names request, generation, layer, block, length and layout, serve recovery.
//!
//! Numbers are in the byte order of the machine; the magic number tells a foreign one.

use crate::disk::PAGE;
use bytemuck::{Pod, Zeroable};
use oasis_core::geometry::{KvDtype, KvGeometry, LAYOUT_VERSION};
use oasis_core::ids::{BlockId, LayerId};
use twox_hash::XxHash3_64;

const FILE_MAGIC: u64 = u64::from_le_bytes(*b"OASISKV1");
const RECORD_MAGIC: u64 = u64::from_le_bytes(*b"OASISBLK");

/// Name of a file's owner, unique in the folder: request ids come again in a later run, generations do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub request: u64,
    pub generation: u64,
}

/// Where things are in a request's file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    pub geometry: KvGeometry,
    /// Blocks of a layer.
    pub blocks: usize,
}

impl Layout {
    fn head_bytes(&self) -> usize {
        (size_of::<RecordHead>() + self.geometry.kv_heads * size_of::<u64>()).next_multiple_of(PAGE)
    }

    pub fn record_bytes(&self) -> usize {
        self.head_bytes() + self.geometry.block_bytes().next_multiple_of(PAGE)
    }

    /// Bytes of the whole file; more than any file can have where they cannot be counted.
    pub fn file_bytes(&self) -> u64 {
        let records = (self.geometry.layers as u64).saturating_mul(self.blocks as u64);
        records.saturating_mul(self.record_bytes() as u64).saturating_add(PAGE as u64)
    }

    pub fn records(&self) -> usize {
        self.geometry.layers * self.blocks
    }

    /// Number of a record.
    pub fn record(&self, layer: LayerId, block: BlockId) -> usize {
        layer.index() * self.blocks + block.index()
    }

    pub fn name(&self, record: usize) -> (LayerId, BlockId) {
        (LayerId::from(record / self.blocks), BlockId::from(record % self.blocks))
    }

    /// Offset of a record in the file.
    pub fn record_offset(&self, record: usize) -> u64 {
        PAGE as u64 + record as u64 * self.record_bytes() as u64
    }

    /// Offset of an entry in its record.
    pub fn entry_offset(&self, head: usize) -> usize {
        self.head_bytes() + head * self.geometry.entry_bytes()
    }

    /// Fills `record` with a block; the checksums of its entries.
    pub fn encode(&self, owner: Owner, number: usize, block: &[u8], record: &mut [u8]) -> Vec<u64> {
        let entries = block.chunks_exact(self.geometry.entry_bytes());
        let checksums: Vec<u64> = entries.map(checksum).collect();
        let (head, payload) = record.split_at_mut(self.head_bytes());
        let (bytes, padding) = payload.split_at_mut(block.len());
        bytes.copy_from_slice(block);
        padding.fill(0);
        head.fill(0);
        let (fixed, list) = head.split_at_mut(size_of::<RecordHead>());
        list[..checksums.len() * size_of::<u64>()].copy_from_slice(bytemuck::cast_slice(&checksums));
        fixed.copy_from_slice(bytemuck::bytes_of(&self.record_head(owner, number, &checksums)));
        checksums
    }

    /// The checksums of a record that holds a whole block, the one that belongs there.
    pub fn decode(&self, owner: Owner, number: usize, record: &[u8]) -> Option<Vec<u64>> {
        let (head, payload) = record.split_at_checked(self.head_bytes())?;
        let (fixed, list) = head.split_at(size_of::<RecordHead>());
        let list = &list[..self.geometry.kv_heads * size_of::<u64>()];
        let checksums: Vec<u64> = list.chunks_exact(size_of::<u64>()).map(bytemuck::pod_read_unaligned).collect();
        let entries = payload.get(..self.geometry.block_bytes())?.chunks_exact(self.geometry.entry_bytes());
        let is_whole = fixed == bytemuck::bytes_of(&self.record_head(owner, number, &checksums))
            && entries.zip(&checksums).all(|(entry, &sum)| checksum(entry) == sum);
        is_whole.then_some(checksums)
    }

    /// The head of a record, wholly known from where it stands and the checksums in it.
    fn record_head(&self, owner: Owner, number: usize, checksums: &[u64]) -> RecordHead {
        let (layer, block) = self.name(number);
        let mut head = RecordHead {
            magic: RECORD_MAGIC,
            checksum: XxHash3_64::oneshot(bytemuck::cast_slice(checksums)),
            request: owner.request,
            generation: owner.generation,
            length: self.geometry.block_bytes() as u64,
            layer: layer.0,
            block: block.0,
            kv_heads: self.geometry.kv_heads as u32,
            layout: LAYOUT_VERSION,
        };
        head.checksum = XxHash3_64::oneshot(bytemuck::bytes_of(&head));
        head
    }
}

/// Checksum of an entry.
pub(super) fn checksum(entry: &[u8]) -> u64 {
    XxHash3_64::oneshot(entry)
}

/// Front of a record; the checksums of the entries follow.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RecordHead {
    magic: u64,
    /// Of this head and the list of checksums.
    checksum: u64,
    request: u64,
    generation: u64,
    /// Bytes of all entries.
    length: u64,
    layer: u32,
    block: u32,
    kv_heads: u32,
    layout: u32,
}

/// Front of a file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FileHead {
    magic: u64,
    /// Of this head, with zero in this place.
    checksum: u64,
    request: u64,
    generation: u64,
    blocks: u64,
    layers: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_tokens: u32,
    /// 0 is `f32`, 1 is `bf16`.
    dtype: u32,
    layout: u32,
    reserved: u32,
}

/// Writes the head of a file to the front of `page`.
pub(super) fn encode_file(owner: Owner, layout: &Layout, page: &mut [u8]) {
    let geometry = &layout.geometry;
    let mut head = FileHead {
        magic: FILE_MAGIC,
        checksum: 0,
        request: owner.request,
        generation: owner.generation,
        blocks: layout.blocks as u64,
        layers: geometry.layers as u32,
        q_heads: geometry.q_heads as u32,
        kv_heads: geometry.kv_heads as u32,
        head_dim: geometry.head_dim as u32,
        block_tokens: geometry.block_tokens as u32,
        dtype: match geometry.dtype {
            KvDtype::F32 => 0,
            KvDtype::Bf16 => 1,
        },
        layout: LAYOUT_VERSION,
        reserved: 0,
    };
    head.checksum = XxHash3_64::oneshot(bytemuck::bytes_of(&head));
    page.fill(0);
    page[..size_of::<FileHead>()].copy_from_slice(bytemuck::bytes_of(&head));
}

/// Reads the head of a file of `len` bytes; `None` when it is torn, foreign or of another layout.
pub(super) fn decode_file(page: &[u8], len: u64) -> Option<(Owner, Layout)> {
    let mut head: FileHead = bytemuck::pod_read_unaligned(page.get(..size_of::<FileHead>())?);
    let checksum = std::mem::take(&mut head.checksum);
    if head.magic != FILE_MAGIC
        || head.layout != LAYOUT_VERSION
        || checksum != XxHash3_64::oneshot(bytemuck::bytes_of(&head))
    {
        return None;
    }
    let geometry = KvGeometry {
        layers: head.layers as usize,
        q_heads: head.q_heads as usize,
        kv_heads: head.kv_heads as usize,
        head_dim: head.head_dim as usize,
        block_tokens: head.block_tokens as usize,
        dtype: if head.dtype == 0 { KvDtype::F32 } else { KvDtype::Bf16 },
    };
    let layout = Layout { geometry, blocks: usize::try_from(head.blocks).ok()? };
    let owner = Owner { request: head.request, generation: head.generation };
    (layout.file_bytes() <= len).then_some((owner, layout))
}
