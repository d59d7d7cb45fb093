//! Rotary position embedding in rotate-half order: element `i` of a head is paired with element `i + head_dim / 2`.
//!
//! Frequencies follow Hugging Face transformers' `modeling_rope_utils`, and angles are rounded to f32 where it rounds
//! them, so that long positions agree with checkpoints evaluated there.

use std::f64::consts::PI;

use crate::spec::{RopeScaling, RopeSpec};

/// Frequencies of a model's rotary embedding.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    /// Radians a position `[head_dim / 2]`.
    frequencies: Vec<f32>,
    /// Factor on cos and sin (YaRN's attention factor, otherwise 1).
    factor: f32,
}

impl RotaryEmbedding {
    /// Frequencies for heads of `head_dim` elements.
    ///
    /// # Panics
    /// When `head_dim` is odd.
    pub fn new(spec: &RopeSpec, head_dim: usize) -> Self {
        assert!(head_dim.is_multiple_of(2), "rotary embedding of an odd head_dim ({head_dim})");
        let theta = f64::from(spec.theta);
        let plain: Vec<f64> = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        let mut attention = 1.0;
        let scaled: Vec<f64> = match spec.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|f| f / f64::from(factor)).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let [factor, low, high] = [factor, low_freq_factor, high_freq_factor].map(f64::from);
                plain.iter().map(|&f| llama3(f, factor, low, high, original_max_positions as f64)).collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, attention_factor } => {
                attention = attention_factor;
                let dims = head_dim as f64;
                // Dimension that turns `rotations` times over the original context.
                let dimension = |rotations: f32| {
                    let wavelengths = original_max_positions as f64 / (f64::from(rotations) * 2.0 * PI);
                    dims * wavelengths.ln() / (2.0 * theta.ln())
                };
                let low = dimension(beta_fast).floor().max(0.0);
                let mut high = dimension(beta_slow).ceil().min(dims - 1.0);
                if low == high {
                    high += 0.001;
                }
                let blend = |(i, f): (usize, &f64)| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / f64::from(factor) * interpolated + f * (1.0 - interpolated)
                };
                plain.iter().enumerate().map(blend).collect()
            }
        };
        Self { frequencies: scaled.into_iter().map(|f| f as f32).collect(), factor: attention }
    }

    /// Half of `head_dim`: the pairs of a head.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Cosine and sine of every pair at `position`, `[head_dim / 2]`.
    pub fn angles(&self, position: usize) -> impl Iterator<Item = [f32; 2]> {
        self.frequencies.iter().map(move |frequency| {
            let angle = f64::from(position as f32 * frequency);
            [angle.cos(), angle.sin()].map(|x| x as f32 * self.factor)
        })
    }
}

/// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between them.
fn llama3(frequency: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let rotations = original * frequency / (2.0 * PI);
    if rotations < low {
        frequency / factor
    } else if rotations > high {
        frequency
    } else {
        let kept = (rotations - low) / (high - low);
        (1.0 - kept) * frequency / factor + kept * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() <= tolerance, "{got}, expected {expected}");
        }
    }

    fn frequencies(theta: f32, scaling: RopeScaling, head_dim: usize) -> Vec<f32> {
        RotaryEmbedding::new(&RopeSpec { theta, scaling }, head_dim).frequencies
    }

    #[test]
    fn plain_and_linear_frequencies() {
        let plain = frequencies(10_000.0, RopeScaling::None, 8);
        assert_close(&plain, &[1.0, 0.1, 0.01, 0.001], 1e-8);
        let linear = frequencies(10_000.0, RopeScaling::Linear { factor: 4.0 }, 8);
        assert_close(&linear, &[0.25, 0.025, 0.0025, 0.000_25], 1e-8);
    }

    #[test]
    fn llama3_keeps_short_and_divides_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let plain = frequencies(500_000.0, RopeScaling::None, 128);
        let scaled = frequencies(500_000.0, scaling, 128);
        for (&plain, &scaled) in plain.iter().zip(&scaled) {
            let wavelength = 2.0 * PI / f64::from(plain);
            let expected = if wavelength < 2048.0 {
                f64::from(plain)
            } else if wavelength > 8192.0 {
                f64::from(plain) / 8.0
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                ((1.0 - smooth) / 8.0 + smooth) * f64::from(plain)
            };
            assert!((f64::from(scaled) - expected).abs() < 1e-6 * expected, "{scaled}, expected {expected}");
        }
    }

    #[test]
    fn yarn_ramps_between_whole_dimensions() {
        let scaling = |attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_positions: 32_768,
            attention_factor,
        };
        let plain = frequencies(1_000_000.0, RopeScaling::None, 128);
        let yarn = frequencies(1_000_000.0, scaling(1.0), 128);
        // 128 ln(32768 / (32 · 2π)) / (2 ln 10⁶) = 23.6 and 128 ln(32768 / 2π) / (2 ln 10⁶) = 39.6.
        let ratio = |i: usize| f64::from(yarn[i]) / f64::from(plain[i]);
        for i in 0..64 {
            let interpolated = ((i as f64 - 23.0) / 17.0).clamp(0.0, 1.0);
            assert!((ratio(i) - (1.0 - 0.75 * interpolated)).abs() < 1e-6, "dimension {i}: {}", ratio(i));
        }
        let spec = RopeSpec { theta: 10_000.0, scaling: scaling(1.5) };
        let angles: Vec<[f32; 2]> = RotaryEmbedding::new(&spec, 16).angles(0).collect();
        assert_eq!(angles, [[1.5, 0.0]; 8]);
    }
}
