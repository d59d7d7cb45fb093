//! A background stage: a thread, its queue and its failures.

use crate::pipeline::metrics::Meter;
use crate::working_set::PlanError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// The three background stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Ranks all blocks by the draft query.
    Predict,
    /// Plans admissions.
    Select,
    /// Moves entries.
    Transfer,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 3] = [Self::Predict, Self::Select, Self::Transfer];

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Predict => "predict",
            Self::Select => "select",
            Self::Transfer => "transfer",
        }
    }
}

/// How the operating system schedules the workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WorkerPriority {
    /// Like every other thread: for stages that only drive a device.
    #[default]
    Normal,
    /// Only on the last core, and there only while the foreground leaves it idle: for stages that compute on the
    /// foreground's own cores. Never late by much, since a foreground that waits for a layer leaves its cores idle.
    WhenIdle,
}

impl WorkerPriority {
    /// Applies to the calling thread; where the system has no such means, the thread stays as it is.
    fn apply(self) {
        #[cfg(target_os = "linux")]
        if self == Self::WhenIdle {
            use thread_priority::{
                NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
                thread_native_id,
            };
            // Anywhere, a stage would also take the core of a foreground thread that yields while it waits for another,
            // and then nothing of the foreground runs: on two cores 19% of a step instead of 9%.
            if let Some(last) = core_affinity::get_core_ids().and_then(|cores| cores.last().copied()) {
                core_affinity::set_for_current(last);
            }
            let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
            // A container may forbid it; the stages then compete like any thread.
            let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle);
        }
    }
}

/// Why a background stage failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StageError {
    /// A policy panicked.
    #[error("the {stage} stage panicked: {message}", stage = .stage.name())]
    Panicked {
        /// Stage.
        stage: Stage,
        /// Panic message.
        message: String,
    },
    /// A selector broke its obligations.
    #[error("the selector's plan breaks its contract: {0}")]
    Plan(#[from] PlanError),
    /// Store or transport failed.
    #[error("moving KV entries failed: {0}")]
    Transfer(String),
}

/// Runs `f`, turning a panic of a policy into an error.
pub(super) fn guarded<T>(stage: Stage, f: impl FnOnce() -> T) -> Result<T, StageError> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic| StageError::Panicked { stage, message: panic_message(&*panic) })
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    (panic.downcast_ref::<&str>().map(ToString::to_string))
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Queue of a stage, as the stage before it sees it.
pub(super) struct Queue<T> {
    stage: Stage,
    sender: Sender<T>,
    meter: Arc<Meter>,
}

impl<T> Queue<T> {
    /// Adds a task.
    pub fn send(&self, task: T) {
        self.meter.queued(self.stage);
        // Fails only while the whole pipeline is being dropped.
        let _ = self.sender.send(task);
    }
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self { stage: self.stage, sender: self.sender.clone(), meter: self.meter.clone() }
    }
}

/// A stage's thread; dropping it lets the thread finish its queue and waits for it.
pub(super) struct Worker<T> {
    queue: Option<Queue<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts a thread that runs `work` on every message in order; it says whether that did a task of the stage.
    pub fn start(
        stage: Stage,
        meter: Arc<Meter>,
        priority: WorkerPriority,
        mut work: impl FnMut(T) -> bool + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, tasks) = channel::<T>();
        let queue = Queue { stage, sender, meter: meter.clone() };
        let thread = std::thread::Builder::new().name(format!("oasis-{}", stage.name())).spawn(move || {
            priority.apply();
            for task in tasks {
                meter.dequeued(stage);
                let start = Instant::now();
                if work(task) {
                    meter.ran(stage, start.elapsed());
                }
            }
        })?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Another handle to the queue.
    pub fn sender(&self) -> Queue<T> {
        self.queue.clone().expect("a running worker has a queue")
    }

    /// Adds a task.
    pub fn send(&self, task: T) {
        if let Some(queue) = &self.queue {
            queue.send(task);
        }
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic outside `guarded` is a bug of ours; it has been printed already.
            let _ = thread.join();
        }
    }
}
