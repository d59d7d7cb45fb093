//! Linear layers.

use super::super::random::noise;
use super::{KernelBench, KernelTime, TENSOR_FLOPS};
use crate::device::{DeviceBuffer, DeviceError};
use crate::gemm::{GemmPlan, GemmShape, Gemms, Operands, Output};
use crate::kernels::Address;

impl KernelBench {
    /// Times the algorithm that is chosen for `shape`, without bias; weights come from memory.
    ///
    /// # Errors
    /// [`DeviceError`] for an impossible shape, or when there is not that much memory.
    pub fn time_linear(&self, gemms: &Gemms, name: &str, shape: &GemmShape) -> Result<KernelTime, DeviceError> {
        let plan = gemms.plan(shape)?;
        gemms.end_planning();
        let bytes = shape.out * shape.w_stride * 2;
        let copies = Self::copies(bytes);
        let (w, x) = (noise(&self.device, copies * bytes)?, noise(&self.device, shape.room * shape.x_stride * 2)?);
        let element = if shape.output == Output::F32 { 4 } else { 2 };
        let y: DeviceBuffer<u8> = self.device.zeros(shape.room * shape.y_stride * element)?;
        let workspace = gemms.workspace()?;
        let operands = |launch: usize| Operands {
            x: x.address(),
            w: w.address().offset(launch % copies * bytes),
            y: y.address(),
            bias: Address::NONE,
        };
        let launches = copies.clamp(4, 32);
        // SAFETY: the operands have the plan's shape; the workspace is this stream's.
        let micros =
            unsafe { self.micros(launches, |launch| gemms.run(&plan, &self.stream, &workspace, &operands(launch)))? };
        let operations = 2.0 * (shape.rows * shape.out * shape.inner) as f64;
        let read = (shape.out * shape.inner * 2) as f64;
        let floor = (read / self.memory_read).max(operations / TENSOR_FLOPS) * 1e6;
        let figure = format!(
            "{:.2} TB/s of weights, {:.0} TFLOP/s, {}",
            read / micros / 1e6,
            operations / micros / 1e6,
            algorithm(&plan)
        );
        let what = format!("{name}, {} rows x {} x {}", shape.rows, shape.out, shape.inner);
        Ok(KernelTime::new(what, micros, Some(floor), figure))
    }
}

fn algorithm(plan: &GemmPlan) -> String {
    match plan.streamed() {
        None => "cuBLASLt".to_owned(),
        Some(way) => format!("streamed, {} outputs by {} CTAs", way.tile, way.split),
    }
}
