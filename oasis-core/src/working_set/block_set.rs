//! Sets of blocks with membership in constant time: one bit a block, as device kernels keep them.

use crate::ids::BlockId;

/// A set of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockSet(Vec<u64>);

impl BlockSet {
    /// Whether `block` is in the set.
    #[inline]
    pub fn contains(&self, block: BlockId) -> bool {
        self.0.get(block.index() / 64).is_some_and(|word| word >> (block.index() % 64) & 1 == 1)
    }

    /// Adds `block`; `false` when it was there already.
    pub fn insert(&mut self, block: BlockId) -> bool {
        let (word, bit) = (block.index() / 64, 1 << (block.index() % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }
}

impl FromIterator<BlockId> for BlockSet {
    fn from_iter<I: IntoIterator<Item = BlockId>>(blocks: I) -> Self {
        let mut set = Self::default();
        for block in blocks {
            set.insert(block);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;
    use std::collections::HashSet;

    quickcheck! {
        fn equals_a_hash_set(inserted: Vec<u16>, asked: Vec<u16>) -> bool {
            let mut expected = HashSet::new();
            let mut set = BlockSet::default();
            let inserts = inserted.iter().all(|&b| set.insert(BlockId(b.into())) == expected.insert(b));
            inserts && asked.iter().chain(&inserted).all(|b| set.contains(BlockId((*b).into())) == expected.contains(b))
        }
    }
}
