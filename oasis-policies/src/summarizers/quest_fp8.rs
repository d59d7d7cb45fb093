//! `quest-fp8`: the bounds of a block's keys in 8-bit floats, rounded outwards.

use super::linear::{self, Code};
use super::quest;
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, DeviceCode, ScoreTask, SpecError, SummarizeTask, Summarizer, SummarizerSpec};
use serde::{Deserialize, Serialize};

const DEVICE_CODE: DeviceCode = DeviceCode::new("quest_fp8.cuh", include_str!("quest_fp8.cuh"));

/// The rows of [`Quest`](super::Quest) in e4m3 (OCP 8-bit floating point, 1.0) with a power of two a row as their scale:
/// `head_dim + 4` bytes a row instead of `4 head_dim`. Maxima are rounded up and minima down, so that the score remains
/// an upper bound of `q . k` over the block; it is at most an eighth of `sum_d |q_d| max(|max_d|, |min_d|)` too high,
/// coordinates far smaller than the row's largest left aside.
///
/// A NaN coordinate of one key is passed over; an infinite key, or a coordinate that is NaN in every key, makes its
/// block rank last.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuestFp8 {}

oasis_core::register! {
    kind: "quest-fp8", about: "quest with bounds in 8 bits, rounded outwards: still an upper bound", device_code: true,
    impl SummarizerSpec for QuestFp8 {
        fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
            Ok(Box::new(QuestFp8Summarizer))
        }
    }
}

struct QuestFp8Summarizer;

impl Summarizer for QuestFp8Summarizer {
    fn rows_per_block(&self) -> usize {
        2
    }

    fn row_words(&self, shape: HeadShape) -> usize {
        row_words(shape.head_dim)
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        quest::encode_bounds(shape, row_words(shape.head_dim), encode, tasks);
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        linear::score(shape, E4m3 { head_dim: shape.head_dim }, aggregate, tasks, quest::expand);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DEVICE_CODE)
    }

    fn device_bytes(&self, shape: HeadShape) -> usize {
        2 * (shape.head_dim + 2)
    }
}

/// A row: its scale as a float, then one byte a coordinate.
fn row_words(head_dim: usize) -> usize {
    1 + head_dim.div_ceil(4)
}

/// Largest value of e4m3.
const LARGEST: f64 = 448.0;

/// Value of the seven lower bits of a code: its bits in the place of a float's are the value, 2^-120 times as large.
#[inline(always)]
fn magnitude(code: u32) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 120) << 23);
    f32::from_bits((code & 0x7f) << 20) * SCALE
}

/// Encodes `values` `[head_dim]`, none of them further from infinity than it is: from positive infinity when `up`.
fn encode(values: &[f32], up: bool, row: &mut [u32]) {
    let (scale, codes) = row.split_first_mut().expect("a row begins with its scale");
    codes.fill(0);
    if !values.iter().all(|value| value.is_finite()) {
        *scale = f32::NAN.to_bits();
        return;
    }
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let power = power_of_two_for(f64::from(largest));
    *scale = (power as f32).to_bits();
    for (index, &value) in values.iter().enumerate() {
        // Exact: only the exponent changes, and a double has room for it.
        let size = f64::from(value.abs()) / power;
        let negative = value.is_sign_negative();
        let mut code = floor_code(size);
        if up != negative && f64::from(magnitude(code)) < size {
            code += 1;
        }
        bytemuck::cast_slice_mut::<u32, u8>(codes)[index] = code as u8 | u8::from(negative) << 7;
    }
}

/// The smallest power of two, within what a float holds exactly, that brings `largest` into the range of e4m3.
fn power_of_two_for(largest: f64) -> f64 {
    let exponent = |x: f64| (x.to_bits() >> 52) as i32 - 1023;
    let power = |exponent: i32| f64::from_bits(((exponent.max(-126) + 1023) as u64) << 52);
    let candidate = power(exponent(largest) - exponent(LARGEST));
    if largest > LARGEST * candidate { 2.0 * candidate } else { candidate }
}

/// Largest code whose value is at most `size`, 0 to [`LARGEST`].
fn floor_code(size: f64) -> u32 {
    const SMALLEST_NORMAL: f64 = 1.0 / 64.0;
    if size < SMALLEST_NORMAL {
        (size * 512.0) as u32
    } else {
        // Exponent and three bits of mantissa, the exponent's bias moved from 1023 to 7.
        (size.to_bits() >> 49) as u32 - ((1023 - 7) << 3)
    }
}

#[derive(Clone, Copy)]
struct E4m3 {
    head_dim: usize,
}

impl Code for E4m3 {
    fn words(self) -> usize {
        2 * row_words(self.head_dim)
    }

    fn width(self) -> usize {
        2 * self.head_dim
    }

    #[inline(always)]
    fn decode<'a>(self, words: &'a [u32], scratch: &'a mut [f32]) -> &'a [f32] {
        let rows = words.chunks_exact(row_words(self.head_dim));
        for (row, values) in rows.zip(scratch.chunks_exact_mut(self.head_dim)) {
            let scale = f32::from_bits(row[0]);
            for (value, &code) in values.iter_mut().zip(bytemuck::cast_slice::<u32, u8>(&row[1..])) {
                let sign = u32::from(code & 0x80) << 24;
                *value = f32::from_bits((magnitude(code.into()) * scale).to_bits() | sign);
            }
        }
        scratch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    fn decoded(values: &[f32], up: bool) -> Vec<f32> {
        let mut row = vec![u32::MAX; row_words(values.len())];
        encode(values, up, &mut row);
        let mut scratch = vec![0.0; 2 * values.len()];
        E4m3 { head_dim: values.len() }.decode(&row.repeat(2), &mut scratch)[..values.len()].to_vec()
    }

    #[test]
    fn codes_have_the_values_of_the_format() {
        let value = |code| magnitude(code);
        // The largest, one, the smallest normal and the smallest subnormal number.
        assert_eq!([0x7e, 0x38, 0x08, 0x01, 0x00].map(value), [448.0, 1.0, 1.0 / 64.0, 1.0 / 512.0, 0.0]);
        for code in 0..0x7f {
            assert!(value(code) < value(code + 1) || code == 0x7e);
            assert_eq!(floor_code(f64::from(value(code))), code);
        }
    }

    #[test]
    fn values_of_the_format_are_kept_and_others_are_rounded_outwards() {
        assert_eq!(decoded(&[448.0, -1.125, 0.0], true), [448.0, -1.125, 0.0]);
        assert_eq!(decoded(&[1.01, -1.01, 448.0], true), [1.125, -1.0, 448.0]);
        assert_eq!(decoded(&[1.01, -1.01, 448.0], false), [1.0, -1.125, 448.0]);
        assert_eq!(decoded(&[449.0, -449.0], true), [480.0, -448.0]);
        assert!(decoded(&[1.0, f32::INFINITY], true).iter().all(|value| value.is_nan()));
    }

    quickcheck! {
        fn no_finite_value_is_rounded_inwards_or_by_more_than_an_eighth(values: Vec<f32>) -> bool {
            let values: Vec<f32> = values.into_iter().filter(|value| value.is_finite()).collect();
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            // Nothing is finer than the smallest subnormal number beside the largest value.
            let grain = largest / 224.0 / 512.0 + f32::MIN_POSITIVE;
            values.is_empty() || [true, false].into_iter().all(|up| {
                decoded(&values, up).iter().zip(&values).all(|(got, value)| {
                    let outwards = if up { got >= value } else { got <= value };
                    outwards && ((got - value).abs() <= value.abs() / 8.0 + grain || got.is_infinite())
                })
            })
        }
    }
}
