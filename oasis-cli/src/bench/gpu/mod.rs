//! Measurements on a GPU: each figure beside the least time that its bytes or products need.

pub mod decode;
pub mod kernels;
pub mod link;
pub mod prefill;
pub mod serve;
pub mod traffic;

use super::{Longest, expect_device};
use crate::args::{GlobalArgs, ModelArgs, count, size};
use crate::assemble::cuda::{self, Weights};
use crate::assemble::{self, Loaded};
use crate::error::{CliError, CliResult};
use crate::settings::resolve_over;
use crate::sweep::{Needs, Work};
use clap::Args;
use oasis_core::config::{Bytes, DeviceKind, Layer, Resolved};
use oasis_core::executor::{Admission, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_cuda::device::Device;
use oasis_cuda::executor::{CudaExecutor, CudaOptions, Residency};
use oasis_models::draft::Eagle3Spec;
use oasis_models::shapes;
use oasis_models::spec::DecoderSpec;
use serde::Serialize;
use std::str::FromStr;

/// A shape by its name.
#[derive(Debug, Clone)]
pub struct Shape {
    name: String,
    parts: Box<(DecoderSpec, Eagle3Spec)>,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let parts = shapes::named(name).ok_or_else(|| format!("expected one of {}", shapes::NAMES.join(", ")))?;
        Ok(Self { name: name.to_owned(), parts: Box::new(parts) })
    }
}

/// The configuration of a measurement on a GPU, with `arguments` over it.
///
/// # Errors
/// When a value is wrong, or another device is named.
pub fn resolve_on_gpu(global: &GlobalArgs, arguments: Vec<Layer>) -> CliResult<Resolved> {
    let resolved = resolve_over(vec![Layer::assignment("oasis bench", "device.kind=cuda")?], global, arguments)?;
    expect_device(&resolved, DeviceKind::Cuda)?;
    Ok(resolved)
}

/// What is measured, and on how much of the machine.
#[derive(Debug, Args)]
pub struct Subject {
    /// Random weights of a known shape: qwen3-8b, llama-3.1-8b or qwen3-30b-a3b
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "draft"])]
    shape: Option<Shape>,
    #[command(flatten)]
    model: ModelArgs,
    /// device.memory: emulate a card with less memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    hbm_limit: Option<Bytes>,
    /// store.capacity: host memory to pin
    #[arg(long, value_name = "SIZE", value_parser = size)]
    host_memory: Option<Bytes>,
    /// Let requests share N images in host memory: the same reads and writes with less of it; every result says so
    #[arg(long, value_name = "N", value_parser = count(1))]
    alias_host: Option<usize>,
}

/// A subject, loaded or described.
pub struct Bench {
    /// Configuration.
    pub resolved: Resolved,
    /// Shape of the model.
    pub spec: DecoderSpec,
    /// Name of the model or shape.
    pub name: String,
    head: Option<Eagle3Spec>,
    loaded: Option<Loaded>,
    alias: Option<usize>,
    /// Tokens of the longest request.
    max_context: usize,
}

/// What every measurement on a GPU needs, and those of named shapes alone.
///
/// # Errors
/// Never for the keys that are named here.
pub fn needs_device() -> CliResult<Needs> {
    let settings = vec![Layer::assignment("oasis bench", "device.kind=cuda")?];
    Ok(Needs { files: Vec::new(), settings, work: Work::Device })
}

impl Subject {
    /// What a measurement of the subject reads. Its policies depend on the measurement.
    ///
    /// # Errors
    /// Never for the keys that the program itself names.
    pub fn needs(&self) -> CliResult<Needs> {
        let mut needs = needs_device()?;
        if self.shape.is_none() {
            needs.settings.extend(self.model.layers()?);
            needs.work = Work::Model(Vec::new());
        }
        Ok(needs)
    }

    /// Reads the subject; at most `max_batch` requests. What needs no device is checked first.
    ///
    /// # Errors
    /// When the configuration is wrong, a request too long, there is no device, or the model cannot be read.
    pub fn open(&self, global: &GlobalArgs, max_batch: usize, longest: &Longest) -> CliResult<Bench> {
        let mut layers = self.model.layers()?;
        let mut set = |argument: &str, assignment: String| -> CliResult {
            layers.push(Layer::assignment(argument, &assignment)?);
            Ok(())
        };
        for (argument, key, value) in
            [("--hbm-limit", "device.memory", &self.hbm_limit), ("--host-memory", "store.capacity", &self.host_memory)]
        {
            if let Some(size) = value {
                set(&format!("{argument} {size}"), format!("{key}={}", size.0))?;
            }
        }
        set("oasis bench", format!("engine.max_batch={max_batch}"))?;
        let resolved = resolve_on_gpu(global, layers)?;
        let check = |name: &str, spec: &DecoderSpec, has_head| -> CliResult<usize> {
            let max_context = longest.within(spec.max_positions, name)?;
            cuda::options(&resolved, spec, has_head)?;
            assemble::check_device(&resolved.config)?;
            Ok(max_context)
        };
        let alias = self.alias_host;
        if let Some(Shape { name, parts }) = self.shape.clone() {
            let (spec, head) = *parts;
            let max_context = check(&name, &spec, true)?;
            let name = format!("{name}, random weights");
            return Ok(Bench { resolved, spec, name, head: Some(head), loaded: None, alias, max_context });
        }
        let model = assemble::open_model(&resolved.config)?;
        let name = model.checkpoint.provenance().name;
        let max_context = check(&name, model.checkpoint.spec(), model.head.is_some())?;
        let loaded = assemble::load_weights(&resolved.config, &model)?;
        Ok(Bench {
            spec: loaded.spec.clone(),
            name,
            head: loaded.head.as_ref().map(|head| head.spec.clone()),
            loaded: Some(loaded),
            resolved,
            alias,
            max_context,
        })
    }
}

impl Bench {
    /// Options of the configuration, dense or sparse.
    ///
    /// # Errors
    /// As [`cuda::options`].
    pub fn options(&self, dense: bool) -> CliResult<CudaOptions> {
        let mut options = cuda::options(&self.resolved, &self.spec, self.head.is_some())?;
        options.max_context = self.max_context;
        match &mut options.residency {
            residency if dense => *residency = Residency::Dense,
            Residency::Sparse(sparse) => sparse.host.alias = self.alias,
            Residency::Dense => {}
        }
        Ok(options)
    }

    /// Starts an executor.
    ///
    /// # Errors
    /// As [`cuda::start`].
    pub fn start(&self, options: CudaOptions) -> CliResult<CudaExecutor> {
        let weights = match (&self.loaded, &self.head) {
            (Some(loaded), _) => Weights::Loaded(loaded),
            (None, Some(head)) => Weights::Random(&self.spec, head),
            (None, None) => return Err(CliError::Failure("a named shape has a head".to_owned())),
        };
        cuda::start(&self.resolved.config, &weights, options)
    }

    /// The device.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn device(&self) -> CliResult<Device> {
        Ok(Device::open(self.resolved.config.device.ordinal)?)
    }

    /// Conditions that belong to every result.
    pub fn conditions(&self) -> Conditions {
        let limit = self.resolved.config.device.memory.0;
        Conditions {
            model: self.name.clone(),
            hbm_limit: Some(limit).filter(|bytes| *bytes > 0),
            host_images: self.alias,
        }
    }
}

/// Conditions of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Conditions {
    /// Model or shape.
    pub model: String,
    /// Most bytes of device memory.
    pub hbm_limit: Option<u64>,
    /// Images in host memory that requests shared; `None` when each had its own.
    pub host_images: Option<usize>,
}

impl Conditions {
    /// One line.
    pub fn line(&self) -> String {
        let mut text = self.model.clone();
        if let Some(limit) = self.hbm_limit {
            text.push_str(&format!(", device memory limited to {}", Bytes(limit)));
        }
        if let Some(images) = self.host_images {
            text.push_str(&format!(", requests share {images} images in host memory (--alias-host)"));
        }
        text
    }
}

/// A request of random tokens.
pub fn sequence(request: u64, prompt: usize, max_new_tokens: usize, vocab: usize) -> Sequence {
    // Any spread will do: a multiplicative hash of the position.
    let token =
        |i: usize| TokenId(((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ request) >> 20) as u32 % vocab as u32);
    Sequence {
        request: RequestId(request),
        prompt: (0..prompt).map(token).collect(),
        max_new_tokens,
        sampling: SamplingParams::default(),
    }
}

/// Admits or says why not.
///
/// # Errors
/// When there is no room.
pub fn expect_admitted(admission: Admission) -> CliResult {
    match admission {
        Admission::Admitted => Ok(()),
        Admission::Wait { reason } | Admission::Refused { reason } => Err(CliError::Input(reason)),
    }
}

/// The middle of some times.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
