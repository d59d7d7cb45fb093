//! The list of copies that selection writes and the kernel that carries it out.

use super::{Address, KernelParams, KernelSpec, file, unit};
use crate::compile::Unit;
use crate::layout::entry_bytes;

/// One entry to be copied; either side may be device memory or mapped host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct EntryCopy {
    /// Source; none is nothing to do.
    pub from: Address,
    /// Destination.
    pub to: Address,
}

/// What a layer's kernels tell the host of the link, in mapped host memory. Times are nanoseconds of the device's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct LinkStamps {
    /// A selection began.
    pub selected: u64,
    /// A gather that carried something began.
    pub began: u64,
    /// It was done.
    pub ended: u64,
    /// Entries that it carried.
    pub entries: u64,
}

/// Header of a list of copies, in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct CopyList {
    /// Copies waiting; the gather sets it back to 0.
    pub count: u32,
    /// CTAs of the gather that are done.
    pub finished: u32,
    /// Entries of first working sets since the start.
    pub filled: u64,
    /// Admitted entries since the start.
    pub admitted: u64,
    /// Wanted entries that the cap left outside since the start.
    pub deferred: u64,
}

/// Shape of a gather: a ring of entries a CTA.
///
/// Alone, two CTAs with 16 entries fill a PCIe 5 link. Beside kernels that keep the device memory busy its copies wait
/// longer, so that more bytes must be in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gather {
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Entries of the ring, 2 to 32.
    pub stages: usize,
    /// Of them, those that may still be on their way to the slots; at least 1.
    pub stores: usize,
    /// Whether it writes down how long it takes.
    pub timed: bool,
}

/// Parameters of a gather; any number of CTAs.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GatherParams {
    /// One [`CopyList`].
    pub list: Address,
    /// [`EntryCopy`] `[count]`.
    pub copies: Address,
    /// One [`LinkStamps`], where [`Gather::timed`]; none for copies that do not cross the link. Written.
    pub stamps: Address,
}

impl GatherParams {
    /// Parameters of a gather that nobody times.
    pub fn new(list: Address, copies: Address) -> Self {
        Self { list, copies, stamps: Address::NONE }
    }
}

// SAFETY: the fields are those of `Params` in gather.cu.
unsafe impl KernelParams for GatherParams {}

impl KernelSpec for Gather {
    type Params = GatherParams;
    const ENTRY: &'static str = "gather_entries";

    fn unit(&self) -> Unit {
        let Self { head_dim, stages, stores, timed } = *self;
        let defines = [("HEAD_DIM", head_dim), ("STAGES", stages), ("STORES", stores), ("TIMED", usize::from(timed))];
        unit(file!("gather.cu"), &defines)
    }

    fn threads(&self) -> u32 {
        32
    }

    fn shared_bytes(&self) -> usize {
        self.stages * entry_bytes(self.head_dim)
    }
}
