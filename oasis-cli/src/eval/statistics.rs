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

#[cfg(test)]
mod tests {
    use super::*;

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
