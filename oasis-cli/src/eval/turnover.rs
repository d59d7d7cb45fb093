//! Turnover: how much of a choice of blocks is new from one step to the next, layer by layer.

use crate::error::CliResult;
use crate::eval::device::Progress;
use crate::eval::meter::{Chooser, share};
use crate::eval::observed::Observed;
use crate::eval::window::{Window, describe_contexts};
use crate::text::columns;
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::observer::{LayerView, SelectionView, StepObserver};
use oasis_core::policy::Aggregate;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Turnover {
    /// Blocks chosen per KV head, K.
    pub budget_blocks: usize,
    /// Contexts, tokens each.
    pub contexts: Vec<usize>,
    /// Decode steps.
    pub steps: usize,
    /// Mean over layers of the share of the normal token's own top-K that its step before did not have.
    pub exact: f64,
    /// The same of what the predictor wanted.
    pub predicted: f64,
    /// Mean over layers of the entries that crossed the link, as a share of K.
    pub admitted: f64,
    /// Of each layer: exact, predicted, admitted; 0 where there was nothing to compare.
    pub layers: Vec<[f64; 3]>,
}

/// Sums of one layer.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    exact: Mean,
    predicted: Mean,
    admitted: Mean,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn get(self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

/// Chosen blocks of each KV head, sorted.
type Choice = Vec<Vec<BlockId>>;

/// Compares choices of adjacent steps.
struct Meter {
    chooser: Chooser,
    exact: HashMap<(RequestId, LayerId), Choice>,
    predicted: HashMap<(RequestId, LayerId), Choice>,
    layers: Arc<Mutex<Vec<Sums>>>,
}

impl Meter {
    fn new(chooser: Chooser, layers: usize) -> (Self, Arc<Mutex<Vec<Sums>>>) {
        let sums = Arc::new(Mutex::new(vec![Sums::default(); layers]));
        (Self { chooser, exact: HashMap::new(), predicted: HashMap::new(), layers: sums.clone() }, sums)
    }
}

/// New blocks of each KV head as a share of its choice.
fn turned_over<'a>(before: &'a Choice, now: &'a Choice) -> impl Iterator<Item = f64> + 'a {
    before.iter().zip(now).filter(|(_, now)| !now.is_empty()).map(|(before, now)| 1.0 - share(before, now))
}

impl StepObserver for Meter {
    fn layer(&mut self, view: &LayerView<'_>) {
        // With no more blocks than the budget there is no choice.
        if view.summaries.blocks() <= self.chooser.budget {
            return;
        }
        let now = self.chooser.choose(&view.queries[..self.chooser.row()], view.summaries);
        if let Some(before) = self.exact.get(&(view.request, view.layer)) {
            let exact = &mut lock(&self.layers)[view.layer.index()].exact;
            turned_over(before, &now).for_each(|share| exact.add(share));
        }
        self.exact.insert((view.request, view.layer), now);
    }

    fn selected(&mut self, view: &SelectionView<'_>) {
        for (index, member) in view.members.iter().enumerate() {
            if member.blocks <= self.chooser.budget || member.failed {
                continue;
            }
            let heads = (0..self.chooser.kv_heads).map(|head| {
                let mut blocks: Vec<BlockId> =
                    view.ranking.head(index, KvHead::from(head)).iter().map(|ranked| ranked.block).collect();
                blocks.sort_unstable();
                blocks
            });
            let now: Choice = heads.collect();
            let wanted: usize = now.iter().map(Vec::len).sum();
            if let Some(before) = self.predicted.get(&(member.request, view.layer)) {
                let sums = &mut lock(&self.layers)[view.layer.index()];
                turned_over(before, &now).for_each(|share| sums.predicted.add(share));
                sums.admitted.add(member.admitted as f64 / wanted.max(1) as f64);
            }
            self.predicted.insert((member.request, view.layer), now);
        }
    }

    fn release(&mut self, request: RequestId) {
        self.exact.retain(|(owner, _), _| *owner != request);
        self.predicted.retain(|(owner, _), _| *owner != request);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures along `windows`; `executor` decodes sparsely with a budget of `budget`. Exact choices join a group's query
/// heads by `aggregate`.
///
/// # Errors
/// When a request fails.
pub fn measure(
    executor: &mut Observed<'_>,
    windows: &[Window],
    budget: usize,
    aggregate: Aggregate,
    progress: &mut Progress<'_>,
) -> CliResult<Turnover> {
    let geometry = executor.info().geometry;
    let chooser = Chooser::of(executor, budget, aggregate);
    let (meter, sums) = Meter::new(chooser, geometry.layers);
    executor.set_observer(Some(Box::new(meter)))?;
    for (index, window) in windows.iter().enumerate() {
        crate::interrupt::check()?;
        executor.follow(window)?;
        progress(index + 1, windows.len());
    }
    executor.set_observer(None)?;
    let layers: Vec<[f64; 3]> =
        lock(&sums).iter().map(|sums| [sums.exact.get(), sums.predicted.get(), sums.admitted.get()]).collect();
    let mean = |column: usize| layers.iter().map(|layer| layer[column]).sum::<f64>() / layers.len().max(1) as f64;
    Ok(Turnover {
        budget_blocks: budget,
        contexts: windows.iter().map(|window| window.context.len()).collect(),
        steps: windows.iter().map(|window| window.forced.len() - 1).sum(),
        exact: mean(0),
        predicted: mean(1),
        admitted: mean(2),
        layers,
    })
}

/// The measurement as a table.
pub fn render(report: &Turnover) -> String {
    let mut text = format!(
        "share of a step's top-{} that is new since the step before, and admissions as a share of K;\n\
         {}, {} steps\n\n",
        report.budget_blocks,
        describe_contexts(report.contexts.iter().copied()),
        report.steps,
    );
    let cells = |name: String, row: [f64; 3]| -> Vec<String> {
        std::iter::once(name).chain(row.iter().map(|share| format!("{share:.4}"))).collect()
    };
    let mut rows = vec![["layer", "own query", "predicted", "admitted"].map(str::to_owned).to_vec()];
    rows.extend(report.layers.iter().enumerate().map(|(layer, row)| cells(layer.to_string(), *row)));
    rows.push(cells("mean".to_owned(), [report.exact, report.predicted, report.admitted]));
    text.push_str(&columns(&rows).join("\n"));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::config::Resolved;
    use oasis_core::geometry::{HeadShape, KvDtype, KvGeometry};
    use oasis_core::ids::Step;
    use oasis_core::memory::{Resident, Summaries};

    /// Four blocks of one key each, in two dimensions; the mean of a block is its key, so that scores are dot products.
    #[test]
    fn turnover_is_counted_by_hand() {
        let geometry =
            KvGeometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 2, block_tokens: 1, dtype: KvDtype::F32 };
        let layer = oasis_core::config::Layer::assignment("test", "summarizer.kind=mean").unwrap();
        let shape = HeadShape { group: 1, head_dim: 2, block_tokens: 1 };
        let summarizer: Arc<dyn oasis_core::policy::Summarizer> =
            Resolved::new(&[layer]).unwrap().config.summarizer.build(shape).unwrap().into();
        let mut summaries = Summaries::new(&geometry, &*summarizer, 4);
        let keys = [[4.0, 0.0], [3.0, 1.0], [1.0, 3.0], [0.0, 4.0_f32]].concat();
        summaries.append(&geometry, &*summarizer, std::iter::once(&keys[..]));
        let resident = Resident::new(geometry, 2, BlockId(4));
        let chooser = Chooser { summarizer, shape, kv_heads: 1, budget: 2, aggregate: Aggregate::Sum };
        let (mut meter, sums) = Meter::new(chooser, 1);
        // The two best: blocks 0 and 1, the same, 1 and 2, then 2 and 3.
        for (step, query) in (1..).zip([[1.0, 0.0], [2.0, 0.1], [1.0, 0.9], [0.0, 1.0_f32]]) {
            meter.layer(&LayerView {
                layer: LayerId(0),
                step: Step(step),
                request: RequestId(1),
                position: 4,
                queries: &query,
                has_draft: false,
                summaries: &summaries,
                set: &resident.set,
                resident: Some(&resident),
                keys: &resident,
            });
        }
        let exact = lock(&sums)[0].exact;
        assert_eq!((exact.count, exact.sum), (3, 0.0 + 0.5 + 0.5));
        meter.release(RequestId(1));
        assert!(meter.exact.is_empty(), "the first step of the next request has none before it");
    }
}
