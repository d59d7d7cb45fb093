//! One policy whose decode steps are looked at from inside, on whichever device.

use crate::assemble::{self, Model, Policies};
use crate::error::{CliError, CliResult};
use crate::eval::device::{Cpu, Device};
use crate::eval::running::{REQUEST, Running, Traffic};
use crate::eval::setting::{Contender, Setting};
use crate::eval::window::{Window, longest};
use oasis_core::config::{Budget, DeviceKind, Resolved};
use oasis_core::executor::{DecodeRow, Executor, ExecutorInfo, ExecutorStats};
use oasis_core::ids::TokenId;
use oasis_core::observer::StepObserver;
use oasis_core::pipeline::Tracer;
use oasis_core::policy::Summarizer;
use oasis_cuda::executor::{CudaExecutor, CudaOptions};
use oasis_models::cpu::CpuExecutor;
use std::sync::Arc;

/// A policy, found to be one that its device can show.
pub struct Plan {
    resolved: Resolved,
    policies: PlannedPolicies,
}

enum PlannedPolicies {
    Cpu(Policies),
    Cuda(Box<CudaOptions>, Arc<dyn Summarizer>),
}

impl Plan {
    /// The configured policy. Reads no weights.
    ///
    /// # Errors
    /// When a setting is wrong, or asks for something that the device does not run or show.
    pub fn new(setting: &Setting<'_>) -> CliResult<Self> {
        Self::resolved(setting.of(&Contender::configured())?, setting.model)
    }

    /// Another policy on the same device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(setting: &Setting<'_>, contender: &Contender) -> CliResult<Self> {
        let plan = || Self::resolved(setting.of(contender)?, setting.model);
        plan().map_err(|error| error.of(contender.name()))
    }

    fn resolved(resolved: Resolved, model: &Model) -> CliResult<Self> {
        let policies = match resolved.config.device.kind {
            DeviceKind::Cpu => PlannedPolicies::Cpu(assemble::build_policies(&resolved, model)?),
            DeviceKind::Cuda => {
                let spec = model.checkpoint.spec();
                let options = assemble::cuda::observed_options(&resolved, spec, model.head.is_some())?;
                let summarizer = assemble::cuda::host_policies(&resolved.config, spec)?.summarizer;
                PlannedPolicies::Cuda(Box::new(options), summarizer.into())
            }
        };
        Ok(Self { resolved, policies })
    }

    /// Whether the policy is dense decoding.
    pub fn is_dense(&self) -> bool {
        self.resolved.config.kv.budget_blocks == Budget::All
    }

    /// Starts an executor on `device`, loaded for the same setting, for `windows`.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn start<'a>(self, device: &'a Device<'_>, windows: &[Window]) -> CliResult<Observed<'a>> {
        let config = &self.resolved.config;
        match (self.policies, device) {
            (PlannedPolicies::Cpu(policies), Device::Cpu(cpu)) => {
                let summarizer = policies.summarizer.clone();
                let executor = assemble::start_executor(config, cpu.weights.clone(), policies, Tracer::default())?;
                Ok(Observed { executor: Shown::Cpu(cpu, Box::new(executor)), summarizer })
            }
            (PlannedPolicies::Cuda(options, summarizer), Device::Cuda(cuda)) => {
                let executor = cuda.start(config, *options, longest(windows).max(1))?;
                Ok(Observed { executor: Shown::Cuda(Box::new(executor)), summarizer })
            }
            _ => unreachable!("the plan and the device are of one setting"),
        }
    }
}

/// An executor that shows its steps.
pub struct Observed<'a> {
    executor: Shown<'a>,
    /// Scores queries as the executor does.
    pub summarizer: Arc<dyn Summarizer>,
}

enum Shown<'a> {
    Cpu(&'a Cpu<'a>, Box<CpuExecutor>),
    Cuda(Box<CudaExecutor>),
}

impl Observed<'_> {
    fn executor(&self) -> &dyn Executor {
        match &self.executor {
            Shown::Cpu(_, executor) => &**executor,
            Shown::Cuda(executor) => &**executor,
        }
    }

    /// Facts that do not change.
    pub fn info(&self) -> &ExecutorInfo {
        self.executor().info()
    }

    /// Counters so far.
    pub fn stats(&self) -> ExecutorStats {
        self.executor().stats()
    }

    /// Whether a token other than the draft token can run beside it, seen by the observer only.
    pub fn runs_probes(&self) -> bool {
        matches!(self.executor, Shown::Cpu(..))
    }

    /// Sets or removes the observer.
    ///
    /// # Errors
    /// None that is expected: the executor was started to be observed.
    pub fn set_observer(&mut self, observer: Option<Box<dyn StepObserver>>) -> CliResult {
        match &mut self.executor {
            Shown::Cpu(_, executor) => executor.set_observer(observer),
            Shown::Cuda(executor) => executor.set_observer(observer)?,
        }
        Ok(())
    }

    /// Reads a window's context.
    fn read(&mut self, window: &Window) -> CliResult<Running<'_>> {
        let tokens = window.forced.len();
        match &mut self.executor {
            Shown::Cpu(cpu, executor) => Running::resume(executor, &cpu.read(&window.context), tokens),
            Shown::Cuda(executor) => Running::read(&mut **executor, &window.context, tokens),
        }
    }

    /// Decodes along a window.
    ///
    /// # Errors
    /// When there is no room for it, or the request fails.
    pub fn follow(&mut self, window: &Window) -> CliResult<Traffic> {
        window.follow(self.read(window)?, |_| Ok(()))
    }

    /// The same with a draft head; `each` is told after a step whether it guessed the next token, which runs as a probe in
    /// that step where the device runs probes.
    ///
    /// # Errors
    /// As [`follow`](Self::follow).
    pub fn follow_drafting(&mut self, window: &Window, mut each: impl FnMut(bool)) -> CliResult {
        self.read(window)?;
        for pair in window.forced.windows(2) {
            each(self.step(pair[0], pair[1])?);
        }
        match &mut self.executor {
            Shown::Cpu(_, executor) => executor.release(REQUEST),
            Shown::Cuda(executor) => executor.release(REQUEST),
        }
        Ok(())
    }

    /// Runs `token`; gives whether the draft head guessed `next`.
    fn step(&mut self, token: TokenId, next: TokenId) -> CliResult<bool> {
        let rows = [DecodeRow { request: REQUEST, token }];
        let said = match &mut self.executor {
            Shown::Cpu(_, executor) => executor.decode_with_probes(&rows, &[vec![next]]).remove(0),
            Shown::Cuda(executor) => executor.decode(&rows)?.remove(0),
        };
        said.map_err(|error| CliError::Failure(error.to_string()))?;
        let guess = match &self.executor {
            Shown::Cpu(_, executor) => executor.draft(REQUEST).map(|(_, guess)| guess),
            Shown::Cuda(executor) => executor.draft_guess(REQUEST)?,
        };
        Ok(guess == Some(next))
    }
}
