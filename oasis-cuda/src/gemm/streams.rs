//! Our own kernels for few rows, beside cuBLASLt's algorithms.

use super::{GemmShape, Operands};
use crate::compile::Compiler;
use crate::device::{Device, DeviceError, Kernel, Stream};
use crate::kernels::{KernelSpec, LinearStream};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Counts changes of the kernels after which they must be timed anew.
pub(super) const VERSION: u32 = 1;
/// Outputs of a cluster that are tried.
const TILES: [usize; 2] = [64, 128];
/// More CTAs a multiprocessor than this are not worth a split of the inner dimension.
const ENOUGH_CTAS: usize = 4;

/// A way to run [`LinearStream`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Streamed {
    /// Outputs of a cluster.
    pub tile: usize,
    /// CTAs of a cluster, which share the inner dimension.
    pub split: usize,
}

impl Streamed {
    /// Ways to try for `shape` on a device with so many multiprocessors; none for many rows.
    pub(super) fn candidates(shape: &GemmShape, multiprocessors: usize) -> Vec<Self> {
        let steps = shape.inner.div_ceil(64);
        let of_tile = |tile| {
            let clusters = shape.out.div_ceil(tile);
            let splits = [1, 2, 4, LinearStream::MOST_SPLIT].into_iter().filter(move |split| {
                *split == 1 || (*split <= steps && clusters * split <= ENOUGH_CTAS * multiprocessors)
            });
            splits.map(move |split| Self { tile, split })
        };
        let fits = shape.rows <= LinearStream::MOST_ROWS;
        TILES.into_iter().filter(|_| fits).flat_map(of_tile).collect()
    }
}

/// A kernel and how to run it.
#[derive(Clone)]
pub(super) struct StreamedPlan {
    kernel: Arc<Kernel<LinearStream>>,
    spec: LinearStream,
    pub way: Streamed,
}

impl StreamedPlan {
    /// Queues the product.
    ///
    /// # Safety
    /// As for [`super::Gemms::run`].
    pub unsafe fn run(
        &self,
        device: &Device,
        stream: &Stream,
        shape: &GemmShape,
        operands: &Operands,
    ) -> Result<(), DeviceError> {
        let params = self.spec.params(device, shape, operands)?;
        let (grid, cluster) = ((self.spec.ctas(shape.out, self.way.split), 1), self.way.split as u32);
        // SAFETY: the caller's.
        unsafe { self.kernel.launch_in_clusters(stream, grid, cluster, &params) }
    }
}

/// Compiles kernels on their first use.
pub(super) struct Streams {
    device: Device,
    compiler: Mutex<Option<Compiler>>,
    kernels: Mutex<HashMap<LinearStream, Arc<Kernel<LinearStream>>>>,
}

impl Streams {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), compiler: Mutex::default(), kernels: Mutex::default() }
    }

    /// The plan for `way`.
    ///
    /// # Errors
    /// [`DeviceError`] for too many rows, without NVRTC, or from the driver.
    pub fn plan(&self, shape: &GemmShape, way: Streamed) -> Result<StreamedPlan, DeviceError> {
        let spec = LinearStream::for_rows(shape.rows, way.tile).ok_or_else(|| {
            let problem = format!("expected at most {} rows, found {}", LinearStream::MOST_ROWS, shape.rows);
            DeviceError::new("planning a product of few rows", problem)
        })?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&spec) {
            return Ok(StreamedPlan { kernel: kernel.clone(), spec, way });
        }
        let kernel = Arc::new(self.load(&spec)?);
        kernels.insert(spec, kernel.clone());
        Ok(StreamedPlan { kernel, spec, way })
    }

    /// Compiles and loads a kernel.
    ///
    /// # Errors
    /// [`DeviceError`] without NVRTC, or from the driver.
    pub fn load<S: KernelSpec>(&self, spec: &S) -> Result<Kernel<S>, DeviceError> {
        let mut compiler = self.compiler.lock().unwrap_or_else(PoisonError::into_inner);
        if compiler.is_none() {
            *compiler = Some(self.device.compiler()?);
        }
        self.device.load(compiler.as_ref().expect("it was just opened"), spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_dimension_is_split_until_the_device_is_full() {
        let splits = |shape: &GemmShape, tile| {
            let ways = Streamed::candidates(shape, 132);
            ways.into_iter().filter(|way| way.tile == tile).map(|way| way.split).collect::<Vec<_>>()
        };
        assert_eq!(splits(&GemmShape::dense(2, 4096, 4096), 64), [1, 2, 4, 8]);
        assert_eq!(splits(&GemmShape::dense(2, 24_576, 4096), 64), [1]);
        assert_eq!(splits(&GemmShape::dense(2, 24_576, 4096), 128), [1, 2]);
        // Not into more parts than there are steps of 64.
        assert_eq!(splits(&GemmShape::dense(2, 576, 192), 128), [1, 2]);
        assert!(splits(&GemmShape::dense(65, 576, 192), 64).is_empty());
    }
}
