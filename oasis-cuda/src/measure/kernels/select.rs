//! Top-K and selection.

use super::super::random::Random;
use super::{Heads, KernelBench, KernelTime};
use crate::device::{DeviceBuffer, DeviceError};
use crate::kernels::{Address, CopyList, EntryCopy, Select, SelectParams};
use crate::layout::BLOCK_TOKENS;
use oasis_core::policy::{DeviceCode, Kept};

/// Launches of a timing, and steps whose scores they see.
const STEPS: usize = 20;
/// Selection computes addresses and touches none of them.
const ENTRIES: Address = Address(1 << 40);
const TAIL: Address = Address(2 << 40);
const HOST: u64 = 3 << 40;

impl KernelBench {
    /// Times the ranking of `blocks` blocks a KV head and the selection of at most `cap` for its `slots` slots; `kind` names
    /// the selector. A tenth of what is wanted changes from step to step, about what decoding shows.
    ///
    /// # Errors
    /// [`DeviceError`] for too many blocks, without the memory, or when the selector does not compile.
    pub fn time_select(
        &self,
        heads: Heads,
        (requests, blocks): (usize, usize),
        (slots, cap): (usize, usize),
        kind: &str,
        selector: DeviceCode,
    ) -> Result<KernelTime, DeviceError> {
        let device = &self.device;
        let shape = Select::for_blocks(heads.head_dim, slots, blocks, selector).ok_or_else(|| {
            DeviceError::new("timing selection", format!("expected at most 16,384 blocks, found {blocks}"))
        })?;
        let pairs = requests * heads.kv_heads;
        let mut random = Random(1);
        let base: Vec<f32> = (0..pairs * blocks).map(|_| 6.0 * random.float()).collect();
        let drifted = |random: &mut Random| base.iter().map(|score| score + 0.16 * random.float()).collect::<Vec<_>>();
        let scores: Vec<DeviceBuffer<f32>> =
            (0..STEPS).map(|_| device.upload(&drifted(&mut random))).collect::<Result<_, _>>()?;
        let hosts: Vec<u64> = (0..requests as u64).map(|request| HOST + (request << 36)).collect();
        let position = device.upload(&vec![(blocks * BLOCK_TOKENS + 3) as i32; requests])?;
        let slot_block = device.upload(&vec![-1_i32; pairs * slots])?;
        let last_selected: DeviceBuffer<u32> = device.zeros(pairs * slots)?;
        let times_selected: DeviceBuffer<u32> = device.zeros(pairs * slots)?;
        let (host, step) = (device.upload(&hosts)?, device.upload(&[1_u32])?);
        let list: DeviceBuffer<CopyList> = device.zeros(1)?;
        // Every replay appends to the list: it has room for all that the launches of all replays may append.
        let copies: DeviceBuffer<EntryCopy> = device.zeros(pairs * (slots + cap * STEPS * 10))?;
        let kernel = device.load(&self.compiler, &shape)?;
        let kept = Kept::default();
        let params = |launch: usize| SelectParams {
            scores: scores[launch].address(),
            position: position.address(),
            slot_block: slot_block.address(),
            last_selected: last_selected.address(),
            times_selected: times_selected.address(),
            host: host.address(),
            entries: ENTRIES,
            tail: TAIL,
            list: list.address(),
            copies: copies.address(),
            step: step.address(),
            kv_heads: heads.kv_heads as i32,
            stride: blocks as i32,
            slots: slots as i32,
            cap: cap as i32,
            sinks: kept.sinks as i32,
            recent: kept.recent as i32,
            link_cap: Address::NONE,
            stamps: Address::NONE,
        };
        let grid = (heads.kv_heads as u32, requests as u32);
        // SAFETY: the buffers have the sizes that the shape asks for; nothing reads the addresses that are computed.
        let micros = unsafe { self.micros(STEPS, |launch| kernel.launch(&self.stream, grid, &params(launch)))? };
        let what = format!("top-K + {kind}, batch {requests}, {blocks} blocks, K {slots}, C {cap}");
        Ok(KernelTime::new(what, micros, None, "bound by its launch; aim 12 us at batch 64"))
    }
}
