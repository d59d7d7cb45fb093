//! Measured stage times and queue depths.

use crate::pipeline::Stage;
use std::sync::Mutex;
use std::time::Duration;

/// One stage, over the life of a pipeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageMetrics {
    /// Tasks done.
    pub tasks: u64,
    /// Time spent on them.
    pub busy: Duration,
    /// Longest task.
    pub longest: Duration,
    /// Tasks waiting now.
    pub queued: usize,
    /// Most tasks that ever waited.
    pub deepest_queue: usize,
}

impl StageMetrics {
    /// Mean time of one task.
    pub fn mean(&self) -> Duration {
        self.busy.checked_div(u32::try_from(self.tasks).unwrap_or(u32::MAX)).unwrap_or_default()
    }
}

/// All stages, and what the foreground waited for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipelineMetrics {
    /// Predict stage.
    pub predict: StageMetrics,
    /// Select stage.
    pub select: StageMetrics,
    /// Transfer stage.
    pub transfer: StageMetrics,
    /// Time the foreground waited for layers.
    pub foreground_wait: Duration,
    /// How often it waited.
    pub waits: u64,
}

impl PipelineMetrics {
    /// Metrics of one stage.
    pub fn stage(&self, stage: Stage) -> &StageMetrics {
        match stage {
            Stage::Predict => &self.predict,
            Stage::Select => &self.select,
            Stage::Transfer => &self.transfer,
        }
    }
}

/// Collects metrics from all threads.
#[derive(Default)]
pub(super) struct Meter(Mutex<PipelineMetrics>);

impl Meter {
    fn update(&self, f: impl FnOnce(&mut PipelineMetrics)) {
        f(&mut self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    fn update_stage(&self, stage: Stage, f: impl FnOnce(&mut StageMetrics)) {
        self.update(|metrics| {
            f(match stage {
                Stage::Predict => &mut metrics.predict,
                Stage::Select => &mut metrics.select,
                Stage::Transfer => &mut metrics.transfer,
            })
        });
    }

    pub fn queued(&self, stage: Stage) {
        self.update_stage(stage, |s| {
            s.queued += 1;
            s.deepest_queue = s.deepest_queue.max(s.queued);
        });
    }

    pub fn dequeued(&self, stage: Stage) {
        self.update_stage(stage, |s| s.queued -= 1);
    }

    pub fn ran(&self, stage: Stage, time: Duration) {
        self.update_stage(stage, |s| {
            s.tasks += 1;
            s.busy += time;
            s.longest = s.longest.max(time);
        });
    }

    pub fn waited(&self, time: Duration) {
        self.update(|m| {
            m.foreground_wait += time;
            m.waits += 1;
        });
    }

    pub fn snapshot(&self) -> PipelineMetrics {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
