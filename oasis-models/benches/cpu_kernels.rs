//! Speed of the CPU kernels beside the machine's floor, measured in the same run.

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use oasis_models::cpu::kernels::{KvRun, PrefillShape, decode_attention, matmul, matvec, prefill_attention, swiglu};
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
    for (rows, cols) in [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)] {
        let bytes = rows * cols * 2;
        let copies = (128 << 20) / bytes + 1;
        let data: Vec<bf16> = noise(rows * cols).into_iter().map(bf16::from_f32).collect();
        let weights: Vec<Matrix> =
            (0..copies).map(|_| Matrix { rows, cols, data: MatrixData::Bf16(data.clone()) }).collect();
        for x_rows in [1, 2, 4, 8] {
            let x = noise(x_rows * cols);
            let mut y = vec![0.0; x_rows * rows];
            let mut time = || fastest(|| weights.iter().for_each(|w| matvec(w, None, &x, &mut y, false)));
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

/// GFLOP/s of a prefill matrix product; the shapes are rows, input and output features.
fn matmul_speed(rows: usize, inputs: usize, outputs: usize) -> f64 {
    let (w, x) = (noise(outputs * inputs), noise(rows * inputs));
    let mut y = vec![0.0; rows * outputs];
    let seconds = fastest(|| matmul(&w, inputs, None, &x, &mut y, false));
    2.0 * (rows * inputs * outputs) as f64 / seconds / 1e9
}

fn bench_matmul() -> f64 {
    println!("matmul, 512 rows");
    let mut peak = 0.0f64;
    for (inputs, outputs) in [(576, 576), (576, 960), (576, 3072), (1536, 576), (576, 49152)] {
        let speed = matmul_speed(512, inputs, outputs);
        peak = peak.max(speed);
        println!("  [{outputs}][{inputs}]: {speed:.0} GFLOP/s");
    }
    peak
}

fn bench_decode_attention(floor: f64) {
    println!("decode attention, cold entries of 16 tokens, tasks over KV heads");
    for (head_dim, group, kv_heads, blocks) in
        [(64, 3, 3, 128), (64, 4, 8, 128), (128, 4, 8, 128), (32, 2, 2, 128), (64, 4, 1, 4096)]
    {
        let entry = 16 * head_dim;
        let layers = (256 << 20) / (kv_heads * blocks * 2 * entry * 4) + 1;
        let data = noise(layers * kv_heads * blocks * 2 * entry);
        let heads: Vec<Vec<KvRun>> = data
            .chunks(blocks * 2 * entry)
            .map(|head| {
                head.chunks(2 * entry)
                    .map(|both| both.split_at(both.len() / 2))
                    .map(|(keys, values)| KvRun { keys, values, first_query: 0 })
                    .collect()
            })
            .collect();
        for rows in [1, 2] {
            let queries = noise(rows * group * head_dim);
            let mut out = vec![0.0; kv_heads * queries.len()];
            let seconds = rayon::scope(|_| {
                fastest(|| {
                    for layer in heads.chunks(kv_heads) {
                        layer.par_iter().zip(out.par_chunks_mut(queries.len())).for_each(|(runs, out)| {
                            decode_attention(&queries, head_dim, runs, 0.125, out);
                        });
                    }
                })
            });
            let speed = (data.len() * 4) as f64 / seconds / 1e9;
            println!(
                "  head_dim {head_dim}, {kv_heads} KV heads, {blocks} blocks, {rows} rows x group {group}: {speed:.1} GB/s ({:.0}% of the floor), {:.1} us a layer",
                100.0 * speed / floor,
                seconds / layers as f64 * 1e6
            );
        }
    }
}

fn bench_prefill_attention(peak: f64) {
    println!("prefill attention, chunk of 512");
    for (q_heads, kv_heads, head_dim, start) in
        [(9, 3, 64, 0), (9, 3, 64, 3584), (32, 8, 64, 15872), (32, 8, 128, 15872), (4, 2, 32, 3584)]
    {
        let (chunk, total) = (512, start + 512);
        let shape = PrefillShape { q_heads, kv_heads, head_dim, start };
        let queries = noise(chunk * q_heads * head_dim);
        let (keys, values) = (noise(kv_heads * total * head_dim), noise(kv_heads * total * head_dim));
        let mut out = vec![0.0; queries.len()];
        let seconds = fastest(|| prefill_attention(shape, &queries, &keys, &values, &mut out));
        let scores = chunk * start + chunk * (chunk + 1) / 2;
        let speed = 4.0 * (scores * q_heads * head_dim) as f64 / seconds / 1e9;
        println!(
            "  {q_heads}/{kv_heads} heads of {head_dim}, start {start}: {speed:.0} GFLOP/s ({:.0}% of the fastest matmul), {:.2} ms",
            100.0 * speed / peak,
            seconds * 1e3
        );
    }
}

fn bench_swiglu() {
    for (rows, width) in [(2, 1536), (512, 1536)] {
        let gate_up = noise(rows * 2 * width);
        let mut out = vec![0.0; rows * width];
        let seconds = fastest(|| swiglu(&gate_up, width, &mut out));
        println!("swiglu [{rows}][{width}]: {:.2} ns an element", seconds * 1e9 / out.len() as f64);
    }
}

fn main() {
    println!("{} threads", rayon::current_num_threads());
    let floor = streaming(256 << 20);
    bench_matvec(floor);
    let floor = streaming(256 << 20);
    println!("streaming read {floor:.1} GB/s");
    bench_decode_attention(floor);
    let peak = bench_matmul();
    bench_prefill_attention(peak);
    bench_swiglu();
}
