//! Recording: what a run wants at every step.

use crate::error::CliResult;
use crate::eval::device::Progress;
use crate::eval::observed::Observed;
use crate::eval::window::Window;
use crate::replay::recording::{Counts, Member, Recording, Request, Selection};
use oasis_core::ids::KvHead;
use oasis_core::observer::{SelectionView, StepObserver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Selections so far, and which request is running.
#[derive(Default)]
struct Recorded {
    request: u32,
    selections: Vec<Selection>,
}

/// Notes every selection.
struct Recorder(Arc<Mutex<Recorded>>);

impl StepObserver for Recorder {
    fn selected(&mut self, view: &SelectionView<'_>) {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let request = recorded.request;
        let members = view.members.iter().enumerate().map(|(index, member)| {
            let wanted = |head: usize| {
                let ranked = view.ranking.head(index, KvHead::from(head));
                ranked.iter().map(|wanted| (wanted.block.0, wanted.score)).collect()
            };
            Member {
                request,
                completed: member.completed.map(|block| block.0),
                heads: (0..view.ranking.kv_heads()).map(wanted).collect(),
                live: Counts {
                    filled: member.filled as u64,
                    admitted: member.admitted as u64,
                    deferred: member.deferred as u64,
                },
            }
        });
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let selection = Selection {
            layer: view.layer.0,
            step: view.step.0,
            link: view.link.map(|link| (nanos(link.entry), nanos(link.interval))),
            members: members.collect(),
        };
        recorded.selections.push(selection);
    }
}

/// Decodes along `windows`, one after the other, and records; `executor` decodes sparsely under the configuration
/// `config`, TOML. `progress` hears of each window.
///
/// # Errors
/// When a request fails, or Ctrl-C ends the run.
pub fn record(
    executor: &mut Observed<'_>,
    windows: &[Window],
    config: String,
    progress: &mut Progress<'_>,
) -> CliResult<Recording> {
    let recorded = Arc::new(Mutex::new(Recorded::default()));
    executor.set_observer(Some(Box::new(Recorder(recorded.clone()))))?;
    let before = executor.stats().steps;
    for (index, window) in windows.iter().enumerate() {
        crate::interrupt::check()?;
        recorded.lock().unwrap_or_else(PoisonError::into_inner).request = number(index);
        executor.follow(window)?;
        progress(index + 1, windows.len());
    }
    executor.set_observer(None)?;
    let info = executor.info();
    let requests = windows.iter().map(|window| {
        let prompt = window.context.len();
        // The last forced token is never run.
        Request { prompt: number(prompt), tokens: number(prompt + window.forced.len() - 1) }
    });
    let mut recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Recording {
        config,
        geometry: info.geometry,
        budget: number(info.budget_blocks.unwrap_or(0)),
        steps: executor.stats().steps - before,
        requests: requests.collect(),
        selections: std::mem::take(&mut recorded.selections),
    })
}

/// Everything counted here fits in memory many times over.
fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
