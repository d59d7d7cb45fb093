//! Keys and values between entries of the device and the rows that are handed over: bf16 in f32, so nothing is lost.

use crate::layout::{BLOCK_TOKENS, entry_bytes, key_offset, value_offset};
use half::bf16;

/// Elements that lie side by side in an entry: 16 bytes, which swizzling keeps together.
const SIDE_BY_SIDE: usize = 8;

/// Reads runs of elements that begin at these bytes.
fn read(entries: &[u8], runs: impl Iterator<Item = usize>) -> Vec<f32> {
    let mut elements = Vec::new();
    for at in runs {
        let run = entries[at..at + 2 * SIDE_BY_SIDE].as_chunks().0;
        elements.extend(run.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
    }
    elements
}

/// Writes runs of elements that begin at these bytes.
fn write(entries: &mut [u8], runs: impl Iterator<Item = usize>, elements: &[f32]) {
    for (at, run) in runs.zip(elements.chunks_exact(SIDE_BY_SIDE)) {
        for (bytes, element) in entries[at..at + 2 * SIDE_BY_SIDE].chunks_exact_mut(2).zip(run) {
            bytes.copy_from_slice(&bf16::from_f32(*element).to_le_bytes());
        }
    }
}

/// Where the runs of `[tokens][2][kv_heads][head_dim]` begin in tails `[kv_heads][2]` whose block is at `place`, 0 or 1.
fn tail_runs(place: usize, tokens: usize, kv_heads: usize, head_dim: usize) -> impl Iterator<Item = usize> {
    let entry = entry_bytes(head_dim);
    (0..tokens).flat_map(move |token| {
        [key_offset, value_offset].into_iter().flat_map(move |offset| {
            (0..kv_heads).flat_map(move |head| {
                let start = (head * 2 + place) * entry;
                (0..head_dim).step_by(SIDE_BY_SIDE).map(move |d| start + offset(head_dim, token, d))
            })
        })
    })
}

/// The first `tokens` tokens of the tail block at `place` of `tails`, `[kv_heads][2]` entries: `[tokens][2][kv_heads]
/// [head_dim]`.
pub fn read_tail(tails: &[u8], place: usize, tokens: usize, kv_heads: usize, head_dim: usize) -> Vec<f32> {
    read(tails, tail_runs(place, tokens, kv_heads, head_dim))
}

/// Tails, `[kv_heads][2]` entries, of which the block at `place` holds `rows`, `[tokens][2][kv_heads][head_dim]`.
pub fn write_tail(rows: &[f32], place: usize, kv_heads: usize, head_dim: usize) -> Vec<u8> {
    let mut tails = vec![0; kv_heads * 2 * entry_bytes(head_dim)];
    let tokens = rows.len() / (2 * kv_heads * head_dim);
    write(&mut tails, tail_runs(place, tokens, kv_heads, head_dim), rows);
    tails
}

/// Where keys or values lie in an entry: [`key_offset`] or [`value_offset`].
type Offset = fn(usize, usize, usize) -> usize;

/// Where the runs of `[kv_heads][positions][head_dim]` begin in `[blocks][kv_heads]` entries.
fn row_runs(offset: Offset, positions: usize, kv_heads: usize, head_dim: usize) -> impl Iterator<Item = usize> {
    let entry = entry_bytes(head_dim);
    (0..kv_heads).flat_map(move |head| {
        (0..positions).flat_map(move |position| {
            let start = (position / BLOCK_TOKENS * kv_heads + head) * entry;
            let token = position % BLOCK_TOKENS;
            (0..head_dim).step_by(SIDE_BY_SIDE).map(move |d| start + offset(head_dim, token, d))
        })
    })
}

/// Keys and values of the first `positions` positions of `entries`, `[blocks][kv_heads]` entries: `[kv_heads][positions]
/// [head_dim]` each.
pub fn read_rows(entries: &[u8], positions: usize, kv_heads: usize, head_dim: usize) -> [Vec<f32>; 2] {
    [key_offset as Offset, value_offset].map(|offset| read(entries, row_runs(offset, positions, kv_heads, head_dim)))
}

/// The entries, `[blocks][kv_heads]`, of keys and values `[kv_heads][positions][head_dim]`.
pub fn write_rows(keys: &[f32], values: &[f32], kv_heads: usize, head_dim: usize) -> Vec<u8> {
    let positions = keys.len() / (kv_heads * head_dim);
    let mut entries = vec![0; positions.div_ceil(BLOCK_TOKENS) * kv_heads * entry_bytes(head_dim)];
    for (offset, rows) in [(key_offset as Offset, keys), (value_offset, values)] {
        write(&mut entries, row_runs(offset, positions, kv_heads, head_dim), rows);
    }
    entries
}

/// Pages of blocks `first ..` in order, of a row's `pages`, each `page` bytes, whose blocks take turns.
pub fn unroll(pages: &[u8], page: usize, blocks: std::ops::Range<usize>) -> Vec<u8> {
    let ring = pages.len() / page;
    blocks.flat_map(|block| &pages[block % ring * page..][..page]).copied().collect()
}

/// A row's `ring` pages, of which those of blocks `first ..` are `in_order`.
pub fn roll(in_order: &[u8], page: usize, first: usize, ring: usize) -> Vec<u8> {
    let mut pages = vec![0; ring * page];
    for (index, bytes) in in_order.chunks_exact(page).enumerate() {
        pages[(first + index) % ring * page..][..page].copy_from_slice(bytes);
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_turns_in_the_pages_of_a_row() {
        // Blocks 5, 6 and 7 in 4 pages of 2 bytes.
        let in_order = [50, 51, 60, 61, 70, 71];
        let pages = roll(&in_order, 2, 5, 4);
        assert_eq!(pages, [0, 0, 50, 51, 60, 61, 70, 71]);
        assert_eq!(unroll(&pages, 2, 5..8), in_order);
        assert_eq!(roll(&in_order, 2, 6, 4), [70, 71, 0, 0, 50, 51, 60, 61]);
        assert_eq!(unroll(&roll(&in_order, 2, 7, 3), 2, 7..10), in_order);
    }

    /// A finite number of its own for every element.
    fn number(is_value: bool, head: usize, token: usize, d: usize) -> f32 {
        let bits = (head * 64 + token) * 128 + d + 1;
        assert!(token < 64 && d < 128 && bits < 0x7f80);
        bf16::from_bits(bits as u16 | if is_value { 0x8000 } else { 0 }).to_f32()
    }

    /// Writes all tokens of `entry`, byte by byte.
    fn fill(entry: &mut [u8], head_dim: usize, head: usize, first: usize) {
        for (token, d) in (0..BLOCK_TOKENS).flat_map(|token| (0..head_dim).map(move |d| (token, d))) {
            for (is_value, at) in [(false, key_offset(head_dim, token, d)), (true, value_offset(head_dim, token, d))] {
                let bits = bf16::from_f32(number(is_value, head, first + token, d)).to_bits();
                (entry[at], entry[at + 1]) = (bits as u8, (bits >> 8) as u8);
            }
        }
    }

    #[test]
    fn a_tail_is_read_token_by_token_and_written_back_to_its_place() {
        for (head_dim, kv_heads) in [(64, 3), (128, 2)] {
            let bytes = entry_bytes(head_dim);
            for (place, tokens) in [(0, 0), (0, 5), (1, 16), (1, 1)] {
                let mut tails = vec![0xff; kv_heads * 2 * bytes];
                for (head, pair) in tails.chunks_exact_mut(2 * bytes).enumerate() {
                    fill(&mut pair[place * bytes..][..bytes], head_dim, head, 7);
                }
                let rows = read_tail(&tails, place, tokens, kv_heads, head_dim);
                let mut expected = Vec::new();
                for (token, is_value) in (0..tokens).flat_map(|token| [(token, false), (token, true)]) {
                    for head in 0..kv_heads {
                        expected.extend((0..head_dim).map(|d| number(is_value, head, 7 + token, d)));
                    }
                }
                assert!(rows == expected, "{head_dim}, {place}, {tokens}");
                let back = write_tail(&rows, place, kv_heads, head_dim);
                assert!(read_tail(&back, place, tokens, kv_heads, head_dim) == rows);
                let written = back.iter().filter(|byte| **byte != 0).count();
                assert!(written <= rows.len() * 2, "nothing beside the tokens");
                assert!(read_tail(&back, 1 - place, BLOCK_TOKENS, kv_heads, head_dim).iter().all(|x| *x == 0.0));
            }
        }
    }

    #[test]
    fn rows_of_a_draft_head_are_read_head_by_head_and_written_back() {
        for (head_dim, kv_heads) in [(64, 2), (128, 1)] {
            for positions in [0, 1, 16, 37] {
                let bytes = entry_bytes(head_dim);
                let mut entries = vec![0; 3 * kv_heads * bytes];
                for (index, entry) in entries.chunks_exact_mut(bytes).enumerate() {
                    fill(entry, head_dim, index % kv_heads, index / kv_heads * BLOCK_TOKENS);
                }
                let [keys, values] = read_rows(&entries, positions, kv_heads, head_dim);
                for (is_value, rows) in [(false, &keys), (true, &values)] {
                    let expected: Vec<f32> = (0..kv_heads)
                        .flat_map(|head| (0..positions).map(move |position| (head, position)))
                        .flat_map(|(h, p)| (0..head_dim).map(move |d| number(is_value, h, p, d)))
                        .collect();
                    assert!(*rows == expected, "{head_dim}, {positions}, {is_value}");
                }
                let back = write_rows(&keys, &values, kv_heads, head_dim);
                assert_eq!(back.len(), positions.div_ceil(BLOCK_TOKENS) * kv_heads * bytes);
                assert!(read_rows(&back, positions, kv_heads, head_dim) == [keys, values]);
            }
        }
    }
}
