//! What the kernels' tests share.

/// `len` numbers in -1..1 from a small generator.
pub(in crate::cpu) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Runs `op` on a rayon pool of its own.
pub(in crate::cpu) fn in_pool<R: Send>(threads: usize, op: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool").install(op)
}

/// Panics where `got` differs from `expected` by more than `tolerance`, relative above 1 and absolute below.
pub(in crate::cpu) fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "element {i}: {got}, expected {expected}");
    }
}

/// `x Wᵀ + bias + before` in f64.
pub(in crate::cpu) fn linear(
    w: &[f32],
    inputs: usize,
    bias: Option<&[f32]>,
    x: &[f32],
    before: Option<&[f32]>,
) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks(inputs) {
        for (o, w) in w.chunks(inputs).enumerate() {
            let dot: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let before = before.map_or(0.0, |before| f64::from(before[y.len()]));
            y.push(dot + bias.map_or(0.0, |bias| f64::from(bias[o])) + before);
        }
    }
    y
}

/// Attention of one query `[head_dim]` over tokens `[tokens][head_dim]` in f64.
pub(in crate::cpu) fn attend(query: &[f32], keys: &[f32], values: &[f32], scale: f64) -> Vec<f64> {
    let dim = query.len();
    let dot = |key: &[f32]| query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * scale;
    let scores: Vec<f64> = keys.chunks(dim).map(dot).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let weighted = |i: usize| weights.iter().zip(values.chunks(dim)).map(|(w, v)| w * f64::from(v[i])).sum::<f64>();
    (0..dim).map(|i| if total > 0.0 { weighted(i) / total } else { 0.0 }).collect()
}
