//! Speed of the CPU kernels beside the machine's floor, measured in the same run.

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use oasis_models::cpu::kernels::matvec;
use oasis_models::weights::{Matrix, MatrixData};
use rayon::prelude::*;

/// Seconds of the fastest of several runs.
fn fastest(mut run: impl FnMut()) -> f64 {
    run();
    let start = Instant::now();
    let mut best = f64::MAX;
    let mut runs = 0;
    while runs < 3 || start.elapsed().as_secs_f64() < 0.25 {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

/// Numbers in -0.5..0.5 from a small generator.
fn noise(len: usize) -> Vec<f32> {
    let mut state = 12345u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 16_777_216.0 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

/// GB/s of reading `bytes` of memory on every thread of the pool.
fn streaming(bytes: usize) -> f64 {
    let data = vec![1u64; bytes / 8];
    let seconds = fastest(|| {
        let sum: u64 = data
            .par_chunks(1 << 16)
            .map(|chunk| chunk.iter().copied().fold(0u64, u64::wrapping_add))
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
    });
    bytes as f64 / seconds / 1e9
}

fn bench_matvec(floor: f64) {
    println!("matvec, bf16, cold weights; floor {floor:.1} GB/s");
    for (rows, cols) in [
        (960, 576),
        (576, 576),
        (3072, 576),
        (576, 1536),
        (49152, 576),
    ] {
        let bytes = rows * cols * 2;
        let copies = (128 << 20) / bytes + 1;
        let data: Vec<bf16> = noise(rows * cols).into_iter().map(bf16::from_f32).collect();
        let weights: Vec<Matrix> = (0..copies)
            .map(|_| Matrix {
                rows,
                cols,
                data: MatrixData::Bf16(data.clone()),
            })
            .collect();
        for x_rows in [1, 2, 4, 8] {
            let x = noise(x_rows * cols);
            let mut y = vec![0.0; x_rows * rows];
            let mut time = || {
                fastest(|| {
                    weights
                        .iter()
                        .for_each(|w| matvec(w, None, &x, &mut y, false))
                })
            };
            let outside = time();
            let inside = rayon::scope(|_| time());
            let speed = |seconds: f64| (bytes * copies) as f64 / seconds / 1e9;
            println!(
                "  [{rows}][{cols}] x {x_rows}: {:.1} GB/s from outside the pool, {:.1} GB/s inside ({:.0}% of the floor), {:.1} us",
                speed(outside),
                speed(inside),
                100.0 * speed(inside) / floor,
                inside / copies as f64 * 1e6
            );
        }
    }
}

fn main() {
    println!("{} threads", rayon::current_num_threads());
    let floor = streaming(256 << 20);
    bench_matvec(floor);
}
