//! Contenders at work: each answers every prompt, in the order that suits the device.

use crate::assemble::{self, Loaded};
use crate::error::CliResult;
use crate::eval::running::Running;
use crate::eval::setting::{Contender, Setting};
use crate::eval::window::Window;
use oasis_core::config::{Config, DeviceKind};
use oasis_core::ids::TokenId;
use oasis_core::pipeline::Tracer;
use oasis_cuda::executor::{CudaExecutor, CudaOptions};
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState};
use std::sync::Arc;

/// Tokens to be read, and how many may follow.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// At least one.
    pub tokens: &'a [TokenId],
    /// Most tokens after it.
    pub new_tokens: usize,
}

/// One contender that has read one prompt.
pub struct Turn<'a> {
    /// Which contender.
    pub contender: usize,
    /// Which prompt.
    pub prompt: usize,
    /// Its request.
    pub running: Running<'a>,
}

/// Hears of turns that are over, and how many there are.
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// What contenders run on, with the weights of the model.
pub enum Device<'a> {
    /// The CPU.
    Cpu(Cpu<'a>),
    /// A GPU.
    Cuda(Cuda<'a>),
}

impl<'a> Device<'a> {
    /// Reads the weights for the configured device.
    ///
    /// # Errors
    /// When they cannot be read, or a contender asks for something that a GPU does not run.
    pub fn load(setting: &'a Setting<'a>, contenders: &[Contender]) -> CliResult<Self> {
        match setting.resolved.config.device.kind {
            DeviceKind::Cpu => Ok(Self::Cpu(Cpu::load(setting)?)),
            DeviceKind::Cuda => Ok(Self::Cuda(Cuda::load(setting, contenders)?)),
        }
    }

    /// The settings under every contender's own.
    pub fn setting(&self) -> &'a Setting<'a> {
        match self {
            Self::Cpu(cpu) => cpu.setting,
            Self::Cuda(cuda) => cuda.setting,
        }
    }

    /// Replaces the forced tokens of windows by the model's own greedy continuations, decoded densely.
    ///
    /// # Errors
    /// When there is no room for a window, a request fails, or on Ctrl-C.
    pub fn continue_greedily(&self, windows: &mut [Window]) -> CliResult {
        let contexts: Vec<Vec<TokenId>> = windows.iter().map(|window| window.context.clone()).collect();
        let prompts: Vec<Prompt<'_>> = (contexts.iter().zip(windows.iter()))
            .map(|(tokens, window)| Prompt { tokens, new_tokens: window.forced.len() })
            .collect();
        self.run(&[&Contender::dense()], &prompts, &mut |_, _| (), &mut |turn| {
            windows[turn.prompt].continue_greedily(turn.running, |_| Ok(()))?;
            Ok(())
        })
    }

    /// Gives every contender every prompt. A contender takes the prompts in order, and each prompt goes to the
    /// contenders in order.
    ///
    /// # Errors
    /// When a contender's settings are wrong, there is no room for a prompt, a request or `each` fails, or on Ctrl-C.
    pub fn run(
        &self,
        contenders: &[&Contender],
        prompts: &[Prompt<'_>],
        progress: &mut Progress<'_>,
        each: &mut dyn FnMut(Turn<'_>) -> CliResult,
    ) -> CliResult {
        let (mut done, total) = (0, contenders.len() * prompts.len());
        let mut each = |turn: Turn<'_>| {
            each(turn)?;
            done += 1;
            progress(done, total);
            Ok(())
        };
        match self {
            Self::Cpu(cpu) => cpu.run(contenders, prompts, &mut each),
            Self::Cuda(cuda) => cuda.run(contenders, prompts, &mut each),
        }
    }
}

/// The CPU: reading a prompt takes longer than all the rest, so that it is read once for all contenders.
pub struct Cpu<'a> {
    setting: &'a Setting<'a>,
    /// Weights, which executors share.
    pub weights: Arc<CpuModel>,
}

impl<'a> Cpu<'a> {
    /// Reads the weights.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn load(setting: &'a Setting<'a>) -> CliResult<Self> {
        Ok(Self { setting, weights: assemble::load_model(&setting.resolved.config, setting.model)? })
    }

    /// An executor of a contender.
    ///
    /// # Errors
    /// When a setting is wrong, or the machine gives no threads.
    pub fn executor(&self, contender: &Contender) -> CliResult<CpuExecutor> {
        let start = || {
            let resolved = self.setting.of(contender)?;
            let policies = assemble::build_policies(&resolved, self.setting.model)?;
            assemble::start_executor(&resolved.config, self.weights.clone(), policies, Tracer::default())
        };
        start().map_err(|error| error.of(contender.name()))
    }

    /// Reads a prompt.
    pub fn read(&self, prompt: &[TokenId]) -> PromptState {
        let chunk = self.setting.resolved.config.prefill_chunk();
        PromptState::read(&self.weights, prompt, chunk, &mut |_, _| ())
    }

    fn run(
        &self,
        contenders: &[&Contender],
        prompts: &[Prompt<'_>],
        each: &mut dyn FnMut(Turn<'_>) -> CliResult,
    ) -> CliResult {
        let executors = contenders.iter().map(|contender| self.executor(contender));
        let mut executors = executors.collect::<CliResult<Vec<_>>>()?;
        for (prompt, Prompt { tokens, new_tokens }) in prompts.iter().enumerate() {
            crate::interrupt::check()?;
            let state = self.read(tokens);
            for (contender, executor) in executors.iter_mut().enumerate() {
                each(Turn { contender, prompt, running: Running::resume(executor, &state, *new_tokens)? })?;
            }
        }
        Ok(())
    }
}

/// A GPU: one contender at a time has its memory, and reads for itself.
pub struct Cuda<'a> {
    setting: &'a Setting<'a>,
    weights: Box<Loaded>,
}

impl<'a> Cuda<'a> {
    /// Reads the weights, once the contenders are known to be such as a GPU runs.
    fn load(setting: &'a Setting<'a>, contenders: &[Contender]) -> CliResult<Self> {
        for contender in contenders {
            setting.cuda_options(contender).map_err(|error| error.of(contender.name()))?;
        }
        let weights = assemble::load_weights(&setting.resolved.config, setting.model)?;
        Ok(Self { setting, weights: Box::new(weights) })
    }

    /// An executor for one request of at most `longest` tokens.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn start(&self, config: &Config, mut options: CudaOptions, longest: usize) -> CliResult<CudaExecutor> {
        options.max_batch = 1;
        options.max_context = options.max_context.min(longest);
        assemble::cuda::start(config, &assemble::cuda::Weights::Loaded(&self.weights), options)
    }

    /// The same of a contender.
    fn executor(&self, contender: &Contender, longest: usize) -> CliResult<CudaExecutor> {
        let start = || {
            let (resolved, options) = self.setting.cuda_options(contender)?;
            self.start(&resolved.config, options, longest)
        };
        start().map_err(|error| error.of(contender.name()))
    }

    fn run(
        &self,
        contenders: &[&Contender],
        prompts: &[Prompt<'_>],
        each: &mut dyn FnMut(Turn<'_>) -> CliResult,
    ) -> CliResult {
        let longest = prompts.iter().map(|prompt| prompt.tokens.len() + prompt.new_tokens).max().unwrap_or(1);
        for (contender, name) in contenders.iter().enumerate() {
            let mut executor = self.executor(name, longest)?;
            for (prompt, Prompt { tokens, new_tokens }) in prompts.iter().enumerate() {
                crate::interrupt::check()?;
                each(Turn { contender, prompt, running: Running::read(&mut executor, tokens, *new_tokens)? })?;
            }
        }
        Ok(())
    }
}
