//! Scores of summaries.

use super::super::random::noise;
use super::{Heads, KernelBench, KernelTime};
use crate::device::{DeviceBuffer, DeviceError, Kernel, Stream};
use crate::kernels::{Scan, ScanParams};
use crate::layout::{BLOCK_TOKENS, tile_bytes};
use oasis_core::policy::DeviceCode;

/// A scan of a batch whose requests have equally many blocks.
pub struct SummaryScan {
    kernel: Kernel<Scan>,
    shape: Scan,
    kv_heads: usize,
    requests: usize,
    tiles: usize,
    q: DeviceBuffer<u16>,
    /// One set after another.
    summaries: DeviceBuffer<u16>,
    copies: usize,
    start: DeviceBuffer<i32>,
    blocks: DeviceBuffer<i32>,
    scores: DeviceBuffer<f32>,
}

impl SummaryScan {
    fn set_bytes(&self) -> usize {
        self.requests * self.kv_heads * self.tiles * tile_bytes(self.shape.bytes)
    }

    /// Queues launch number `launch`.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn launch(&self, stream: &Stream, launch: usize, ctas: u32) -> Result<(), DeviceError> {
        let params = ScanParams {
            q: self.q.address(),
            summaries: self.summaries.address().offset(launch % self.copies * self.set_bytes()),
            start: self.start.address(),
            blocks: self.blocks.address(),
            scores: self.scores.address(),
            requests: self.requests as i32,
            kv_heads: self.kv_heads as i32,
            max_tiles: self.tiles as i32,
        };
        // SAFETY: the buffers have the sizes that the shape asks for, and live as long as this does; launches of one
        // batch are on one stream.
        unsafe { self.kernel.launch(stream, (ctas, 1), &params) }
    }
}

impl KernelBench {
    /// A batch of `blocks` blocks a request, of whose `queries` query tokens the last one counts; summaries of `bytes` bytes
    /// a block.
    ///
    /// # Errors
    /// [`DeviceError`] when there is not that much memory, or the summarizer does not compile.
    pub fn summary_scan(
        &self,
        heads: Heads,
        queries: usize,
        (requests, blocks): (usize, usize),
        (summarizer, bytes): (DeviceCode, usize),
    ) -> Result<SummaryScan, DeviceError> {
        let Heads { head_dim, kv_heads, group } = heads;
        let stages = Scan::stages(bytes);
        let shape = Scan { head_dim, group, queries, query: queries - 1, max: false, stages, summarizer, bytes };
        let (device, tiles) = (&self.device, blocks.div_ceil(BLOCK_TOKENS));
        let set = requests * kv_heads * tiles * tile_bytes(bytes);
        let copies = Self::copies(set);
        let start: Vec<i32> = (0..=requests).map(|request| (request * tiles) as i32).collect();
        Ok(SummaryScan {
            kernel: device.load(&self.compiler, &shape)?,
            shape,
            kv_heads,
            requests,
            tiles,
            q: noise(device, requests * queries * kv_heads * group * head_dim * 2)?,
            summaries: noise(device, copies * set)?,
            copies,
            start: device.upload(&start)?,
            blocks: device.upload(&vec![blocks as i32; requests])?,
            scores: device.zeros(requests * kv_heads * tiles * BLOCK_TOKENS)?,
        })
    }

    /// Times [`KernelBench::summary_scan`]; `kind` names the summarizer.
    ///
    /// # Errors
    /// As there, or from the driver.
    pub fn time_scan(
        &self,
        heads: Heads,
        queries: usize,
        (requests, blocks): (usize, usize),
        kind: &str,
        summarizer: (DeviceCode, usize),
    ) -> Result<KernelTime, DeviceError> {
        let batch = self.summary_scan(heads, queries, (requests, blocks), summarizer)?;
        let ctas = self.full_grid();
        let launches = batch.copies.max(12);
        // SAFETY: the batch outlives its launches.
        let micros = unsafe { self.micros(launches, |launch| batch.launch(&self.stream, launch, ctas))? };
        let what = format!("{kind} scan, batch {requests}, {blocks} blocks, {}", heads.name());
        Ok(self.of_bytes(what, micros, batch.set_bytes() as f64))
    }
}
