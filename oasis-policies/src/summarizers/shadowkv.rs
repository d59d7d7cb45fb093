//! `shadowkv`: the mean key of a block, and every block that its mean stands for badly.

use super::linear::{self, Floats};
use super::mean;
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, DeviceCode, ScoreTask, SpecError, SummarizeTask, Summarizer, SummarizerSpec};
use serde::{Deserialize, Serialize};

/// Scores a block by its mean key, as [`Mean`](super::Mean) does, and puts outliers above all others: blocks in which
/// some key's cosine similarity with the mean is below `outlier_similarity`, the least similar first (ShadowKV, arXiv
/// 2410.21465, section 3.2: landmarks and outlier chunks).
///
/// This is ShadowKV's selection only. Left out: the keys' low-rank form on the device, from which it computes the chosen
/// keys anew instead of fetching them, so that only values cross the link. Deviations: ShadowKV keeps a fixed number of
/// outliers of the prompt (48 chunks of 8 tokens) beside the budget; here a threshold, since a block's rows depend on
/// that block alone, and within the budget. A threshold that more than K blocks fall below leaves no room for others.
/// Its chunks have 8 tokens: `kv.block_tokens = 8`. Use it with `exact` and `recent`, as it keeps a local window.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShadowKv {
    /// Cosine similarity of a key with its block's mean below which the block is an outlier; -1 has none.
    pub outlier_similarity: f64,
}

impl Default for ShadowKv {
    fn default() -> Self {
        Self { outlier_similarity: 0.2 }
    }
}

oasis_core::register! {
    kind: "shadowkv", about: "Mean of a block's keys; blocks with a key unlike the mean are always wanted",
    device_code: true,
    impl SummarizerSpec for ShadowKv {
        fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
            let outlier_similarity = self.outlier_similarity;
            if !(-1.0..=1.0).contains(&outlier_similarity) {
                return Err(SpecError::new("outlier_similarity", "a number from -1 to 1", outlier_similarity)
                    .hint("it is a cosine: -1 has no outliers, 1 almost nothing else"));
            }
            Ok(Box::new(Landmarks { outlier_similarity: outlier_similarity as f32 }))
        }
    }
}

/// What an outlier's score is raised by, times 1 to 3: beyond every dot product, and the sum over a group is finite.
const ABOVE_ALL: f32 = 1e30;

struct Landmarks {
    outlier_similarity: f32,
}

impl Landmarks {
    /// What a block's score is raised by.
    fn raise(&self, keys: &[f32], mean: &[f32]) -> f32 {
        let similarity = |key: &[f32]| {
            let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
            dot(key, mean) / (dot(key, key).sqrt() * dot(mean, mean).sqrt())
        };
        // NaN, of keys that are zero or NaN, is passed over.
        let least = keys.chunks_exact(mean.len()).map(similarity).fold(1.0, f32::min);
        if least < self.outlier_similarity { ABOVE_ALL * (2.0 - least) } else { 0.0 }
    }
}

impl Summarizer for Landmarks {
    fn rows_per_block(&self) -> usize {
        1
    }

    fn row_words(&self, shape: HeadShape) -> usize {
        shape.head_dim + 1
    }

    /// The mean, then what the score is raised by.
    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        for task in tasks {
            let blocks = task.keys.chunks_exact(shape.block_tokens * shape.head_dim);
            for (row, keys) in bytemuck::cast_slice_mut(task.rows).chunks_exact_mut(shape.head_dim + 1).zip(blocks) {
                let (mean, raise) = row.split_at_mut(shape.head_dim);
                mean::means(shape, keys, mean);
                raise[0] = self.raise(keys, mean);
            }
        }
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        linear::score(shape, Floats(shape.head_dim + 1), aggregate, tasks, |query, expanded| {
            mean::expand(query, expanded);
            expanded[shape.head_dim] += 1.0;
        });
    }

    fn device_code(&self) -> Option<DeviceCode> {
        let constant = Some(self.outlier_similarity.to_bits().into());
        Some(DeviceCode { constant, ..DeviceCode::new("shadowkv.cuh", include_str!("shadowkv.cuh")) })
    }

    fn device_bytes(&self, shape: HeadShape) -> usize {
        2 * shape.head_dim + 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: HeadShape = HeadShape { group: 1, head_dim: 2, block_tokens: 2 };

    fn scores(outlier_similarity: f64, keys: &[f32], query: &[f32]) -> Vec<f32> {
        let summarizer = ShadowKv { outlier_similarity }.build(SHAPE).unwrap();
        let blocks = keys.len() / 4;
        let mut rows = vec![0; blocks * 3];
        summarizer.summarize(SHAPE, &mut [SummarizeTask { keys, rows: &mut rows }]);
        let mut scores = vec![0.0; blocks];
        summarizer.score(SHAPE, Aggregate::Sum, &mut [ScoreTask { query, summaries: &rows, scores: &mut scores }]);
        scores
    }

    #[test]
    fn a_block_with_a_key_unlike_the_mean_is_above_all_others() {
        // Similarities with the means (2, 0), (1.5, 0), (1, 0.5): 1, -1, and 0.71 and 0.95.
        let keys = [1.0, 0.0, 3.0, 0.0, /**/ 4.0, 0.0, -1.0, 0.0, /**/ 0.4, 1.0, 1.6, 0.0];
        let all = scores(0.0, &keys, &[1e6, 0.0]);
        assert_eq!([all[0], all[2]], [2e6, 1e6]);
        assert!(all[1] > 1e29);
        let strict = scores(0.9, &keys, &[1e6, 0.0]);
        assert!(strict[1] > strict[2] && strict[2] > 1e29 && strict[0] == 2e6, "{strict:?}");
        assert_eq!(scores(-1.0, &keys, &[1e6, 0.0]), [2e6, 1.5e6, 1e6]);
    }

    #[test]
    fn keys_without_a_direction_make_no_outlier() {
        assert_eq!(scores(0.5, &[0.0, 0.0, 2.0, 0.0], &[1.0, 0.0]), [1.0]);
        assert!(scores(0.5, &[f32::NAN, 0.0, 2.0, 0.0], &[1.0, 0.0])[0].is_nan());
    }
}
