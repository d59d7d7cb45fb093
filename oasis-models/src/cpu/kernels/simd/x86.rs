//! AVX-512 (`V4`) and AVX2 (`V3`) vectors.

use half::bf16;
use pulp::x86::{V3, V4};
use pulp::{Simd, cast, f32x8, f32x16, u16x8, u16x16};

use super::{Isa, LANES};

impl Isa for V4 {
    type V = f32x16;

    #[inline(always)]
    fn splat(self, value: f32) -> f32x16 {
        self.splat_f32x16(value)
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> f32x16 {
        cast(*from)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> f32x16 {
        let bits: u16x16 = bytemuck::cast(*from);
        cast(self.shl_const_u32x16::<16>(self.convert_u16x16_to_u32x16(bits)))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], value: f32x16) {
        *to = cast(value);
    }

    #[inline(always)]
    fn add(self, a: f32x16, b: f32x16) -> f32x16 {
        self.add_f32s(a, b)
    }

    #[inline(always)]
    fn mul(self, a: f32x16, b: f32x16) -> f32x16 {
        self.mul_f32s(a, b)
    }

    #[inline(always)]
    fn mul_add(self, a: f32x16, b: f32x16, c: f32x16) -> f32x16 {
        self.mul_add_f32s(a, b, c)
    }

    #[inline(always)]
    fn max(self, a: f32x16, b: f32x16) -> f32x16 {
        self.max_f32s(a, b)
    }

    #[inline(always)]
    fn sum(self, a: f32x16) -> f32 {
        self.reduce_sum_f32s(a)
    }

    #[inline(always)]
    fn sums(self, v: [f32x16; LANES]) -> f32x16 {
        // Each step adds the halves of two groups of vectors and packs the results into one.
        let f = self.avx512f;
        let mut quads = [self.splat(0.0); 4];
        for (i, quad) in quads.iter_mut().enumerate() {
            let mut pairs = [self.splat(0.0); 2];
            for (j, pair) in pairs.iter_mut().enumerate() {
                let (a, b) = (cast(v[i + 8 * j]), cast(v[i + 8 * j + 4]));
                let low = cast(f._mm512_shuffle_f32x4::<0x44>(a, b));
                *pair = self.add_f32s(low, cast(f._mm512_shuffle_f32x4::<0xEE>(a, b)));
            }
            let (a, b) = (cast(pairs[0]), cast(pairs[1]));
            let even = cast(f._mm512_shuffle_f32x4::<0x88>(a, b));
            *quad = self.add_f32s(even, cast(f._mm512_shuffle_f32x4::<0xDD>(a, b)));
        }
        let mut eights = [self.splat(0.0); 2];
        for (i, eight) in eights.iter_mut().enumerate() {
            let (a, b) = (cast(quads[2 * i]), cast(quads[2 * i + 1]));
            let low = cast(f._mm512_shuffle_ps::<0x44>(a, b));
            *eight = self.add_f32s(low, cast(f._mm512_shuffle_ps::<0xEE>(a, b)));
        }
        let (a, b) = (cast(eights[0]), cast(eights[1]));
        let even = cast(f._mm512_shuffle_ps::<0x88>(a, b));
        self.add_f32s(even, cast(f._mm512_shuffle_ps::<0xDD>(a, b)))
    }

    #[inline(always)]
    fn peak(self, a: f32x16) -> f32 {
        self.reduce_max_f32s(a)
    }
}

impl Isa for V3 {
    type V = [f32x8; 2];

    #[inline(always)]
    fn splat(self, value: f32) -> [f32x8; 2] {
        [self.splat_f32x8(value); 2]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [f32x8; 2] {
        cast(*from)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> [f32x8; 2] {
        let bits: [u16x8; 2] = bytemuck::cast(*from);
        bits.map(
            #[inline(always)]
            |bits| cast(self.shl_const_u32x8::<16>(self.convert_u16x8_to_u32x8(bits))),
        )
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES], value: [f32x8; 2]) {
        *to = cast(value);
    }

    #[inline(always)]
    fn add(self, a: [f32x8; 2], b: [f32x8; 2]) -> [f32x8; 2] {
        [self.add_f32s(a[0], b[0]), self.add_f32s(a[1], b[1])]
    }

    #[inline(always)]
    fn mul(self, a: [f32x8; 2], b: [f32x8; 2]) -> [f32x8; 2] {
        [self.mul_f32s(a[0], b[0]), self.mul_f32s(a[1], b[1])]
    }

    #[inline(always)]
    fn mul_add(self, a: [f32x8; 2], b: [f32x8; 2], c: [f32x8; 2]) -> [f32x8; 2] {
        [self.mul_add_f32s(a[0], b[0], c[0]), self.mul_add_f32s(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn max(self, a: [f32x8; 2], b: [f32x8; 2]) -> [f32x8; 2] {
        [self.max_f32s(a[0], b[0]), self.max_f32s(a[1], b[1])]
    }

    #[inline(always)]
    fn sum(self, a: [f32x8; 2]) -> f32 {
        self.reduce_sum_f32s(self.add_f32s(a[0], a[1]))
    }

    #[inline(always)]
    fn peak(self, a: [f32x8; 2]) -> f32 {
        self.reduce_max_f32s(self.max_f32s(a[0], a[1]))
    }
}
