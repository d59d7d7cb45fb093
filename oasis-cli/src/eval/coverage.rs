//! Coverage: how much of dense attention's weight lies on what a policy has on the device, layer by layer.

use crate::error::{CliError, CliResult};
use crate::eval::device::{Cpu, Device, Progress};
use crate::eval::observed::{Observed, Plan};
use crate::eval::running::{Running, Traffic};
use crate::eval::setting::{Contender, Setting};
use crate::eval::window::{Window, describe_contexts, longest};
use crate::text::columns;
use oasis_core::config::DeviceKind;
use oasis_core::executor::Executor;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::{BlockId, KvHead};
use oasis_core::observer::{LayerKeys, LayerView, StepObserver};
use oasis_core::working_set::WorkingSet;
use serde::Serialize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What one policy covers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Coverage {
    /// Policy.
    pub policy: String,
    /// Mean over layers.
    pub mean: f64,
    /// Of the worst layer.
    pub min: f64,
    /// Mean share of the weight in each layer, over KV heads, steps and windows, 0 to 1.
    pub layers: Vec<f64>,
    /// Mean bytes over the link a decode step, first working sets left out.
    pub link_bytes_per_step: f64,
}

/// Dense attention's weights in one layer and step: `[kv_heads]` of the tail, then of each complete block, mean over the
/// group. The token itself, which is always there, is left out.
struct Weights(Vec<(f32, Vec<f32>)>);

impl Weights {
    /// Of a query `[kv_heads][group][head_dim]` over the keys of every block.
    fn of(query: &[f32], geometry: &KvGeometry, keys: &dyn LayerKeys) -> Self {
        let (head_dim, group) = (geometry.head_dim, geometry.group());
        let heads = (0..geometry.kv_heads).map(|head| {
            let keys = keys.of_head(KvHead::from(head));
            let mut mean = vec![0.0; keys.len()];
            for query in query[head * group * head_dim..][..group * head_dim].chunks_exact(head_dim) {
                let scale = 1.0 / (head_dim as f32).sqrt();
                let score = |key: &[f32]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() * scale;
                let scores: Vec<Vec<f32>> =
                    keys.iter().map(|keys| keys.chunks_exact(head_dim).map(score).collect()).collect();
                let largest = scores.iter().flatten().copied().fold(f32::NEG_INFINITY, f32::max);
                let parts: Vec<f32> =
                    scores.iter().map(|scores| scores.iter().map(|s| (s - largest).exp()).sum()).collect();
                let total: f32 = parts.iter().sum();
                mean.iter_mut().zip(parts).for_each(|(mean, part)| *mean += part / total / group as f32);
            }
            let tail = mean.pop().unwrap_or_default();
            (tail, mean)
        });
        Self(heads.collect())
    }

    /// Share of the weight on what is resident, mean over KV heads.
    fn covered(&self, set: &WorkingSet) -> f64 {
        let covered = self.0.iter().enumerate().map(|(head, (tail, blocks))| {
            let residents = set.head(KvHead::from(head)).residents();
            let held = blocks.iter().enumerate().filter(|(block, _)| residents.contains(BlockId::from(*block)));
            f64::from(*tail) + held.map(|(_, weight)| f64::from(*weight)).sum::<f64>()
        });
        covered.sum::<f64>() / self.0.len().max(1) as f64
    }
}

/// Weights of every layer of every step, in order.
type Recorded = Arc<Mutex<Vec<Weights>>>;

/// Notes the weights of an executor that has every block.
struct Recorder {
    geometry: KvGeometry,
    weights: Recorded,
}

impl StepObserver for Recorder {
    fn layer(&mut self, view: &LayerView<'_>) {
        let normal = &view.queries[..self.geometry.q_heads * self.geometry.head_dim];
        lock(&self.weights).push(Weights::of(normal, &self.geometry, view.keys));
    }
}

/// Compares what a sparse executor holds with the weights of a dense one.
struct Comparer {
    weights: Recorded,
    /// Layers seen so far.
    seen: usize,
    sums: Sums,
}

impl StepObserver for Comparer {
    fn layer(&mut self, view: &LayerView<'_>) {
        let index = self.seen;
        self.seen += 1;
        // The first step sees the full KV.
        if view.set.is_empty() {
            return;
        }
        if let Some(weights) = lock(&self.weights).get(index) {
            let (sum, count) = &mut lock(&self.sums)[view.layer.index()];
            *sum += weights.covered(view.set);
            *count += 1;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `[layers]` of summed shares and their count.
type Sums = Arc<Mutex<Vec<(f64, usize)>>>;

/// What a contender covers and moves.
type Row<'a> = (&'a str, Sums, Traffic);

/// Sums before anything was seen. Dense decoding covers everything, by definition.
fn no_sums(is_dense: bool, layers: usize) -> Sums {
    Arc::new(Mutex::new(vec![if is_dense { (1.0, 1) } else { (0.0, 0) }; layers]))
}

/// Reads the weights for the configured device, once the contenders are known to be such as a GPU can show.
///
/// # Errors
/// When one is not, or the weights cannot be read.
pub fn load<'a>(setting: &'a Setting<'a>, contenders: &[Contender]) -> CliResult<Device<'a>> {
    if setting.resolved.config.device.kind == DeviceKind::Cuda {
        contenders.iter().try_for_each(|contender| Plan::of(setting, contender).map(drop))?;
    }
    Device::load(setting, contenders)
}

/// Measures every contender along `windows`; `progress` hears of each window, on a GPU once more for each contender.
///
/// # Errors
/// When a contender's settings are wrong, a GPU cannot show it, or a request fails.
pub fn measure(
    device: &Device<'_>,
    contenders: &[Contender],
    windows: &[Window],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Coverage>> {
    let rows = match device {
        Device::Cpu(cpu) => on_cpu(cpu, contenders, windows, progress)?,
        Device::Cuda(_) => on_gpu(device, contenders, windows, progress)?,
    };
    let coverage = rows.into_iter().map(|(policy, sums, traffic)| {
        let layers: Vec<f64> = lock(&sums).iter().map(|(sum, count)| sum / *count as f64).collect();
        Coverage {
            policy: policy.to_owned(),
            mean: layers.iter().sum::<f64>() / layers.len().max(1) as f64,
            min: layers.iter().copied().fold(f64::INFINITY, f64::min),
            layers,
            link_bytes_per_step: traffic.bytes_per_step(),
        }
    });
    Ok(coverage.collect())
}

/// One contender after the other has the GPU, the first of them one whose working set has room for every block: the keys
/// that it attends to are the host's, too.
fn on_gpu<'a>(
    device: &Device<'_>,
    contenders: &'a [Contender],
    windows: &[Window],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Row<'a>>> {
    let setting = device.setting();
    let blocks = longest(windows).div_ceil(setting.resolved.config.kv.block_tokens).max(1);
    let all = format!("kv.budget_blocks={blocks},predictor.kind=last-query,selector.kind=fetch-all");
    let reference = Plan::of(setting, &Contender::parse(&all))?;
    let plans = contenders.iter().map(|contender| Plan::of(setting, contender)).collect::<CliResult<Vec<_>>>()?;
    let sparse = plans.iter().filter(|plan| !plan.is_dense()).count();
    let (mut done, total) = (0, windows.len() * (1 + sparse));
    let mut follow = |executor: &mut Observed<'_>, window: &Window, observer: Box<dyn StepObserver>| {
        crate::interrupt::check()?;
        executor.set_observer(Some(observer))?;
        let traffic = executor.follow(window)?;
        done += 1;
        progress(done, total);
        Ok::<Traffic, CliError>(traffic)
    };
    let weights: Vec<Recorded> = windows.iter().map(|_| Recorded::default()).collect();
    let mut executor = reference.start(device, windows)?;
    let geometry = executor.info().geometry;
    for (window, weights) in windows.iter().zip(&weights) {
        follow(&mut executor, window, Box::new(Recorder { geometry, weights: weights.clone() }))?;
    }
    // The next one needs its memory.
    drop(executor);
    let mut rows = Vec::new();
    for (contender, plan) in contenders.iter().zip(plans) {
        let (sums, mut traffic) = (no_sums(plan.is_dense(), geometry.layers), Traffic::default());
        if !plan.is_dense() {
            let mut executor = plan.start(device, windows)?;
            for (window, weights) in windows.iter().zip(&weights) {
                let comparer = Comparer { weights: weights.clone(), seen: 0, sums: sums.clone() };
                traffic += follow(&mut executor, window, Box::new(comparer))?;
            }
        }
        rows.push((contender.name(), sums, traffic));
    }
    Ok(rows)
}

fn on_cpu<'a>(
    cpu: &Cpu<'_>,
    contenders: &'a [Contender],
    windows: &[Window],
    progress: &mut Progress<'_>,
) -> CliResult<Vec<Row<'a>>> {
    let mut dense = cpu.executor(&Contender::dense())?;
    let geometry = dense.info().geometry;
    let mut rows = Vec::new();
    for contender in contenders {
        let executor = cpu.executor(contender)?;
        let sums = no_sums(executor.info().budget_blocks.is_none(), geometry.layers);
        rows.push((contender.name(), executor, sums, Traffic::default()));
    }
    for (done, window) in windows.iter().enumerate() {
        crate::interrupt::check()?;
        let (state, tokens) = (cpu.read(&window.context), window.forced.len());
        let weights = Recorded::default();
        dense.set_observer(Some(Box::new(Recorder { geometry, weights: weights.clone() })));
        window.follow(Running::resume(&mut dense, &state, tokens)?, |_| Ok(()))?;
        let sparse = rows.iter_mut().filter(|(_, executor, ..)| executor.info().budget_blocks.is_some());
        for (_, executor, sums, traffic) in sparse {
            let comparer = Comparer { weights: weights.clone(), seen: 0, sums: sums.clone() };
            executor.set_observer(Some(Box::new(comparer)));
            *traffic += window.follow(Running::resume(executor, &state, tokens)?, |_| Ok(()))?;
        }
        progress(done + 1, windows.len());
    }
    Ok(rows.into_iter().map(|(policy, _, sums, traffic)| (policy, sums, traffic)).collect())
}

/// The measurements as a table.
pub fn render(coverage: &[Coverage], windows: &[Window], budget: &str) -> String {
    let steps = windows.iter().map(|w| w.forced.len() - 1);
    let mut text = format!(
        "share of dense attention's weight on resident blocks and the tail; budget {budget} blocks, {}, {} steps\n\n",
        describe_contexts(windows.iter().map(|w| w.context.len())),
        steps.sum::<usize>(),
    );
    let layers = coverage.first().map_or(0, |c| c.layers.len());
    let head = ["policy".to_owned(), "mean".to_owned()].into_iter().chain((0..layers).map(|l| format!("layer {l}")));
    let mut rows = vec![head.chain(["KiB/step".to_owned()]).collect::<Vec<_>>()];
    for row in coverage {
        let shares = std::iter::once(row.mean).chain(row.layers.iter().copied());
        let cells = std::iter::once(row.policy.clone()).chain(shares.map(|share| format!("{share:.4}")));
        rows.push(cells.chain([format!("{:.0}", row.link_bytes_per_step / 1024.0)]).collect());
    }
    text.push_str(&columns(&rows).join("\n"));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use oasis_core::geometry::KvDtype;
    use oasis_core::ids::{SlotId, Step};
    use oasis_core::memory::Resident;
    use oasis_core::working_set::Admission;

    #[test]
    fn weights_add_up_to_one_and_a_part_covers_its_own() {
        let geometry =
            KvGeometry { layers: 1, q_heads: 2, kv_heads: 1, head_dim: 1, block_tokens: 1, dtype: KvDtype::F32 };
        let mut dense = Resident::new(geometry, 3, BlockId(3));
        for (block, key) in [0.0, 2.0_f32.ln(), 3.0_f32.ln()].into_iter().enumerate() {
            let (block, slot) = (BlockId::from(block), SlotId::from(block));
            dense.set.place(KvHead(0), Admission { block, slot }, Step(0));
            dense.slot_mut(KvHead(0), slot)[0] = key;
        }
        // One query head weighs keys by their exponentials, 1 : 2 : 3, the other all alike.
        let weights = Weights::of(&[1.0, 0.0], &geometry, &dense);
        assert!((weights.covered(&dense.set) - 1.0).abs() < 1e-6);
        let mut part = Resident::new(geometry, 1, BlockId(3));
        part.set.place(KvHead(0), Admission { block: BlockId(2), slot: SlotId(0) }, Step(0));
        assert!((weights.covered(&part.set) - (3.0 / 6.0 + 1.0 / 3.0) / 2.0).abs() < 1e-6);
    }
}
