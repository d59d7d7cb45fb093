//! Replay: the rules of selection applied to what was recorded.

use crate::error::{CliError, CliResult};
use crate::replay::link::{LinkClock, LinkModel};
use crate::replay::recording::{Counts, Recording, Selection};
use crate::text::columns;
use oasis_core::ids::{BlockId, KvHead, LayerId, Step};
use oasis_core::pipeline::{self, SelectMember};
use oasis_core::policy::{LinkRate, QuerySource, Selector};
use oasis_core::working_set::{RankedBlock, Ranking, WorkingSet};
use serde::Serialize;
use std::collections::HashMap;
use std::time::Duration;

/// What one policy did with a recording.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Replayed {
    /// Policy.
    pub policy: String,
    /// Blocks of a KV head on the device, K.
    pub budget_blocks: usize,
    /// Most admissions a KV head and step, C.
    pub cap: usize,
    /// Wanted entries over all selections but those of first working sets.
    pub wanted: u64,
    /// Those that were on the device already.
    pub hits: u64,
    /// Those that were not: admitted or deferred.
    pub misses: u64,
    /// Hits as a share of what was wanted.
    pub hit_rate: f64,
    /// Entries of completed tail blocks that were kept, which cross no link.
    pub promoted: u64,
    /// Entries of first working sets that crossed the link.
    pub filled: u64,
    /// Entries that the selector let in.
    pub admitted: u64,
    /// Wanted entries that were left outside.
    pub deferred: u64,
    /// Bytes of the admitted entries.
    pub link_bytes: u64,
    /// The same a decode step.
    pub link_bytes_per_step: f64,
    /// Microseconds a step for which a modelled link is busy; absent without a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_busy_us_per_step: Option<f64>,
    /// Microseconds a step in which the foreground waits for a modelled link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_us_per_step: Option<f64>,
    /// Hit rate of each layer; 0 where nothing was selected.
    pub layers: Vec<f64>,
}

/// Replays with a selector, a budget of at most the recorded one, and a link: without a model the selector hears of what
/// was measured. `each` receives what every member of every selection came to.
///
/// # Errors
/// When the selector panics or breaks its obligations.
pub fn replay(
    recording: &Recording,
    selector: &mut dyn Selector,
    budget: usize,
    source: QuerySource,
    link: Option<LinkModel>,
    mut each: impl FnMut(&Selection, usize, Counts),
) -> CliResult<Replayed> {
    let geometry = recording.geometry;
    let cap = selector.cap(budget).min(budget);
    let mut clock = link.map(|model| LinkClock::new(model, source, recording));
    let mut sets: HashMap<(u32, u32), WorkingSet> = HashMap::new();
    let mut of_layers = vec![(0, 0); geometry.layers];
    let (mut total, mut promoted) = (Counts::default(), 0);
    for selection in &recording.selections {
        let want = ranking(recording, selection, budget);
        let mut held: Vec<WorkingSet> = (selection.members.iter())
            .map(|member| {
                let prompt = recording.requests[member.request as usize].prompt as usize;
                let slots = budget.min(recording.max_blocks(member.request));
                // A GPU fills the working set of a short prompt too; the CPU leaves its blocks where they are.
                let first = || match member.live.filled {
                    0 => WorkingSet::of_prompt(geometry.kv_heads, slots, geometry.full_blocks(prompt)),
                    _ => WorkingSet::new(geometry.kv_heads, slots),
                };
                sets.remove(&(member.request, selection.layer)).unwrap_or_else(first)
            })
            .collect();
        let mut members: Vec<SelectMember<'_>> = (held.iter_mut().zip(&selection.members))
            .map(|(set, member)| SelectMember { set, completed: member.completed.map(BlockId) })
            .collect();
        let rate = match link {
            Some(model) => Some(model.rate(geometry.entry_bytes())),
            None => selection.link.map(|(entry, interval)| LinkRate {
                entry: Duration::from_nanos(entry),
                interval: Duration::from_nanos(interval),
            }),
        };
        let (layer, step) = (LayerId(selection.layer), Step(selection.step));
        let selected = pipeline::select(selector, cap, layer, step, &want, rate, &mut members)
            .map_err(|error| CliError::Failure(format!("layer {layer} of step {step}: {error}")))?;
        let mut crossing = 0;
        for (index, mut selected) in selected.into_iter().enumerate() {
            promoted += selected.promotions.len() as u64;
            if let Some(block) = selection.members[index].completed {
                selected.take_completed(BlockId(block));
            }
            let counts = Counts {
                filled: selected.filled() as u64,
                admitted: selected.admitted() as u64,
                deferred: selected.deferred as u64,
            };
            crossing += counts.filled + counts.admitted;
            total += counts;
            if !selected.is_fill {
                let heads = (0..geometry.kv_heads).map(|head| want.head(index, KvHead::from(head)).len() as u64);
                let (wanted, hits) = &mut of_layers[layer.index()];
                let new: u64 = heads.sum();
                *wanted += new;
                *hits += new - counts.admitted - counts.deferred;
            }
            each(selection, index, counts);
        }
        if let Some(clock) = &mut clock {
            clock.layer(layer.index(), crossing);
        }
        for (set, member) in held.into_iter().zip(&selection.members) {
            sets.insert((member.request, selection.layer), set);
        }
    }
    Ok(Replayed { budget_blocks: budget, cap, promoted, ..Replayed::of(recording, total, &of_layers, clock.as_ref()) })
}

/// What a selection wants of a budget that may be smaller than the recorded one: the best of it.
fn ranking(recording: &Recording, selection: &Selection, budget: usize) -> Ranking {
    let mut want = Ranking::new(selection.members.len(), recording.geometry.kv_heads);
    for (index, member) in selection.members.iter().enumerate() {
        for (head, wanted) in member.heads.iter().enumerate() {
            let best = wanted.iter().take(budget);
            let ranked = best.map(|&(block, score)| RankedBlock { block: BlockId(block), score }).collect();
            want.set(index, KvHead::from(head), ranked);
        }
    }
    want
}

impl Replayed {
    /// The recorded run itself.
    pub fn live(recording: &Recording, cap: usize) -> Self {
        let mut of_layers = vec![(0, 0); recording.geometry.layers];
        let mut total = Counts::default();
        for selection in &recording.selections {
            for member in &selection.members {
                total += member.live;
                if member.live.filled == 0 {
                    let new: u64 = member.heads.iter().map(|wanted| wanted.len() as u64).sum();
                    let (wanted, hits) = &mut of_layers[selection.layer as usize];
                    *wanted += new;
                    *hits += new - member.live.admitted - member.live.deferred;
                }
            }
        }
        let budget_blocks = recording.budget as usize;
        Self { policy: "the run".to_owned(), budget_blocks, cap, ..Self::of(recording, total, &of_layers, None) }
    }

    fn of(recording: &Recording, total: Counts, of_layers: &[(u64, u64)], clock: Option<&LinkClock>) -> Self {
        let (wanted, hits) = of_layers.iter().fold((0, 0), |(w, h), (wanted, hits)| (w + wanted, h + hits));
        let share = |hits: u64, wanted: u64| hits as f64 / wanted.max(1) as f64;
        let link_bytes = total.admitted * recording.geometry.entry_bytes() as u64;
        let steps = recording.steps.max(1) as f64;
        Self {
            wanted,
            hits,
            misses: wanted - hits,
            hit_rate: share(hits, wanted),
            filled: total.filled,
            admitted: total.admitted,
            deferred: total.deferred,
            link_bytes,
            link_bytes_per_step: link_bytes as f64 / steps,
            link_busy_us_per_step: clock.map(|clock| clock.busy / steps * 1e6),
            wait_us_per_step: clock.map(|clock| clock.waited / steps * 1e6),
            layers: of_layers.iter().map(|(wanted, hits)| share(*hits, *wanted)).collect(),
            ..Self::default()
        }
    }
}

/// The replays as a table.
pub fn render(rows: &[Replayed]) -> String {
    let has_clock = rows.iter().any(|row| row.wait_us_per_step.is_some());
    let head = ["policy", "K", "C", "hit rate", "hits", "misses", "admitted", "deferred", "filled", "KiB/step"];
    let mut head = head.map(str::to_owned).to_vec();
    if has_clock {
        head.extend(["link us/step", "wait us/step"].map(str::to_owned));
    }
    let mut lines = vec![head];
    for row in rows {
        let mut cells = vec![
            row.policy.clone(),
            row.budget_blocks.to_string(),
            row.cap.to_string(),
            format!("{:.4}", row.hit_rate),
        ];
        cells.extend([row.hits, row.misses, row.admitted, row.deferred, row.filled].map(|count| count.to_string()));
        cells.push(format!("{:.0}", row.link_bytes_per_step / 1024.0));
        if has_clock {
            let times = [row.link_busy_us_per_step, row.wait_us_per_step];
            cells.extend(times.map(|time| time.map_or_else(|| "-".to_owned(), |time| format!("{time:.1}"))));
        }
        lines.push(cells);
    }
    let mut text = columns(&lines).join("\n");
    text.push('\n');
    text
}
