//! What the copy engine knows about a tensor in device memory, so that it can copy boxes of it.

use super::error::Check;
use super::{Device, DeviceError};
use crate::kernels::Address;
use cudarc::driver::sys;

/// Rows of bf16 elements in device memory, one a token and head: element `d` of head `h` of token `t` lies at
/// `address + t * token_bytes + h * head_bytes + 2 * d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRows {
    /// First element; a multiple of 16.
    pub address: Address,
    /// Tokens.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Bytes from a token to the next; a multiple of 16.
    pub token_bytes: usize,
    /// Bytes from a head to the next; a multiple of 16.
    pub head_bytes: usize,
}

impl HeadRows {
    /// `[tokens][heads][head_dim]` without gaps.
    pub fn dense(address: Address, tokens: usize, heads: usize, head_dim: usize) -> Self {
        let head_bytes = head_dim * 2;
        Self { address, tokens, heads, head_dim, token_bytes: heads * head_bytes, head_bytes }
    }

    /// `heads` heads from `first` on, of the same tokens.
    #[must_use]
    pub fn head_range(self, first: usize, heads: usize) -> Self {
        Self { address: self.address.offset(first * self.head_bytes), heads, ..self }
    }

    /// `tokens` tokens from `first` on.
    #[must_use]
    pub fn token_range(self, first: usize, tokens: usize) -> Self {
        Self { address: self.address.offset(first * self.token_bytes), tokens, ..self }
    }
}

/// A tensor of [`HeadRows`] cut into boxes of tokens by 64 elements, which land in shared memory with the 128-byte
/// swizzle. Passed by value in the parameters of a kernel.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl Device {
    /// Describes `rows` for copies of `box_tokens` tokens, 1 to 256.
    ///
    /// # Errors
    /// [`DeviceError`] when the driver refuses: an address or stride that is no multiple of 16, an empty tensor.
    pub fn tensor_map(&self, rows: &HeadRows, box_tokens: usize) -> Result<TensorMap, DeviceError> {
        self.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let sizes = [rows.head_dim, rows.heads, rows.tokens].map(|size| size as u64);
        let strides = [rows.head_bytes, rows.token_bytes].map(|bytes| bytes as u64);
        let promotion = match rows.head_dim {
            ..=64 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            _ => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        // SAFETY: all arrays live through the call and have the lengths that rank 3 asks for; the tensor's memory is
        // not touched.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                rows.address.0 as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                [64, 1, box_tokens as u32].as_ptr(),
                [1; 3].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                promotion,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .check(|| format!("describing {rows:?} in boxes of {box_tokens} tokens to the copy engine"))?;
        Ok(TensorMap(map))
    }
}
