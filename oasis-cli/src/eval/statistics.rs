//! How far a measured figure is known.

/// Bounds that hold a share of `right` in `all` with 95% confidence (E. B. Wilson, 1927); 0 and 1 of no trials.
pub fn wilson(right: usize, all: usize) -> (f64, f64) {
    const Z: f64 = 1.959_963_984_540_054;
    if all == 0 {
        return (0.0, 1.0);
    }
    let (n, share) = (all as f64, right as f64 / all as f64);
    let center = share + Z * Z / (2.0 * n);
    let spread = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    (((center - spread) / scale).max(0.0), ((center + spread) / scale).min(1.0))
}

/// A mean with bounds that hold it with 95% confidence; no numbers where nothing, or too little, was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Mean.
    pub mean: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// Steps of a chunk: neighbouring steps depend on each other, so that whole chunks are the sample.
const CHUNK: usize = 16;

/// Mean of the steps of several windows, with Student's t interval over chunks of each window's steps. Chunks may be of
/// different lengths: the mean is a ratio of sums, and its variance that of the ratio estimator (Cochran, Sampling
/// Techniques, section 6.5).
pub fn mean_of_steps<'a>(windows: impl Iterator<Item = &'a [f64]>) -> Estimate {
    let chunks: Vec<(f64, f64)> =
        windows.flat_map(|steps| steps.chunks(CHUNK)).map(|c| (c.iter().sum(), c.len() as f64)).collect();
    let (sum, count) = chunks.iter().fold((0.0, 0.0), |(sum, count), (s, n)| (sum + s, count + n));
    let mean = sum / count;
    let m = chunks.len() as f64;
    let squares: f64 = chunks.iter().map(|(s, n)| (s - mean * n).powi(2)).sum();
    let spread = student(chunks.len().saturating_sub(1)) * (squares * m / (m - 1.0)).sqrt() / count;
    Estimate { mean, low: mean - spread, high: mean + spread }
}

/// The 97.5% point of Student's t distribution; NaN without a degree of freedom.
fn student(freedom: usize) -> f64 {
    const FEW: [f64; 10] = [f64::NAN, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622];
    if let Some(point) = FEW.get(freedom) {
        return *point;
    }
    // Cornish-Fisher expansion of the normal distribution's point.
    let (z, n) = (1.959_963_984_540_054_f64, freedom as f64);
    let third = 3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z;
    z + (z.powi(3) + z) / (4.0 * n)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
        + third / (384.0 * n.powi(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_students() {
        // Expected values: tables of the distribution.
        for (freedom, expected) in [(1, 12.706), (9, 2.262), (10, 2.228), (12, 2.179), (30, 2.042), (120, 1.980)] {
            assert!((student(freedom) - expected).abs() < 6e-4, "{freedom}: {}", student(freedom));
        }
    }

    #[test]
    fn a_mean_of_steps_weighs_steps_and_varies_by_chunk() {
        // Chunks of 16, 16 and 8 steps, sums 16, 32 and 0: mean 48 / 40; residuals -3.2, 12.8 and -9.6.
        let (first, second) = ([[1.0; 16], [2.0; 16]].concat(), [0.0; 8]);
        let estimate = mean_of_steps([&first[..], &second[..]].into_iter());
        let spread = 4.3027 * ((3.2_f64.powi(2) + 12.8_f64.powi(2) + 9.6_f64.powi(2)) * 1.5).sqrt() / 40.0;
        assert!((estimate.mean - 1.2).abs() < 1e-12);
        assert!((estimate.high - 1.2 - spread).abs() < 1e-9 && (1.2 - estimate.low - spread).abs() < 1e-9);
        let one = mean_of_steps([&first[..3]].into_iter());
        assert!(one.mean == 1.0 && one.low.is_nan(), "one chunk says nothing of its spread");
    }

    #[test]
    fn bounds_are_wilsons() {
        // Expected values: the formula computed apart, in Python.
        for (right, all, expected) in
            [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (31, 32, (0.8426, 0.9945)), (32, 32, (0.8928, 1.0))]
        {
            let (low, high) = wilson(right, all);
            assert!((low - expected.0).abs() < 5e-5 && (high - expected.1).abs() < 5e-5, "{right}/{all}: {low} {high}");
        }
        assert_eq!(wilson(0, 0), (0.0, 1.0));
    }
}
