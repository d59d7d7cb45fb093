//! Where keys, values and summaries lie on the device and in the host memory that it copies from; the same as
//! `kernels/layout.cuh`.

/// Number of the entry layout that kernels, stores, transports and peers must agree on.
///
/// Version 3: an entry is `K[16][head_dim]` then `V[16][head_dim]` in bf16. A summary tile is `[16 blocks][rows * head_dim]`
/// in bf16, in e4m3 or in 4 bits, the lower half of a byte first. Then follow, for e4m3, scales `[16 blocks][rows]` in bf16;
/// for 4 bits, grids `[16 blocks][rows][head_dim / 32]`, each a step and an offset in bf16; for bf16, where blocks have a
/// number beside their rows, floats `[16 blocks]`. In entries and rows of a tile, 16-byte chunk `c` of row `r` lies at chunk
/// `c ^ (r % 8)` of that row, and in rows of 64 bytes at `c ^ (r / 2 % 4)`. A plain bulk copy then gives shared memory that
/// matrix loads read without bank conflicts.
pub const LAYOUT_VERSION: u32 = 3;

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 16;

/// Bytes of one entry: keys and values of one block and one KV head.
pub fn entry_bytes(head_dim: usize) -> usize {
    2 * BLOCK_TOKENS * head_dim * 2
}

/// Bytes of one summary tile: 16 blocks of `block_bytes` bytes.
pub fn tile_bytes(block_bytes: usize) -> usize {
    BLOCK_TOKENS * block_bytes
}

/// Byte within an entry of coordinate `d` of the key of token `token`.
pub fn key_offset(head_dim: usize, token: usize, d: usize) -> usize {
    swizzled(token, head_dim, d)
}

/// Byte within an entry of coordinate `d` of the value of token `token`.
pub fn value_offset(head_dim: usize, token: usize, d: usize) -> usize {
    entry_bytes(head_dim) / 2 + swizzled(token, head_dim, d)
}

/// Byte within a tile of bf16 of coordinate `d` of row `row` of block `block`, both counted within the tile and the block.
pub fn summary_offset(rows: usize, head_dim: usize, block: usize, row: usize, d: usize) -> usize {
    swizzled(block, rows * head_dim, row * head_dim + d)
}

/// The same of a tile of e4m3.
pub fn code_offset(rows: usize, head_dim: usize, block: usize, row: usize, d: usize) -> usize {
    swizzled_byte(block, rows * head_dim, row * head_dim + d)
}

/// Byte within a tile of e4m3 of the scale of row `row` of block `block`, in bf16.
pub fn scale_offset(rows: usize, head_dim: usize, block: usize, row: usize) -> usize {
    BLOCK_TOKENS * rows * head_dim + (block * rows + row) * 2
}

/// Byte within a tile of 4 bits that holds coordinate `d` of row `row` of block `block`: in its lower half where `d` is even.
pub fn half_byte_offset(rows: usize, head_dim: usize, block: usize, row: usize, d: usize) -> usize {
    swizzled_byte(block, rows * head_dim / 2, (row * head_dim + d) / 2)
}

/// Byte within a tile of 4 bits of grid `grid` of row `row` of block `block`.
pub fn grid_offset(rows: usize, head_dim: usize, block: usize, row: usize, grid: usize) -> usize {
    BLOCK_TOKENS * rows * head_dim / 2 + ((block * rows + row) * (head_dim / 32) + grid) * 4
}

/// Byte within a tile of bf16 of the number beside the rows of block `block`, a float.
pub fn side_offset(rows: usize, head_dim: usize, block: usize) -> usize {
    BLOCK_TOKENS * rows * head_dim * 2 + block * 4
}

/// Byte of element `column` of row `row`, `width` elements of bf16 a row.
fn swizzled(row: usize, width: usize, column: usize) -> usize {
    swizzled_byte(row, width * 2, column * 2)
}

fn swizzled_byte(row: usize, width: usize, byte: usize) -> usize {
    let turn = if width == 64 { row / 2 % 4 } else { row % 8 };
    row * width + ((byte / 16) ^ turn) * 16 + byte % 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_an_entry_and_of_a_tile_is_used_once() {
        for head_dim in [64, 128] {
            let tokens = (0..BLOCK_TOKENS).flat_map(|t| (0..head_dim).map(move |d| (t, d)));
            let mut offsets: Vec<usize> =
                tokens.flat_map(|(t, d)| [key_offset(head_dim, t, d), value_offset(head_dim, t, d)]).collect();
            offsets.sort_unstable();
            assert_eq!(offsets, (0..entry_bytes(head_dim)).step_by(2).collect::<Vec<_>>());
            for rows in [1, 2] {
                let blocks = (0..BLOCK_TOKENS).flat_map(|b| (0..rows).map(move |r| (b, r)));
                let mut offsets: Vec<usize> = blocks
                    .flat_map(|(b, r)| (0..head_dim).map(move |d| summary_offset(rows, head_dim, b, r, d)))
                    .collect();
                offsets.sort_unstable();
                assert_eq!(offsets, (0..tile_bytes(rows * head_dim * 2)).step_by(2).collect::<Vec<_>>());
            }
            let rows = || (0..BLOCK_TOKENS).flat_map(|block| [(block, 0), (block, 1)]);
            let mut bytes: Vec<usize> = rows()
                .flat_map(|(block, row)| {
                    let scale = scale_offset(2, head_dim, block, row);
                    (0..head_dim).map(move |d| code_offset(2, head_dim, block, row, d)).chain([scale, scale + 1])
                })
                .collect();
            bytes.sort_unstable();
            assert_eq!(bytes, (0..tile_bytes(2 * (head_dim + 2))).collect::<Vec<_>>());
            let mut bytes: Vec<usize> = rows()
                .flat_map(|(block, row)| {
                    let pairs = (0..head_dim / 2).map(move |pair| half_byte_offset(2, head_dim, block, row, 2 * pair));
                    let grids = (0..head_dim / 32).map(move |grid| grid_offset(2, head_dim, block, row, grid));
                    pairs.chain(grids.flat_map(|at| at..at + 4))
                })
                .collect();
            bytes.sort_unstable();
            assert_eq!(bytes, (0..tile_bytes(2 * (head_dim / 2 + head_dim / 8))).collect::<Vec<_>>());
        }
    }
}
