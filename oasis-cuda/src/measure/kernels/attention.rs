//! Decode attention.

use super::super::random::noise;
use super::{Heads, KernelBench, KernelTime};
use crate::device::{DeviceBuffer, DeviceError, Kernel, Stream};
use crate::kernels::{Address, Attention, AttentionParams};
use crate::layout::{BLOCK_TOKENS, entry_bytes};

/// Attention of a batch whose requests have equally many blocks.
pub struct DecodeAttention {
    kernel: Kernel<Attention>,
    shape: Attention,
    kv_heads: usize,
    requests: usize,
    /// Entries of a (request, KV head): blocks, and the newest.
    units: usize,
    q: DeviceBuffer<u16>,
    /// One set after another.
    entries: DeviceBuffer<u16>,
    copies: usize,
    pages: DeviceBuffer<i32>,
    tail: DeviceBuffer<u16>,
    start: DeviceBuffer<i32>,
    position: DeviceBuffer<i32>,
    out: DeviceBuffer<u16>,
    partial: DeviceBuffer<u8>,
    arrived: DeviceBuffer<u32>,
}

impl DecodeAttention {
    const MOST_CTAS: u32 = 1024;

    /// Bytes of one set of entries.
    fn set_bytes(&self) -> usize {
        self.requests * self.kv_heads * self.units * entry_bytes(self.shape.head_dim)
    }

    fn params(&self, launch: usize) -> AttentionParams {
        let paged = self.shape.paged;
        AttentionParams {
            q: self.q.address(),
            entries: self.entries.address().offset(launch % self.copies * self.set_bytes()),
            pages: if paged { self.pages.address() } else { Address::NONE },
            tail: if paged { Address::NONE } else { self.tail.address() },
            start: self.start.address(),
            position: self.position.address(),
            out: self.out.address(),
            partial: self.partial.address(),
            arrived: self.arrived.address(),
            requests: self.requests as i32,
            kv_heads: self.kv_heads as i32,
            slots: if paged { self.units } else { self.units - 1 } as i32,
            scale: self.shape.scale(),
        }
    }

    /// Queues launch number `launch`.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn launch(&self, stream: &Stream, launch: usize, ctas: u32) -> Result<(), DeviceError> {
        // SAFETY: the buffers have the sizes that the shape asks for, and live as long as this does; launches of one
        // batch are on one stream.
        unsafe { self.kernel.launch(stream, (ctas.min(Self::MOST_CTAS), 1), &self.params(launch)) }
    }
}

impl KernelBench {
    /// A batch over working sets of `blocks` blocks, with `queries` query tokens a request; `paged` over pages instead.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much memory.
    pub fn decode_attention(
        &self,
        heads: Heads,
        queries: usize,
        requests: usize,
        blocks: usize,
        paged: bool,
    ) -> Result<DecodeAttention, DeviceError> {
        let Heads { head_dim, kv_heads, group } = heads;
        let shape = Attention { head_dim, group, queries, paged, stages: 2 };
        let (device, units) = (&self.device, blocks + 1);
        let set = requests * kv_heads * units * entry_bytes(head_dim);
        let copies = Self::copies(set);
        // A multiplier without a common factor: every block has a page of its own, far from its neighbours'.
        let pages = requests * units;
        let step = [2741, 2749].into_iter().find(|step| !pages.is_multiple_of(*step)).unwrap_or(1);
        let pages: Vec<i32> = (0..pages).map(|page| (page * step % pages) as i32).collect();
        let start: Vec<i32> = (0..=requests).map(|request| (request * units) as i32).collect();
        // Somewhere in the newest block, the draft token in it too.
        let position: Vec<i32> = (0..requests).map(|request| (blocks * BLOCK_TOKENS + request % 15) as i32).collect();
        let rows = requests * queries * kv_heads * group * head_dim;
        Ok(DecodeAttention {
            kernel: device.load(&self.compiler, &shape)?,
            shape,
            kv_heads,
            requests,
            units,
            q: noise(device, rows * 2)?,
            entries: noise(device, copies * set)?,
            copies,
            pages: device.upload(&pages)?,
            tail: noise(device, requests * kv_heads * 2 * entry_bytes(head_dim))?,
            start: device.upload(&start)?,
            position: device.upload(&position)?,
            out: device.zeros(rows)?,
            partial: device.zeros(shape.partial_bytes(DecodeAttention::MOST_CTAS))?,
            arrived: device.zeros(requests * kv_heads)?,
        })
    }

    /// Times [`KernelBench::decode_attention`].
    ///
    /// # Errors
    /// As there, or from the driver.
    pub fn time_attention(
        &self,
        heads: Heads,
        queries: usize,
        requests: usize,
        blocks: usize,
        paged: bool,
        ctas: Option<u32>,
    ) -> Result<KernelTime, DeviceError> {
        let batch = self.decode_attention(heads, queries, requests, blocks, paged)?;
        let few = if requests * heads.kv_heads < 256 { self.full_grid() / 2 } else { self.full_grid() };
        let ctas = ctas.unwrap_or(few);
        let launches = batch.copies.max(12);
        // SAFETY: the batch outlives its launches.
        let micros = unsafe { self.micros(launches, |launch| batch.launch(&self.stream, launch, ctas))? };
        let kind = if paged { "dense attention" } else { "sparse attention" };
        let draft = if queries == 2 { ", draft rows" } else { "" };
        let what = format!("{kind}, batch {requests}, {blocks} blocks, {}{draft}, {ctas} CTAs", heads.name());
        Ok(self.of_bytes(what, micros, batch.set_bytes() as f64))
    }
}
