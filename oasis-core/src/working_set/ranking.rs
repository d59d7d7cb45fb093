//! Ranked blocks and the top-K rule that every executor follows.

use crate::ids::{BlockId, KvHead};
use crate::working_set::BlockSet;

/// A block and the score it was ranked by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedBlock {
    /// Block.
    pub block: BlockId,
    /// Larger means more wanted.
    pub score: f32,
}

/// Wanted blocks, best first, for every request of a batch and every KV head.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranking {
    kv_heads: usize,
    /// `[requests][kv_heads]`
    heads: Vec<HeadRanking>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct HeadRanking {
    ranked: Vec<RankedBlock>,
    wanted: BlockSet,
}

impl Ranking {
    /// An empty ranking for `requests` requests of `kv_heads` KV heads.
    pub fn new(requests: usize, kv_heads: usize) -> Self {
        Self { kv_heads, heads: vec![HeadRanking::default(); requests * kv_heads] }
    }

    /// KV heads of a request.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Requests of the batch.
    pub fn requests(&self) -> usize {
        self.heads.len() / self.kv_heads.max(1)
    }

    /// Wanted blocks of one head, best first.
    pub fn head(&self, request: usize, head: KvHead) -> &[RankedBlock] {
        &self.heads[request * self.kv_heads + head.index()].ranked
    }

    /// The wanted blocks of one head, whatever their order.
    pub fn wanted(&self, request: usize, head: KvHead) -> &BlockSet {
        &self.heads[request * self.kv_heads + head.index()].wanted
    }

    /// Replaces the wanted blocks of one head.
    pub fn set(&mut self, request: usize, head: KvHead, ranked: Vec<RankedBlock>) {
        let wanted = ranked.iter().map(|r| r.block).collect();
        self.heads[request * self.kv_heads + head.index()] = HeadRanking { ranked, wanted };
    }
}

/// The `k` best of `scores`, best first; block `i` has `scores[i]`.
///
/// Ties go to the lower block; NaN ranks below every number. This order is part of the selection's definition: device
/// kernels must reproduce it.
pub fn top_k(scores: &[f32], k: usize) -> Vec<RankedBlock> {
    let mut keys: Vec<u64> = scores.iter().enumerate().map(|(block, &score)| rank_key(score, block)).collect();
    if k == 0 {
        keys.clear();
    } else if k < keys.len() {
        keys.select_nth_unstable(k - 1);
        keys.truncate(k);
    }
    keys.sort_unstable();
    let block = |key: u64| (key & u64::from(u32::MAX)) as usize;
    keys.into_iter().map(|key| RankedBlock { block: BlockId::from(block(key)), score: scores[block(key)] }).collect()
}

/// A number that is smaller for a better rank: the score's order in the upper half, the block in the lower.
fn rank_key(score: f32, block: usize) -> u64 {
    // -0.0 and 0.0 tie.
    let bits = (score + 0.0).to_bits();
    let ascending = match (score.is_nan(), bits >> 31) {
        (true, _) => 0,
        (false, 0) => bits | 1 << 31,
        (false, _) => !bits,
    };
    u64::from(!ascending) << 32 | block as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    fn blocks(ranked: &[RankedBlock]) -> Vec<u32> {
        ranked.iter().map(|r| r.block.0).collect()
    }

    #[test]
    fn ties_go_to_the_lower_block_and_nan_ranks_last() {
        let scores = [1.0, f32::NAN, 2.0, 1.0, -0.0, 0.0, f32::NEG_INFINITY];
        assert_eq!(blocks(&top_k(&scores, 3)), [2, 0, 3]);
        assert_eq!(blocks(&top_k(&scores, 99)), [2, 0, 3, 4, 5, 6, 1]);
        assert_eq!(blocks(&top_k(&scores, 0)), [] as [u32; 0]);
        assert_eq!(blocks(&top_k(&[], 4)), [] as [u32; 0]);
    }

    quickcheck! {
        fn equals_repeated_arg_max(scores: Vec<u8>, k: u8) -> bool {
            // Few distinct values, so that ties are common.
            let scores: Vec<f32> = scores.iter().map(|s| if s % 11 == 0 { f32::NAN } else { (s % 7) as f32 }).collect();
            let mut left: Vec<usize> = (0..scores.len()).collect();
            let mut naive = Vec::new();
            while naive.len() < k as usize && !left.is_empty() {
                let mut best = 0;
                for i in 1..left.len() {
                    let (a, b) = (scores[left[i]], scores[left[best]]);
                    if a > b || (b.is_nan() && !a.is_nan()) {
                        best = i;
                    }
                }
                naive.push(left.remove(best) as u32);
            }
            blocks(&top_k(&scores, k as usize)) == naive
        }
    }
}
