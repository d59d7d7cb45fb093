//! Which parts of a region are free.

use std::collections::BTreeMap;

/// Every range begins at a multiple of this, a cache line: enough for any element type and SIMD width.
pub const ALIGN: usize = 64;

/// Free ranges of a region; the lowest that is large enough is taken first, so that what is taken one after the other
/// lies side by side.
#[derive(Debug)]
pub struct Ranges {
    /// Length by start; no two touch.
    free: BTreeMap<usize, usize>,
}

/// Bytes that a range of `len` occupies.
pub fn rounded(len: usize) -> usize {
    len.max(1).saturating_add(ALIGN - 1) / ALIGN * ALIGN
}

impl Ranges {
    /// A region of `len` bytes, all free; `len` is a multiple of [`ALIGN`].
    pub fn new(len: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]) }
    }

    /// The start of `len` bytes that are taken now; `None` when there are not as many side by side.
    pub fn take(&mut self, len: usize) -> Option<usize> {
        let len = rounded(len);
        let (start, free) = self.free.iter().find(|(_, free)| **free >= len).map(|(start, free)| (*start, *free))?;
        self.free.remove(&start);
        if free > len {
            self.free.insert(start + len, free - len);
        }
        Some(start)
    }

    /// Frees what [`take`](Self::take) gave for `len` at `start`.
    pub fn give_back(&mut self, mut start: usize, len: usize) {
        let mut len = rounded(len);
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            self.free.remove(&before);
            (start, len) = (before, free + len);
        }
        if let Some(free) = self.free.remove(&(start + len)) {
            len += free;
        }
        self.free.insert(start, len);
    }

    /// Bytes that are free, wherever they lie.
    pub fn free_bytes(&self) -> usize {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    const SIZE: usize = 64 * ALIGN;

    quickcheck! {
        /// Against a map of cells: no range is lent twice, and what is free is found where it is free.
        fn ranges_are_disjoint_and_come_back(steps: Vec<(bool, u16)>) -> bool {
            let mut ranges = Ranges::new(SIZE);
            let mut cells = [false; SIZE / ALIGN];
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (takes, number) in steps {
                if takes {
                    let len = usize::from(number) % (9 * ALIGN);
                    let needed = rounded(len) / ALIGN;
                    let first = cells.windows(needed).position(|window| window.iter().all(|taken| !taken));
                    let start = ranges.take(len);
                    if start != first.map(|cell| cell * ALIGN) {
                        return false;
                    }
                    if let Some(start) = start {
                        cells[start / ALIGN..][..needed].fill(true);
                        held.push((start, len));
                    }
                } else if !held.is_empty() {
                    let (start, len) = held.swap_remove(usize::from(number) % held.len());
                    cells[start / ALIGN..][..rounded(len) / ALIGN].fill(false);
                    ranges.give_back(start, len);
                }
                if ranges.free_bytes() != cells.iter().filter(|taken| !**taken).count() * ALIGN {
                    return false;
                }
            }
            held.into_iter().for_each(|(start, len)| ranges.give_back(start, len));
            ranges.take(SIZE) == Some(0)
        }
    }
}
