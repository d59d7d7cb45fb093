//! Measurements on a GPU: each figure beside the least time that its bytes or products need.

pub mod decode;
pub mod kernels;
pub mod link;
pub mod prefill;
pub mod serve;
pub mod traffic;

use crate::args::{GlobalArgs, ModelArgs};
use crate::assemble::cuda::{self, Weights};
use crate::assemble::{self, Loaded};
use crate::error::{CliError, CliResult};
use crate::settings::resolve;
use crate::sweep::{Needs, Work};
use clap::Args;
use oasis_core::config::{Bytes, Layer, Resolved};
use oasis_core::executor::{Admission, Sequence};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::sampling::SamplingParams;
use oasis_cuda::device::Device;
use oasis_cuda::executor::{CudaExecutor, CudaOptions, Residency};
use oasis_models::draft::Eagle3Spec;
use oasis_models::shapes;
use oasis_models::spec::DecoderSpec;
use serde::Serialize;

/// What is measured, and on how much of the machine.
#[derive(Debug, Args)]
pub struct Subject {
    /// Random weights of a known shape: qwen3-8b, llama-3.1-8b or qwen3-30b-a3b
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "draft"])]
    shape: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
    /// device.memory: emulate a card with less memory
    #[arg(long, value_name = "SIZE")]
    hbm_limit: Option<String>,
    /// store.capacity: host memory to pin
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Let requests share N images in host memory: the same reads and writes with less of it; every result says so
    #[arg(long, value_name = "N")]
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

    /// Reads the subject; `max_batch` requests of `max_context` tokens at most.
    ///
    /// # Errors
    /// When the shape is unknown, the configuration wrong, or the model cannot be read.
    pub fn open(&self, global: &GlobalArgs, max_batch: usize, max_context: usize) -> CliResult<Bench> {
        let mut layers = vec![Layer::assignment("oasis bench", "device.kind=cuda")?];
        layers.extend(self.model.layers()?);
        let mut set = |argument: &str, assignment: String| -> CliResult {
            layers.push(Layer::assignment(argument, &assignment)?);
            Ok(())
        };
        for (argument, key, value) in
            [("--hbm-limit", "device.memory", &self.hbm_limit), ("--host-memory", "store.capacity", &self.host_memory)]
        {
            if let Some(value) = value {
                set(&format!("{argument} {value}"), format!("{key}=\"{value}\""))?;
            }
        }
        set("oasis bench", format!("engine.max_batch={max_batch}"))?;
        set("oasis bench", format!("device.max_context={max_context}"))?;
        let resolved = resolve(global, layers)?;
        assemble::check_device(&resolved.config)?;
        let alias = self.alias_host;
        if let Some(name) = &self.shape {
            let (spec, head) = shapes::named(name).ok_or_else(|| {
                CliError::input(
                    format!("--shape: expected one of {}, found {name}", shapes::NAMES.join(", ")),
                    "--model names a checkpoint",
                )
            })?;
            return Ok(Bench {
                resolved,
                spec,
                name: format!("{name}, random weights"),
                head: Some(head),
                loaded: None,
                alias,
            });
        }
        let model = assemble::open_model(&resolved.config)?;
        let loaded = assemble::load_weights(&resolved.config, &model)?;
        Ok(Bench {
            spec: loaded.spec.clone(),
            name: model.checkpoint.provenance().name,
            head: loaded.head.as_ref().map(|head| head.spec.clone()),
            loaded: Some(loaded),
            resolved,
            alias,
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
