//! Device memory.

use super::error::Check;
use super::{Device, DeviceError};
use crate::kernels::Address;
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use std::marker::PhantomData;

/// Device memory for elements of one type. Dropping it waits until the device no longer uses it.
pub struct DeviceBuffer<T> {
    device: Device,
    address: sys::CUdeviceptr,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    pub(super) fn zeros(device: &Device, len: usize) -> Result<Self, DeviceError> {
        device.bind()?;
        let bytes = len * size_of::<T>();
        // SAFETY: the driver gives memory or an error; at least one byte is asked for.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.check(|| {
            let free = device.memory().map_or_else(|_| String::new(), |(free, _)| format!(", {free} are free"));
            format!("allocating {bytes} bytes of device memory{free}")
        })?;
        let mut buffer = Self { device: device.clone(), address, len, _elements: PhantomData };
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// Sets every byte and waits for it.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    pub fn fill(&mut self, byte: u8) -> Result<(), DeviceError> {
        if self.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range is this buffer's own; the context is waited for below, since this stream orders nothing.
        unsafe { result::memset_d8_sync(self.address, byte, self.bytes()) }.check(|| "filling device memory")?;
        self.device.synchronize()
    }

    /// Copies `data` to the start and waits for it.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    ///
    /// # Panics
    /// When `data` is longer than the buffer.
    pub fn write(&mut self, data: &[T]) -> Result<(), DeviceError> {
        self.write_at(0, data)
    }

    /// Copies `data` to the elements from `start` on and waits for it.
    ///
    /// # Errors
    /// [`DeviceError`] from the driver.
    ///
    /// # Panics
    /// When `data` ends beyond the buffer.
    pub fn write_at(&mut self, start: usize, data: &[T]) -> Result<(), DeviceError> {
        assert!(start + data.len() <= self.len, "elements {start} + {} of a buffer of {}", data.len(), self.len);
        self.device.bind()?;
        let to = self.address + (start * size_of::<T>()) as u64;
        // SAFETY: the range is within this buffer; the call returns when `data` has been read.
        unsafe { result::memcpy_htod_sync(to, data) }.check(|| "copying to the device")?;
        self.device.synchronize()
    }

    /// All elements, once the device is done.
    ///
    /// # Errors
    /// [`DeviceError`] of the copy or of any work before.
    pub fn read(&self) -> Result<Vec<T>, DeviceError> {
        self.read_at(0, self.len)
    }

    /// `len` elements from `start` on, once the device is done.
    ///
    /// # Errors
    /// [`DeviceError`] of the copy or of any work before.
    ///
    /// # Panics
    /// When they end beyond the buffer.
    pub fn read_at(&self, start: usize, len: usize) -> Result<Vec<T>, DeviceError> {
        assert!(start + len <= self.len, "elements {start} + {len} of a buffer of {}", self.len);
        self.device.synchronize()?;
        let mut data = vec![T::zeroed(); len];
        let from = self.address + (start * size_of::<T>()) as u64;
        // SAFETY: both sides have `len` elements, of a type that every bit pattern is a value of.
        unsafe { result::memcpy_dtoh_sync(&mut data, from) }.check(|| "copying from the device")?;
        Ok(data)
    }

    /// Where it is.
    pub fn address(&self) -> Address {
        Address(self.address)
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the memory was allocated once and is freed once; the call waits for work in flight.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
