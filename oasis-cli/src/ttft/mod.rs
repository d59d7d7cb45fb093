//! A model of the time to the first token of two nodes, with part of the prompt in a prefix cache (the paper's Fig. 15):
//! the missed part is read, then the cache crosses, all of it or what the first decode step chose.

mod measured;

pub use measured::{KvShape, Measured, PrefillTime};

use crate::sweep::{Chart, Plot, Row, Table};
use clap::ValueEnum;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What is read of a prompt of which a part is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Missed {
    /// The last tokens, which attend to all before them: T(n) - T(hit n)
    Suffix,
    /// The missed share of the whole prompt's time, as the paper counts: (1 - hit) T(n)
    Share,
}

/// One point.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ttft {
    /// Tokens of the prompt.
    pub context: u64,
    /// Share of them that a prefix cache has, 0 to 1.
    pub hit_rate: f64,
    /// Link between the nodes, 10^9 bits a second.
    pub link_gbps: f64,
    /// Seconds to read what is missed.
    pub prefill_s: f64,
    /// Bytes that cross when everything does.
    pub full_bytes: f64,
    /// Bytes that cross when the first step's choice does.
    pub partial_bytes: f64,
    /// Time to the first token, full transfer.
    pub ttft_full_s: f64,
    /// Time to the first token, partial transfer.
    pub ttft_partial_s: f64,
    /// How many times shorter partial transfer makes it.
    pub speedup: f64,
}

/// Seconds of a prompt of n tokens: `linear` n + `quadratic` n^2, what projections and attention cost.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Prefill {
    linear: f64,
    quadratic: f64,
}

impl Prefill {
    /// Through one or two measured times, else the nearest to all by their relative errors. A straight line where the
    /// curve would fall below twice the longest prompt.
    fn fit(times: &[PrefillTime]) -> Self {
        // Of t / n over n: a straight line, each point weighed by (n / t)^2.
        let points = times.iter().map(|&PrefillTime { tokens, seconds }| {
            let n = tokens as f64;
            (n, seconds / n, (n / seconds).powi(2))
        });
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            points.clone().map(|(n, rate, weight)| weight * of(n, rate)).sum()
        };
        let (w, wn, wr) = (sum(&|_, _| 1.0), sum(&|n, _| n), sum(&|_, rate| rate));
        let (mean, mean_rate) = (wn / w, wr / w);
        let spread = sum(&|n, _| (n - mean).powi(2));
        let together = sum(&|n, rate| (n - mean) * (rate - mean_rate));
        let quadratic = if spread > 0.0 { together / spread } else { 0.0 };
        let linear = mean_rate - quadratic * mean;
        let longest = times.last().map_or(0.0, |time| time.tokens as f64);
        match linear >= 0.0 && linear + 4.0 * quadratic * longest >= 0.0 {
            true => Self { linear, quadratic },
            false => Self { linear: mean_rate, quadratic: 0.0 },
        }
    }

    fn seconds(self, tokens: f64) -> f64 {
        (self.linear + self.quadratic * tokens) * tokens
    }
}

impl Measured {
    /// Bytes of one block of all layers.
    fn block_bytes(&self) -> f64 {
        let KvShape { layers, kv_heads, head_dim, element_bytes, block_tokens, .. } = self.kv;
        [layers, kv_heads, head_dim, element_bytes, block_tokens, 2].map(|size| size as f64).iter().product()
    }

    /// Bytes of a prompt's summaries and of the draft head's KV, which cross either way.
    fn state_bytes(&self, context: f64) -> f64 {
        let KvShape { layers, block_tokens, summary_rows, draft_layers, .. } = self.kv;
        let blocks = context / block_tokens as f64;
        // A key and a value for each token of a block, against rows of a key's length.
        let summaries = self.block_bytes() * summary_rows as f64 / (2 * block_tokens) as f64;
        blocks * (summaries + self.block_bytes() * draft_layers as f64 / layers as f64)
    }

    /// Blocks of a layer that the first step's choice has: between two measured lengths on the straight line, beyond them
    /// as at the nearest, and no more than there are.
    fn union_blocks(&self, context: f64) -> f64 {
        let after = self.union.partition_point(|size| (size.tokens as f64) < context);
        let blocks = match (after.checked_sub(1).map(|before| self.union[before]), self.union.get(after)) {
            (Some(a), Some(b)) => {
                let place = (context - a.tokens as f64) / (b.tokens - a.tokens) as f64;
                a.blocks + place * (b.blocks - a.blocks)
            }
            (Some(only), None) => only.blocks,
            (None, only) => only.map_or(0.0, |size| size.blocks),
        };
        blocks.min(context / self.kv.block_tokens as f64)
    }

    /// The model at one point: `context` of at least a token, `hit_rate` of 0 to 1, a link of more than nothing.
    pub fn at(&self, context: u64, hit_rate: f64, link_gbps: f64, missed: Missed) -> Ttft {
        let tokens = context as f64;
        let prefill = Prefill::fit(&self.prefill);
        let prefill_s = match missed {
            Missed::Suffix => prefill.seconds(tokens) - prefill.seconds(tokens * hit_rate),
            Missed::Share => (1.0 - hit_rate) * prefill.seconds(tokens),
        };
        let state = self.state_bytes(tokens);
        let full_bytes = tokens / self.kv.block_tokens as f64 * self.block_bytes() + state;
        let partial_bytes = self.union_blocks(tokens) * self.block_bytes() + state;
        let ttft = |bytes: f64| prefill_s + self.latency_ms / 1e3 + bytes * 8.0 / (link_gbps * 1e9);
        let (ttft_full_s, ttft_partial_s) = (ttft(full_bytes), ttft(partial_bytes));
        let speedup = ttft_full_s / ttft_partial_s;
        Ttft {
            context,
            hit_rate,
            link_gbps,
            prefill_s,
            full_bytes,
            partial_bytes,
            ttft_full_s,
            ttft_partial_s,
            speedup,
        }
    }
}

/// Aligned lines with a heading.
pub fn render(measured: &Measured, points: &[Ttft]) -> String {
    let heading =
        ["context", "hit rate", "link", "prefill", "full", "partial", "TTFT full", "TTFT partial", "full / partial"];
    let gib = |bytes: f64| format!("{:.2} GiB", bytes / f64::from(1 << 30));
    let row = |point: &Ttft| {
        let &Ttft { context, hit_rate, link_gbps, prefill_s, full_bytes, partial_bytes, .. } = point;
        vec![
            context.to_string(),
            format!("{:.0}%", hit_rate * 100.0),
            format!("{link_gbps} Gbps"),
            format!("{prefill_s:.3} s"),
            gib(full_bytes),
            gib(partial_bytes),
            format!("{:.3} s", point.ttft_full_s),
            format!("{:.3} s", point.ttft_partial_s),
            format!("{:.2} x", point.speedup),
        ]
    };
    let rows: Vec<Vec<String>> =
        std::iter::once(heading.map(str::to_owned).to_vec()).chain(points.iter().map(row)).collect();
    format!("{}\n\n{}\n", measured.about, crate::text::columns(&rows).join("\n"))
}

/// How many times shorter the time is over the hit rate, a line for each context and link, as SVG; `None` where there
/// are no points.
pub fn draw(measured: &Measured, points: &[Ttft]) -> Option<String> {
    let (x, y) = ("hit rate", "full / partial");
    let row = |point: &Ttft| Row {
        command: String::new(),
        labels: BTreeMap::from([
            ("tokens".to_owned(), point.context.to_string()),
            ("Gbps".to_owned(), point.link_gbps.to_string()),
        ]),
        figures: BTreeMap::from([(x.to_owned(), point.hit_rate), (y.to_owned(), point.speedup)]),
        unknown: BTreeSet::new(),
        circumstances: Vec::new(),
    };
    let plot = Plot {
        name: String::new(),
        title: Some(format!("Time to the first token: {}", measured.about)),
        command: None,
        x: Some(x.to_owned()),
        y: y.to_owned(),
    };
    Some(Chart::new(&Table { rows: points.iter().map(row).collect() }, &plot)?.draw())
}

#[cfg(test)]
mod tests;
