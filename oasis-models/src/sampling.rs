//! Choosing the next token from logits.

use oasis_core::sampling::SamplingParams;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter out of range.
    #[error("sampling.{key}: expected {expected}, found {found} (hint: temperature 0 is greedy, top_p 1 keeps all)")]
    InvalidParameter {
        /// The parameter.
        key: &'static str,
        /// Its range.
        expected: &'static str,
        /// Its value.
        found: f32,
    },
    /// Every logit is NaN or negative infinity, or there are none.
    #[error(
        "logits: expected a number among {0}, found none (hint: the arithmetic overflowed, or the weights are damaged)"
    )]
    NoCandidate(usize),
}

/// Chooses tokens; owns the state of the random numbers.
///
/// The same parameters and the same logits give the same tokens on every machine: numbers come from ChaCha8, and
/// exponentials are computed in software, in f64.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    random: ChaCha8Rng,
    candidates: Vec<(f32, u32)>,
    weights: Vec<f64>,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    ///
    /// # Errors
    /// [`SamplingError::InvalidParameter`] for a negative or non-finite temperature, or `top_p` outside `0..=1`.
    pub fn new(params: SamplingParams) -> Result<Self, SamplingError> {
        let SamplingParams { temperature, top_p, seed, .. } = params;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            let expected = "a finite number of at least 0";
            return Err(SamplingError::InvalidParameter { key: "temperature", expected, found: temperature });
        }
        if !(0.0..=1.0).contains(&top_p) {
            let expected = "a number from 0 to 1";
            return Err(SamplingError::InvalidParameter { key: "top_p", expected, found: top_p });
        }
        let random = ChaCha8Rng::seed_from_u64(seed);
        Ok(Self { params, random, candidates: Vec::new(), weights: Vec::new() })
    }

    /// 32-bit words drawn from the random sequence so far.
    pub fn words_drawn(&self) -> u64 {
        // A request draws two words a token: 64 bits hold any number of them.
        self.random.get_word_pos() as u64
    }

    /// Goes on where a sampler of the same parameters was after so many words.
    pub fn skip_to(&mut self, words: u64) {
        self.random.set_word_pos(words.into());
    }

    /// The next token id for `logits` `[vocab]`. NaN is never chosen.
    ///
    /// # Errors
    /// [`SamplingError::NoCandidate`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let best = greedy(logits)?;
        let SamplingParams { temperature, top_p, top_k, .. } = self.params;
        if temperature == 0.0 || top_k == 1 || logits[best as usize] == f32::INFINITY {
            return Ok(best);
        }
        self.candidates.clear();
        let usable = logits.iter().zip(0..).filter(|(logit, _)| **logit > f32::NEG_INFINITY);
        self.candidates.extend(usable.map(|(&logit, id)| (logit, id)));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, descending);
            self.candidates.truncate(top_k);
        }
        // The order decides which token a random number means: never that of the selection above.
        if top_p < 1.0 {
            self.candidates.sort_unstable_by(descending);
        } else {
            self.candidates.sort_unstable_by_key(|&(_, id)| id);
        }
        let max = f64::from(logits[best as usize]);
        let weight = |logit: f32| libm::exp((f64::from(logit) - max) / f64::from(temperature));
        self.weights.clear();
        self.weights.extend(self.candidates.iter().map(|&(logit, _)| weight(logit)));
        if top_p < 1.0 {
            self.keep_nucleus(f64::from(top_p));
        }
        Ok(self.draw())
    }

    /// Cuts the candidates, most probable first, once their weights reach the share `top_p`; at least one stays.
    fn keep_nucleus(&mut self, top_p: f64) {
        let limit = top_p * self.weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let enough = self.weights.iter().position(|weight| {
            sum += weight;
            sum >= limit
        });
        self.weights.truncate(enough.map_or(self.weights.len(), |last| last + 1));
    }

    /// Draws a candidate with the probability of its weight.
    fn draw(&mut self) -> u32 {
        let total: f64 = self.weights.iter().sum();
        // 53 random bits: a uniform number below 1.
        let uniform = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut rest = uniform * total;
        let mut chosen = 0;
        for (index, &weight) in self.weights.iter().enumerate() {
            if weight > 0.0 {
                chosen = index;
                if rest < weight {
                    break;
                }
            }
            rest -= weight;
        }
        self.candidates[chosen].1
    }
}

/// Larger logits first, the lower id among equals.
fn descending(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The id of the largest logit, the lowest among equals; NaN and negative infinity are never chosen.
///
/// # Errors
/// [`SamplingError::NoCandidate`].
pub fn greedy(logits: &[f32]) -> Result<u32, SamplingError> {
    let mut best: Option<(f32, u32)> = None;
    for (&logit, id) in logits.iter().zip(0..) {
        if logit > best.map_or(f32::NEG_INFINITY, |(best, _)| best) {
            best = Some((logit, id));
        }
    }
    best.map(|(_, id)| id).ok_or(SamplingError::NoCandidate(logits.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        Sampler::new(SamplingParams { temperature, top_p, top_k, seed }).unwrap()
    }

    fn counts(mut sampler: Sampler, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_logits_and_never_nan() {
        assert_eq!(greedy(&[1.0, f32::NAN, 3.0, 3.0]), Ok(2));
        assert_eq!(greedy(&[-0.0, 0.0]), Ok(0));
        assert_eq!(greedy(&[f32::INFINITY, f32::NAN]), Ok(0));
        assert_eq!(greedy(&[f32::NAN, f32::NEG_INFINITY]), Err(SamplingError::NoCandidate(2)));
        assert_eq!(greedy(&[]), Err(SamplingError::NoCandidate(0)));
        assert_eq!(sampler(0.0, 1.0, 0, 7).sample(&[0.0, 2.0, 2.0]), Ok(1));
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let probabilities = [0.5_f32, 0.3, 0.15, 0.05];
        let logits = probabilities.map(f32::ln);
        for (temperature, expected) in [(1.0, probabilities), (0.5, [0.6849, 0.2466, 0.0616, 0.0068])] {
            let draws = 40_000;
            let counts = counts(sampler(temperature, 1.0, 0, 1), &logits, draws);
            for (count, p) in counts.iter().zip(expected) {
                let deviation = (draws as f32 * p * (1.0 - p)).sqrt();
                assert!((*count as f32 - draws as f32 * p).abs() < 5.0 * deviation, "{counts:?}");
            }
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.05_f32, 0.5, 0.15, 0.3].map(f32::ln);
        let kept = |counts: Vec<usize>| counts.iter().map(|&count| count > 0).collect::<Vec<_>>();
        assert_eq!(kept(counts(sampler(1.0, 1.0, 2, 3), &logits, 500)), [false, true, false, true]);
        assert_eq!(kept(counts(sampler(1.0, 0.79, 0, 3), &logits, 500)), [false, true, false, true]);
        assert_eq!(kept(counts(sampler(1.0, 0.9, 0, 3), &logits, 500)), [false, true, true, true]);
        assert_eq!(kept(counts(sampler(1.0, 0.0, 0, 3), &logits, 100)), [false, true, false, false]);
        assert_eq!(kept(counts(sampler(1.0, 0.9, 1, 3), &logits, 100)), [false, true, false, false]);
    }

    #[test]
    fn equal_logits_at_the_edge_of_top_k_keep_the_lowest_ids() {
        let drawn = counts(sampler(1.0, 1.0, 2, 9), &[1.0; 6], 200);
        assert!(drawn[0] > 0 && drawn[1] > 0 && drawn[2..].iter().all(|&count| count == 0), "{drawn:?}");
    }

    #[test]
    fn a_seed_gives_the_same_tokens_always() {
        let logits: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32) / 10.0).collect();
        let draw = |seed| {
            let mut sampler = sampler(0.8, 0.95, 40, seed);
            (0..12).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(42), draw(42));
        assert_ne!(draw(42), draw(43));
    }

    #[test]
    fn a_sampler_goes_on_where_another_was() {
        let logits: Vec<f32> = (0..50).map(|i| ((i * 37 % 50) as f32) / 10.0).collect();
        for drawn in [0, 1, 7] {
            let mut first = sampler(0.8, 0.95, 40, 42);
            for _ in 0..drawn {
                first.sample(&logits).unwrap();
            }
            let mut second = sampler(0.8, 0.95, 40, 42);
            second.skip_to(first.words_drawn());
            for _ in 0..20 {
                assert_eq!(first.sample(&logits), second.sample(&logits));
            }
        }
    }

    #[test]
    fn nan_and_infinities_are_never_drawn() {
        let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
        let drawn = counts(sampler(1.0, 0.9, 3, 5), &logits, 200);
        assert!(drawn[0] == 0 && drawn[2] == 0 && drawn[1] > 0 && drawn[3] > 0, "{drawn:?}");
        assert_eq!(sampler(1.0, 1.0, 0, 5).sample(&[0.0, f32::INFINITY]), Ok(1));
    }

    #[test]
    fn impossible_parameters_are_refused() {
        for (temperature, top_p) in [(-1.0, 1.0), (f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, 1.5), (1.0, f32::NAN)] {
            let params = SamplingParams { temperature, top_p, ..SamplingParams::default() };
            assert!(matches!(Sampler::new(params), Err(SamplingError::InvalidParameter { .. })));
        }
    }
}
