//! Choosing tokens.

use crate::rig::{Outcome, Random, Rig, name, poisoned};
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, Filter, FilterParams, Sample, SampleParams};
use oasis_cuda::measure::kernels::KernelBench;

/// How a row is sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rule {
    temperature: f32,
    top_k: i32,
    top_p: f32,
}

const GREEDY: Rule = Rule { temperature: 0.0, top_k: 0, top_p: 1.0 };

pub fn check(rig: &mut Rig) -> Outcome<()> {
    check_greedy(rig)?;
    check_padding(rig)?;
    check_support(rig)?;
    check_frequencies(rig)
}

/// What filter and sampling give.
struct Sampled {
    cuts: Vec<u64>,
    tokens: Vec<i32>,
}

/// One token a row, each row by its rule.
fn sample(rig: &Rig, logits: &[f32], rules: &[Rule], ctas: u32, filter: bool) -> Outcome<Sampled> {
    let (rows, device) = (rules.len(), &rig.device);
    let vocab = logits.len() / rows;
    let d_logits = device.upload(logits)?;
    let temperature = device.upload(&rules.iter().map(|rule| rule.temperature).collect::<Vec<_>>())?;
    let top_k = device.upload(&rules.iter().map(|rule| rule.top_k).collect::<Vec<_>>())?;
    let top_p = device.upload(&rules.iter().map(|rule| rule.top_p).collect::<Vec<_>>())?;
    let seed = device.upload(&(0..rows as u64).map(|row| rig.seed ^ row << 7).collect::<Vec<_>>())?;
    let position = device.upload(&vec![11_i32; rows])?;
    let (best, arrived) = (device.zeros::<u64>(rows)?, device.zeros::<u32>(rows)?);
    let (cut, token): (DeviceBuffer<u64>, DeviceBuffer<i32>) = (poisoned(device, rows)?, poisoned(device, rows)?);
    let params = FilterParams {
        logits: d_logits.address(),
        temperature: temperature.address(),
        top_k: top_k.address(),
        top_p: top_p.address(),
        cut: cut.address(),
        vocab: vocab as i32,
    };
    let kernel = device.load(&rig.compiler, &Filter)?;
    if filter {
        // SAFETY: all buffers have the sizes that the parameters ask for.
        unsafe { kernel.launch(&rig.stream, (rows as u32, 1), &params)? };
    }
    let params = SampleParams {
        logits: d_logits.address(),
        temperature: temperature.address(),
        cut: if filter { cut.address() } else { Address::NONE },
        seed: seed.address(),
        position: position.address(),
        best: best.address(),
        arrived: arrived.address(),
        token: token.address(),
        vocab: vocab as i32,
    };
    let kernel = device.load(&rig.compiler, &Sample)?;
    // Twice: the scratch must be as it was.
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { kernel.launch(&rig.stream, (ctas, rows as u32), &params)? };
    }
    Ok(Sampled { cuts: cut.read()?, tokens: token.read()? })
}

/// The first of the largest logits; -1 where there is no number above negative infinity.
fn greedy(row: &[f32]) -> i32 {
    let mut best = (f32::NEG_INFINITY, -1);
    row.iter().zip(0..).for_each(|(logit, id)| {
        if *logit > best.0 {
            best = (*logit, id)
        }
    });
    best.1
}

fn check_greedy(rig: &mut Rig) -> Outcome<()> {
    let value = |random: &mut Random, row: usize| match (row, random.below(9)) {
        (0, _) => f32::NAN,
        (1, _) => f32::NEG_INFINITY,
        (2, _) => 1.0,
        (3, 0) => f32::NAN,
        (4, 0) => f32::INFINITY,
        (5, choice) => {
            if choice % 2 == 0 {
                -0.0
            } else {
                0.0
            }
        }
        (6, _) => -3.0 - random.float().abs(),
        (_, choice) if row % 2 == 1 => choice as f32,
        _ => random.float(),
    };
    // Rows that begin at every remainder of 16 bytes, fewer logits than a vector, the vocabulary of Qwen3.
    for (vocab, rows) in [(50_001, 12), (50_002, 12), (3, 12), (1, 8), (151_936, 12)] {
        let logits: Vec<f32> = (0..rows * vocab).map(|i| value(&mut rig.random, i / vocab)).collect();
        let want: Vec<i32> = logits.chunks(vocab).map(greedy).collect();
        for ctas in [1, 9, Sample.ctas(rows, vocab, rig.device.facts.multiprocessors)] {
            let got = sample(rig, &logits, &vec![GREEDY; rows], ctas, false)?;
            rig.same(name::<Sample>(&format!("greedy, vocabulary {vocab} x {ctas}")), &got.tokens, &want);
        }
    }
    Ok(())
}

/// A row of padding keeps its token, and its scratch is as it was.
fn check_padding(rig: &mut Rig) -> Outcome<()> {
    let (vocab, positions) = (1_000, [4, -1, 0]);
    let rows = positions.len();
    let logits: Vec<f32> = (0..rows * vocab).map(|_| rig.random.float()).collect();
    let (d_logits, temperature) = (rig.device.upload(&logits)?, rig.device.zeros::<f32>(rows)?);
    let (seeds, position) = (rig.device.zeros::<u64>(rows)?, rig.device.upload(&positions)?);
    let (best, arrived) = (rig.device.zeros::<u64>(rows)?, rig.device.zeros::<u32>(rows)?);
    let token = rig.device.upload(&[-7_i32; 3])?;
    let kernel = rig.device.load(&rig.compiler, &Sample)?;
    let params = SampleParams {
        logits: d_logits.address(),
        temperature: temperature.address(),
        cut: Address::NONE,
        seed: seeds.address(),
        position: position.address(),
        best: best.address(),
        arrived: arrived.address(),
        token: token.address(),
        vocab: vocab as i32,
    };
    // SAFETY: all arrays have an element or a row of logits for each of the rows.
    unsafe { kernel.launch(&rig.stream, (3, rows as u32), &params)? };
    let tokens = token.read()?;
    let kept: Vec<bool> = tokens.iter().map(|token| *token == -7).collect();
    rig.same(name::<Sample>("padding keeps its token"), &kept, &[false, true, false]);
    rig.same(name::<Sample>("padding: scratch"), &best.read()?, &[0; 3]);
    Ok(())
}

/// Which tokens a rule leaves: sorted, cut, and summed up in f64.
fn support(row: &[f32], rule: Rule) -> Vec<bool> {
    let mut kept = vec![false; row.len()];
    let best = greedy(row);
    if best < 0 {
        return kept;
    }
    let largest = row[best as usize];
    if rule.temperature == 0.0 || rule.top_k == 1 || largest == f32::INFINITY {
        kept[best as usize] = true;
        return kept;
    }
    let mut order: Vec<usize> = (0..row.len()).filter(|id| row[*id] > f32::NEG_INFINITY).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    if rule.top_k > 0 {
        order.truncate(rule.top_k as usize);
    }
    if rule.top_p < 1.0 {
        let weight = |id: usize| ((f64::from(row[id]) - f64::from(largest)) / f64::from(rule.temperature)).exp();
        let limit = f64::from(rule.top_p) * order.iter().map(|id| weight(*id)).sum::<f64>();
        let mut sum = 0.0;
        let enough = order.iter().position(|id| {
            sum += weight(*id);
            sum >= limit
        });
        order.truncate(enough.map_or(order.len(), |last| last + 1));
    }
    order.into_iter().for_each(|id| kept[id] = true);
    kept
}

/// Which tokens the device's cut leaves.
fn left(row: &[f32], cut: u64) -> Vec<bool> {
    if cut == u64::MAX {
        let best = greedy(row);
        return (0..row.len()).map(|id| id as i32 == best).collect();
    }
    let position = |(logit, id): (&f32, u32)| {
        let bits = logit.to_bits();
        let order = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        *logit > f32::NEG_INFINITY && (u64::from(order) << 32 | u64::from(!id)) >= cut
    };
    row.iter().zip(0..).map(position).collect()
}

fn check_support(rig: &mut Rig) -> Outcome<()> {
    let rules: Vec<Rule> = [(0, 1.0), (1, 0.5), (2, 1.0), (40, 1.0), (40, 0.9), (1000, 0.5), (0, 0.0), (0, 0.1)]
        .into_iter()
        .chain([(0, 0.5), (0, 0.9), (0, 0.999), (0, 0.999_999), (5, 0.0), (49_999, 1.0), (1_000_000, 0.95)])
        .flat_map(|(top_k, top_p)| [0.3, 1.0, 2.5].map(|temperature| Rule { temperature, top_k, top_p }))
        .chain([GREEDY, Rule { temperature: 0.0, top_k: 5, top_p: 0.5 }])
        .collect();
    type Value = fn(&mut Random) -> f32;
    let kinds: [(&str, Value); 6] = [
        ("random", |random| random.float() * 5.0),
        ("peaked", |random| random.float().powi(5) * 0.5),
        ("few values", |random| random.below(7) as f32 - 3.0),
        ("all equal", |_| 2.5),
        ("signed zeros", |random| if random.below(2) == 0 { -0.0 } else { 0.0 }),
        ("NaN and infinity", |random| match random.below(4) {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            _ => random.float() * 3.0,
        }),
    ];
    for (kind, value) in kinds {
        for vocab in [6, 50_001] {
            let logits: Vec<f32> = (0..rules.len() * vocab).map(|_| value(&mut rig.random)).collect();
            check_rows(rig, kind, &logits, &rules)?;
        }
    }
    let logits: Vec<f32> = (0..rules.len() * 151_936).map(|_| rig.random.float() * 6.0).collect();
    check_rows(rig, "random", &logits, &rules)?;
    // Rows without a number, and with infinity.
    let rows = [[f32::NAN, f32::NEG_INFINITY, f32::NAN], [0.0, f32::INFINITY, f32::INFINITY]].concat();
    check_rows(rig, "no number, infinity", &rows, &[Rule { temperature: 1.0, top_k: 2, top_p: 0.5 }; 2])
}

fn check_rows(rig: &mut Rig, kind: &str, logits: &[f32], rules: &[Rule]) -> Outcome<()> {
    let vocab = logits.len() / rules.len();
    let got = sample(rig, logits, rules, 3, true)?;
    let again = sample(rig, logits, rules, 3, true)?;
    let mut different: Vec<Rule> = Vec::new();
    let mut outside = 0;
    for (((row, rule), cut), token) in logits.chunks(vocab).zip(rules).zip(&got.cuts).zip(&got.tokens) {
        let want = support(row, *rule);
        if left(row, *cut) != want {
            different.push(*rule);
        }
        let possible = usize::try_from(*token).map_or(!want.contains(&true), |token| want[token]);
        outside += usize::from(!possible);
    }
    rig.same(name::<Filter>(&format!("{kind}, vocabulary {vocab}: wrong sets")), &different, &[]);
    rig.same(name::<Sample>(&format!("{kind}, vocabulary {vocab}: tokens outside")), &[outside], &[0]);
    rig.same(name::<Filter>(&format!("{kind}, vocabulary {vocab}: twice the same")), &again.cuts, &got.cuts);
    Ok(())
}

/// Frequencies of drawn tokens against the softmax of what is left.
fn check_frequencies(rig: &mut Rig) -> Outcome<()> {
    let (probabilities, temperature, rows) = ([0.5_f64, 0.3, 0.15, 0.05], 0.7, 40_000);
    let row: Vec<f32> =
        probabilities.iter().map(|p| p.ln() as f32 * temperature).chain([f32::NEG_INFINITY, f32::NAN]).collect();
    for (top_k, top_p, kept) in [(0, 1.0, 4), (3, 1.0, 3), (0, 0.79, 2), (0, 0.9, 3), (3, 0.8, 2)] {
        for filter in [true, false] {
            if !filter && kept < 4 {
                continue;
            }
            let rule = Rule { temperature, top_k, top_p };
            let tokens = sample(rig, &row.repeat(rows), &vec![rule; rows], 1, filter)?.tokens;
            let count = |token: usize| tokens.iter().filter(|t| **t == token as i32).count() as f64;
            let total: f64 = probabilities[..kept].iter().sum();
            let worst =
                probabilities[..kept].iter().map(|p| p / total).enumerate().fold(0.0, |worst: f64, (token, p)| {
                    let deviation = (rows as f64 * p * (1.0 - p)).sqrt();
                    worst.max((count(token) - rows as f64 * p).abs() / deviation)
                });
            let inside: f64 = (0..kept).map(count).sum();
            let name = name::<Sample>(&format!("top_k {top_k}, top_p {top_p}, filter {filter}"));
            // Five standard deviations, and nothing else was drawn.
            rig.same(format!("{name}: frequencies"), &[worst < 5.0, inside == rows as f64], &[true, true]);
        }
    }
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let vocab = 151_936;
    let flat: fn(&mut Random) -> f32 = |random| random.float() * 5.0;
    // A bell, and a few tokens that stand out, as in a language model.
    let peaked: fn(&mut Random) -> f32 = |random| {
        let bell: f32 = (0..4).map(|_| random.float()).sum();
        if random.below(8192) == 0 { bell + 12.0 } else { bell }
    };
    for (rows, kind, value) in
        [(1, "peaked", peaked), (64, "peaked", peaked), (64, "flat", flat), (128, "peaked", peaked)]
    {
        let logits: Vec<f32> = (0..rows * vocab).map(|_| value(&mut rig.random)).collect();
        let logits = rig.device.upload(&logits)?;
        let title = format!("{rows} {kind} rows of 151,936");
        time_sample(rig, &title, &logits, rows)?;
        time_filter(rig, &title, &logits, rows)?;
    }
    Ok(())
}

fn time_sample(rig: &mut Rig, title: &str, logits: &DeviceBuffer<f32>, rows: usize) -> Outcome<()> {
    let vocab = logits.len() / rows;
    let (best, arrived) = (rig.device.zeros::<u64>(rows)?, rig.device.zeros::<u32>(rows)?);
    let (position, token) = (rig.device.zeros::<i32>(rows)?, rig.device.zeros::<i32>(rows)?);
    let (seed, cut) = (rig.device.zeros::<u64>(rows)?, rig.device.zeros::<u64>(rows)?);
    let kernel = rig.device.load(&rig.compiler, &Sample)?;
    let ctas = Sample.ctas(rows, vocab, rig.device.facts.multiprocessors);
    for (temperature, name) in [(0.0_f32, "argmax"), (0.8, "temperature")] {
        let temperature = rig.device.upload(&vec![temperature; rows])?;
        let params = SampleParams {
            logits: logits.address(),
            temperature: temperature.address(),
            cut: cut.address(),
            seed: seed.address(),
            position: position.address(),
            best: best.address(),
            arrived: arrived.address(),
            token: token.address(),
            vocab: vocab as i32,
        };
        // SAFETY: as in `sample`.
        let micros = unsafe { rig.micros(40, |_| kernel.launch(&rig.stream, (ctas, rows as u32), &params))? };
        rig.record_bytes(format!("{name}, {title} (in cache)"), micros, logits.bytes() as f64);
    }
    Ok(())
}

fn time_filter(rig: &mut Rig, title: &str, logits: &DeviceBuffer<f32>, rows: usize) -> Outcome<()> {
    let cut = rig.device.zeros::<u64>(rows)?;
    let kernel = rig.device.load(&rig.compiler, &Filter)?;
    for (name, temperature, top_k, top_p) in [
        ("nothing to do", 0.0_f32, 0_i32, 1.0_f32),
        ("top_k 40", 0.8, 40, 1.0),
        ("top_p 0.95", 0.8, 0, 0.95),
        ("top_k 40, top_p 0.95", 0.8, 40, 0.95),
    ] {
        let temperature = rig.device.upload(&vec![temperature; rows])?;
        let (top_k, top_p) = (rig.device.upload(&vec![top_k; rows])?, rig.device.upload(&vec![top_p; rows])?);
        let params = FilterParams {
            logits: logits.address(),
            temperature: temperature.address(),
            top_k: top_k.address(),
            top_p: top_p.address(),
            cut: cut.address(),
            vocab: (logits.len() / rows) as i32,
        };
        // SAFETY: as in `sample`.
        let micros = unsafe { rig.micros(20, |_| kernel.launch(&rig.stream, (rows as u32, 1), &params))? };
        rig.record(format!("filter, {title}: {name}"), micros, 0.0, "");
    }
    Ok(())
}
