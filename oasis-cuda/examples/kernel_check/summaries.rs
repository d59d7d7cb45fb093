//! Summaries as kernels write them, beside those of the policies' own code.

use crate::rig::{Outcome, Random};
use half::bf16;
use oasis_core::geometry::HeadShape;
use oasis_core::policy::{DeviceCode, SummarizeTask, Summarizer, SummarizerSpec};
use oasis_cuda::layout::{
    code_offset, grid_offset, half_byte_offset, key_offset, scale_offset, side_offset, summary_offset, tile_bytes,
};
use oasis_policies::summarizers::{ArkVale, Mean, Quest, QuestFp8, QuestInt4, ShadowKv, Volume};

/// A summarizer for heads of some size.
pub struct Form {
    pub code: DeviceCode,
    /// Bytes of a block's summary.
    pub bytes: usize,
    pub rows: usize,
    shape: HeadShape,
    policy: Box<dyn Summarizer>,
}

/// Every summarizer with device code.
pub fn forms(head_dim: usize) -> Outcome<Vec<Form>> {
    let (cuboid, sphere) = (ArkVale::default(), ArkVale { volume: Volume::Sphere });
    let specs: [&dyn SummarizerSpec; 7] =
        [&Quest {}, &Mean {}, &QuestFp8 {}, &cuboid, &sphere, &ShadowKv::default(), &QuestInt4 {}];
    specs.into_iter().map(|spec| Form::new(spec, head_dim)).collect()
}

impl Form {
    pub fn new(spec: &dyn SummarizerSpec, head_dim: usize) -> Outcome<Self> {
        let shape = HeadShape { group: 1, head_dim, block_tokens: 16 };
        let policy = spec.build(shape)?;
        let code = policy.device_code().ok_or("the summarizer has no device code")?;
        Ok(Self { code, bytes: policy.device_bytes(shape), rows: policy.rows_per_block(), shape, policy })
    }

    /// Whether rows are 8-bit codes with a scale each.
    fn has_scales(&self) -> bool {
        self.bytes == self.rows * (self.shape.head_dim + 2)
    }

    /// Whether rows are 4-bit codes with a grid for 32 of them.
    fn has_grids(&self) -> bool {
        self.bytes == self.rows * (self.shape.head_dim / 2 + self.shape.head_dim / 8)
    }

    /// Whether rows are codes.
    pub fn is_packed(&self) -> bool {
        self.has_scales() || self.has_grids()
    }

    /// Whether a float stands beside a block's rows.
    pub fn has_side(&self) -> bool {
        self.bytes == self.rows * self.shape.head_dim * 2 + 4
    }

    /// Numbers of a block.
    pub fn numbers(&self) -> usize {
        self.rows * self.shape.head_dim + usize::from(self.has_side())
    }

    /// What the number beside the rows counts for a query of this length: the radius of `arkvale` is an extent in the
    /// query's direction, `shadowkv` raises the score whatever the query.
    pub fn weight(&self, length: f64) -> f64 {
        if self.code.name.contains("sphere") { length } else { 1.0 }
    }

    /// Numbers of a block in a tile: `[rows][head_dim]`, then the one beside them.
    pub fn read(&self, tile: &[u8], block: usize) -> Vec<f64> {
        let (rows, head_dim) = (self.rows, self.shape.head_dim);
        let half = |at: usize| bf16::from_le_bytes([tile[at], tile[at + 1]]).to_f64();
        let number = |row, d| {
            if self.has_scales() {
                let code = tile[code_offset(rows, head_dim, block, row, d)];
                return half(scale_offset(rows, head_dim, block, row)) * e4m3(code);
            }
            if self.has_grids() {
                let code = tile[half_byte_offset(rows, head_dim, block, row, d)] >> (d % 2 * 4) & 0xf;
                let grid = grid_offset(rows, head_dim, block, row, d / 32);
                return half(grid + 2) + half(grid) * f64::from(code);
            }
            half(summary_offset(rows, head_dim, block, row, d))
        };
        let places = (0..rows).flat_map(|row| (0..head_dim).map(move |d| (row, d)));
        let side = self.has_side().then(|| side_offset(rows, head_dim, block));
        let side = side.map(|at| f32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]).into());
        places.map(|(row, d)| number(row, d)).chain(side).collect()
    }

    /// The same of a block whose keys lie in `entry`, by the policy's own code.
    pub fn of_keys(&self, entry: &[bf16]) -> Vec<f64> {
        let head_dim = self.shape.head_dim;
        let places = (0..16).flat_map(|token| (0..head_dim).map(move |d| key_offset(head_dim, token, d) / 2));
        let keys: Vec<f32> = places.map(|at| entry[at].to_f32()).collect();
        let mut rows = vec![0; self.rows * self.policy.row_words(self.shape)];
        self.policy.summarize(self.shape, &mut [SummarizeTask { keys: &keys, rows: &mut rows }]);
        if !self.is_packed() {
            return rows.into_iter().map(|word| f32::from_bits(word).into()).collect();
        }
        if self.has_grids() {
            // 32 numbers are a word with offset and step, then 8 codes a word.
            let grid = |words: &[u32]| {
                let [offset, step] =
                    [words[0] & 0xffff_0000, words[0] << 16].map(|bits| f64::from(f32::from_bits(bits)));
                let codes = words[1..].iter().flat_map(|word| (0..8).map(move |i| f64::from(word >> (4 * i) & 0xf)));
                codes.map(|code| offset + step * code).collect::<Vec<_>>()
            };
            return rows.chunks_exact(5).flat_map(grid).collect();
        }
        // A row is its scale, then its codes.
        let row = |words: &[u32]| {
            let scale = f64::from(f32::from_bits(words[0]));
            words[1..].iter().flat_map(|word| word.to_le_bytes()).map(|code| scale * e4m3(code)).collect::<Vec<_>>()
        };
        rows.chunks_exact(self.policy.row_words(self.shape)).flat_map(row).collect()
    }

    /// Numbers, bytes of 8-bit codes and scales, or grids of poisoned summaries that have been written.
    pub fn written(&self, summaries: &[u8]) -> usize {
        if self.has_grids() {
            // Every code may be, but no grid.
            let tiles = summaries.chunks_exact(tile_bytes(self.bytes));
            let grids = tiles.flat_map(|tile| tile[16 * self.rows * self.shape.head_dim / 2..].chunks_exact(4));
            return grids.filter(|grid| *grid != [0xff; 4]).count();
        }
        match self.has_scales() {
            false => summaries.chunks_exact(2).filter(|pair| *pair != [0xff, 0xff]).count(),
            // Neither a code nor half of a power of two is 0xff.
            true => summaries.iter().filter(|byte| **byte != 0xff).count(),
        }
    }

    /// What [`Self::written`] counts for one block.
    pub fn written_of_block(&self) -> usize {
        match (self.has_scales(), self.has_grids()) {
            (true, _) => self.bytes,
            (_, true) => self.rows * self.shape.head_dim / 32,
            _ => self.bytes / 2,
        }
    }

    /// Tiles of random rows, of codes with powers of two or with grids.
    pub fn random_tiles(&self, random: &mut Random, tiles: usize) -> Vec<u8> {
        let bytes = tile_bytes(self.bytes);
        let mut tile = || -> Vec<u8> {
            if !self.is_packed() && !self.has_side() {
                return random.bf16s(bytes / 2).into_iter().flat_map(bf16::to_le_bytes).collect();
            }
            if self.has_side() {
                let numbers =
                    random.bf16s(16 * self.rows * self.shape.head_dim).into_iter().flat_map(bf16::to_le_bytes);
                let mut tile: Vec<u8> = numbers.collect();
                tile.extend((0..16).flat_map(|_| (10.0 * random.float()).to_le_bytes()));
                return tile;
            }
            if self.has_grids() {
                let mut tile: Vec<u8> =
                    (0..16 * self.rows * self.shape.head_dim / 2).map(|_| random.next() as u8).collect();
                for _ in 0..16 * self.rows * self.shape.head_dim / 32 {
                    let grid = [random.float().abs(), 8.0 * random.float()];
                    tile.extend(grid.into_iter().flat_map(|number| bf16::from_f32(number).to_le_bytes()));
                }
                return tile;
            }
            let codes = 16 * self.rows * self.shape.head_dim;
            let code = |byte: u8| if byte & 0x7f == 0x7f { 0 } else { byte };
            let mut tile: Vec<u8> = (0..codes).map(|_| code(random.next() as u8)).collect();
            for _ in 0..16 * self.rows {
                tile.extend(bf16::from_f32(2.0_f32.powi(random.below(9) as i32 - 8)).to_le_bytes());
            }
            tile
        };
        // Enough of them to be different for a cache.
        let distinct: Vec<u8> = (0..tiles.min((1 << 25) / bytes)).flat_map(|_| tile()).collect();
        distinct.iter().copied().cycle().take(tiles * bytes).collect()
    }
}

/// Value of an 8-bit float of 4 bits of exponent and 3 of mantissa (OCP 8-bit floating point, 1.0).
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
    let size = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}
