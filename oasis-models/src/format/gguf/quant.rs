//! Dequantisation of one GGUF block, after the layouts of ggml's `ggml-common.h` and `ggml-quants.c`.
//!
//! Every function takes exactly one block: `raw` of the type's block bytes, `out` of its block elements.

use half::f16;

fn half(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

/// `d: f16, q: [i8; 32]`.
pub(crate) fn q8_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw, 0);
    for (out, &q) in out.iter_mut().zip(&raw[2..]) {
        *out = d * f32::from(q as i8);
    }
}

/// Low nibbles are elements 0..16, high nibbles 16..32.
fn nibbles(quants: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    for (i, &byte) in quants[..16].iter().enumerate() {
        out[i] = value(i, byte & 15);
        out[i + 16] = value(i + 16, byte >> 4);
    }
}

/// `d: f16, q: [u8; 16]`, offset 8.
pub(crate) fn q4_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw, 0);
    nibbles(&raw[2..], out, |_, q| d * (f32::from(q) - 8.0));
}

/// `d: f16, m: f16, q: [u8; 16]`.
pub(crate) fn q4_1(raw: &[u8], out: &mut [f32]) {
    let (d, m) = (half(raw, 0), half(raw, 2));
    nibbles(&raw[4..], out, |_, q| d * f32::from(q) + m);
}

/// The 32 fifth bits of a block, element `i` in bit `i`.
fn fifth_bits(raw: &[u8], at: usize) -> impl Fn(usize) -> u8 {
    let bits = u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    move |i| ((bits >> i & 1) as u8) << 4
}

/// `d: f16, high: u32, q: [u8; 16]`, offset 16.
pub(crate) fn q5_0(raw: &[u8], out: &mut [f32]) {
    let (d, high) = (half(raw, 0), fifth_bits(raw, 2));
    nibbles(&raw[6..], out, |i, q| d * (f32::from(q | high(i)) - 16.0));
}

/// `d: f16, m: f16, high: u32, q: [u8; 16]`.
pub(crate) fn q5_1(raw: &[u8], out: &mut [f32]) {
    let (d, m, high) = (half(raw, 0), half(raw, 2), fifth_bits(raw, 4));
    nibbles(&raw[8..], out, |i, q| d * f32::from(q | high(i)) + m);
}

/// 6-bit scale and minimum of group `j` of 8, packed in 12 bytes.
fn scale_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// `d: f16, dmin: f16, scales: [u8; 12], q: [u8; 128]`; 64 elements a 32-byte run, low nibbles first.
pub(crate) fn q4_k(raw: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(raw, 0), half(raw, 2));
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&raw[4..16], j);
        let (scale, min, shift) = (d * scale, dmin * min, (j % 2) * 4);
        for (out, &q) in out.iter_mut().zip(&raw[16 + 32 * (j / 2)..]) {
            *out = scale * f32::from(q >> shift & 15) - min;
        }
    }
}

/// As [`q4_k`] with `high: [u8; 32]` before the quants; group `j` has its fifth bits in bit `j` of each byte.
pub(crate) fn q5_k(raw: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(raw, 0), half(raw, 2));
    let high = &raw[16..48];
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&raw[4..16], j);
        let (scale, min, shift) = (d * scale, dmin * min, (j % 2) * 4);
        for ((out, &q), &high) in out.iter_mut().zip(&raw[48 + 32 * (j / 2)..]).zip(high) {
            *out = scale * f32::from((q >> shift & 15) | (high >> j & 1) << 4) - min;
        }
    }
}

/// `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`, offset 32; two halves of 128 elements.
pub(crate) fn q6_k(raw: &[u8], out: &mut [f32]) {
    let d = half(raw, 208);
    for (h, out) in out.chunks_exact_mut(128).enumerate() {
        let low = &raw[64 * h..64 * h + 64];
        let high = &raw[128 + 32 * h..160 + 32 * h];
        let scales = &raw[192 + 8 * h..200 + 8 * h];
        for (i, out) in out.iter_mut().enumerate() {
            let (quarter, l) = (i / 32, i % 32);
            let nibble = low[(quarter % 2) * 32 + l] >> (quarter / 2 * 4) & 15;
            let q = nibble | (high[l] >> (2 * quarter) & 3) << 4;
            *out = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
        }
    }
}
