//! `quest-int4`: the bounds of a block's keys in 4-bit steps, rounded outwards.

use super::linear::{self, Code};
use super::quest;
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, DeviceCode, ScoreTask, SpecError, SummarizeTask, Summarizer, SummarizerSpec};
use serde::{Deserialize, Serialize};

const DEVICE_CODE: DeviceCode = DeviceCode::new("quest_int4.cuh", include_str!("quest_int4.cuh"));

/// Coordinates that share an offset and a step.
const GROUP: usize = 32;
/// Codes in a word.
const PER_WORD: usize = 8;
/// Largest code.
const LAST: u32 = 15;

/// The rows of [`Quest`](super::Quest) in 4 bits a coordinate: every 32 coordinates of a row share an offset and a step,
/// in bf16, and a number is `offset + code * step`. 5 bits a coordinate instead of 32. Maxima are rounded up and minima
/// down, so that the score remains an upper bound of `q . k` over the block; a bound is at most about a fifteenth of its
/// 32 coordinates' range too wide.
///
/// For keys of at most 1e38. A NaN coordinate of one key is passed over; an infinite key, or a coordinate that is NaN in
/// every key, makes its block rank last.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuestInt4 {}

oasis_core::register! {
    kind: "quest-int4", about: "quest with bounds in 4 bits, rounded outwards: still an upper bound", device_code: true,
    impl SummarizerSpec for QuestInt4 {
        fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
            Ok(Box::new(QuestInt4Summarizer))
        }
    }
}

struct QuestInt4Summarizer;

impl Summarizer for QuestInt4Summarizer {
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
        linear::score(shape, Int4 { head_dim: shape.head_dim }, aggregate, tasks, quest::expand);
    }

    fn device_code(&self) -> Option<DeviceCode> {
        Some(DEVICE_CODE)
    }

    fn device_bytes(&self, shape: HeadShape) -> usize {
        2 * (shape.head_dim / 2 + shape.head_dim / GROUP * 4)
    }
}

/// A row: for every group of coordinates a word with offset (upper half) and step (lower half), then eight codes a word
/// from the low bits up.
fn row_words(head_dim: usize) -> usize {
    head_dim.div_ceil(GROUP) + head_dim.div_ceil(PER_WORD)
}

#[derive(Clone, Copy)]
struct Grid {
    offset: f32,
    step: f32,
}

impl Grid {
    /// The finest grid that spans finite `values`: at or below the smallest, at or above the largest.
    fn spanning(values: &[f32]) -> Self {
        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
        let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let offset = bf16_below(low);
        let span = (f64::from(high) - f64::from(offset)) / f64::from(LAST);
        let mut grid = Self { offset, step: bf16_above(span as f32) };
        // The last product may still be rounded below.
        while grid.value(LAST) < high {
            grid.step = bf16_above(grid.step.next_up());
        }
        grid
    }

    #[inline(always)]
    fn value(self, code: u32) -> f32 {
        (code as f32).mul_add(self.step, self.offset)
    }

    /// The code nearest to `value` that is at or above it when `up`, else at or below it.
    fn code(self, value: f32, up: bool) -> u32 {
        let steps = (f64::from(value) - f64::from(self.offset)) / f64::from(self.step);
        // A step of zero has one value only; NaN becomes 0.
        let mut code = (if up { steps.ceil() } else { steps.floor() } as u32).min(LAST);
        while up && code < LAST && self.value(code) < value {
            code += 1;
        }
        while !up && code > 0 && self.value(code) > value {
            code -= 1;
        }
        code
    }

    fn to_word(self) -> u32 {
        self.offset.to_bits() | self.step.to_bits() >> 16
    }

    #[inline(always)]
    fn from_word(word: u32) -> Self {
        Self { offset: f32::from_bits(word & 0xffff_0000), step: f32::from_bits(word << 16) }
    }
}

/// Largest bf16 at or below `x`.
fn bf16_below(x: f32) -> f32 {
    let toward_zero = f32::from_bits(x.to_bits() & 0xffff_0000);
    if toward_zero > x { f32::from_bits(toward_zero.to_bits() + 0x1_0000) } else { toward_zero }
}

/// Smallest bf16 at or above `x`, which is not negative.
fn bf16_above(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0xffff) & 0xffff_0000)
}

/// Encodes `values` `[head_dim]`, none of them rounded down when `up`, none rounded up when not.
fn encode(values: &[f32], up: bool, row: &mut [u32]) {
    for (values, words) in values.chunks(GROUP).zip(row.chunks_mut(1 + GROUP / PER_WORD)) {
        let (grid_word, codes) = words.split_first_mut().expect("a group begins with its grid");
        codes.fill(0);
        if !values.iter().all(|value| value.is_finite()) {
            *grid_word = f32::NAN.to_bits();
            continue;
        }
        let grid = Grid::spanning(values);
        *grid_word = grid.to_word();
        for (index, &value) in values.iter().enumerate() {
            codes[index / PER_WORD] |= grid.code(value, up) << (index % PER_WORD * 4);
        }
    }
}

#[derive(Clone, Copy)]
struct Int4 {
    head_dim: usize,
}

impl Code for Int4 {
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
            for (words, values) in row.chunks(1 + GROUP / PER_WORD).zip(values.chunks_mut(GROUP)) {
                let grid = Grid::from_word(words[0]);
                let (full, rest) = values.as_chunks_mut::<PER_WORD>();
                // Whole words apart, so that their loop has a fixed length.
                for (&word, values) in words[1..].iter().zip(full) {
                    for (index, value) in (0..).zip(values) {
                        *value = grid.value(word >> (4 * index) & 0xf);
                    }
                }
                for (index, value) in (0..).zip(rest) {
                    *value = grid.value(words[words.len() - 1] >> (4 * index) & 0xf);
                }
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
        Int4 { head_dim: values.len() }.decode(&row.repeat(2), &mut scratch)[..values.len()].to_vec()
    }

    #[test]
    fn values_on_the_grid_are_kept_and_others_are_rounded_outwards() {
        let grid: Vec<f32> = (0..16).map(|i| i as f32 - 4.0).collect();
        assert_eq!(decoded(&grid, true), grid);
        assert_eq!(decoded(&grid, false), grid);
        assert_eq!(decoded(&[0.0, 15.0, 3.2, 3.0], true), [0.0, 15.0, 4.0, 3.0]);
        assert_eq!(decoded(&[0.0, 15.0, 3.2, 3.0], false), [0.0, 15.0, 3.0, 3.0]);
        assert_eq!(decoded(&[0.5; 40], true), [0.5; 40]);
    }

    #[test]
    fn a_row_takes_five_bits_a_coordinate_and_an_infinity_spoils_its_group() {
        assert_eq!(row_words(128), 20);
        assert_eq!(row_words(80), 3 + 10);
        let mut values = vec![1.0; 64];
        values[3] = f32::NEG_INFINITY;
        let decoded = decoded(&values, true);
        assert!(decoded[..32].iter().all(|value| value.is_nan()));
        assert_eq!(decoded[32..], values[32..]);
    }

    quickcheck! {
        fn no_value_is_rounded_inwards_or_by_more_than_a_step(values: Vec<f32>) -> bool {
            let values: Vec<f32> = values.into_iter().filter(|value| value.abs() <= 1e38).collect();
            values.is_empty() || [true, false].into_iter().all(|up| {
                let decoded = decoded(&values, up);
                values.chunks(GROUP).zip(decoded.chunks(GROUP)).all(|(values, decoded)| {
                    let Grid { step, .. } = Grid::spanning(values);
                    values.iter().zip(decoded).all(|(value, got)| {
                        let outwards = if up { got >= value } else { got <= value };
                        outwards && (f64::from(*got) - f64::from(*value)).abs() <= 1.001 * f64::from(step)
                    })
                })
            })
        }

        fn a_step_is_little_more_than_a_fifteenth_of_the_range(values: Vec<i16>) -> bool {
            let values: Vec<f32> = values.into_iter().take(GROUP).map(|v| f32::from(v) / 256.0).collect();
            let low = values.iter().copied().fold(f32::INFINITY, f32::min);
            let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // bf16 has 8 bits: offset and step are each at most 1/128 off.
            values.is_empty() || {
                let fine = (high - low + low.abs() / 128.0) / 15.0 * (1.0 + 1.0 / 64.0);
                Grid::spanning(&values).step <= fine + f32::MIN_POSITIVE
            }
        }
    }
}
