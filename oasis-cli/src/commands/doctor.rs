//! `oasis doctor`: what this machine has, what is missing, how to get it.

use crate::args::GlobalArgs;
use crate::error::CliResult;
use crate::fabric::Fabric;
use crate::machine::{self, LockLimit, Machine};
use crate::{env, hub, settings, text};
use clap::Args;
use oasis_core::registry::{self, Role};
use oasis_cuda::device::Device;
use oasis_cuda::measure::Ceilings;
use oasis_cuda::{CudaProbe, CudaUnavailable};
use oasis_models::checkpoint::{EMBEDDED_HEADS, EMBEDDED_MODELS};
use serde::Serialize;
use std::io::Write;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// All that was found.
#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    machine: Machine,
    /// How much memory may be locked, as RDMA adapters need it.
    lock_limit: Option<LockLimit>,
    cuda: CudaProbe,
    /// The configured device.
    ordinal: usize,
    /// Its ceilings, measured where it can be used.
    ceilings: Option<Ceilings>,
    /// What blocks can cross between nodes over.
    nodes: Fabric,
    config: ConfigFindings,
    plugins: Vec<(&'static str, usize)>,
    models: ModelFindings,
    environment: Vec<(String, String)>,
    advice: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ConfigFindings {
    file: Option<String>,
    /// Why the configuration cannot be used.
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct ModelFindings {
    cache: Option<String>,
    /// Repositories in the cache.
    cached: Vec<String>,
    endpoint: String,
    /// Whether a token for the hub is set.
    token: bool,
}

/// Prints what there is. Missing things are findings, not errors.
///
/// # Errors
/// The writer's.
pub fn run(args: &DoctorArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let findings = examine(global);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &findings)?;
        return Ok(writeln!(out)?);
    }
    for line in text::columns(&rows(&findings)) {
        writeln!(out, "{line}")?;
    }
    for advice in &findings.advice {
        writeln!(out, "\n! {advice}")?;
    }
    Ok(())
}

fn examine(global: &GlobalArgs) -> Findings {
    let resolved = settings::resolve(global, Vec::new());
    let nodes = Fabric::examine(&resolved.as_ref().map(|r| r.config.nodes.clone()).unwrap_or_default());
    let ordinal = resolved.as_ref().map_or(0, |r| r.config.device.ordinal);
    let config = ConfigFindings {
        file: settings::config_file(global).map(|path| path.display().to_string()),
        problem: resolved.err().and_then(|e| e.text().map(str::to_owned)),
    };
    let cache = env::hub_cache();
    let models = ModelFindings {
        cached: cache.as_deref().map(hub::cached_repositories).unwrap_or_default(),
        cache: cache.map(|path| path.display().to_string()),
        endpoint: hub::endpoint(None),
        token: hub::token().is_some(),
    };
    let plugins = registry::plugins();
    let cuda = oasis_cuda::probe();
    let usable = CudaUnavailable::check(&cuda, ordinal).is_ok();
    let ceilings = usable.then(|| Device::open(ordinal).and_then(|device| Ceilings::measure(&device)).ok()).flatten();
    let mut findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        machine: machine::examine(),
        lock_limit: machine::lock_limit(),
        cuda,
        ordinal,
        ceilings,
        nodes,
        config,
        plugins: Role::ALL.map(|role| (role.section(), plugins.iter().filter(|p| p.role == role).count())).to_vec(),
        models,
        environment: env::variables().filter(|(name, _)| env::is_ours(name)).collect(),
        advice: Vec::new(),
    };
    findings.environment.sort();
    for (name, value) in &mut findings.environment {
        if name == env::HF_TOKEN {
            "(set)".clone_into(value);
        }
    }
    findings.advice = advise(&findings);
    findings
}

fn advise(found: &Findings) -> Vec<String> {
    let mut advice = Vec::new();
    if let Some(problem) = &found.config.problem {
        advice.push(format!("The configuration cannot be used: {problem}"));
    }
    for (role, count) in &found.plugins {
        if *count == 0 {
            advice.push(format!("No {role} is linked in: name its crate in the program (`use my_plugin as _;`)."));
        }
    }
    if found.machine.cpu_features.iter().all(|f| f != "avx2" && f != "neon") && !found.machine.cpu_features.is_empty() {
        advice.push("The CPU has neither AVX2 nor NEON: runs on it will be slow.".to_owned());
    }
    if found.models.cache.is_none() {
        advice.push(format!("There is no home folder: set {} to a folder for downloaded models.", env::HF_HUB_CACHE));
    }
    advice.extend(found.nodes.problem.clone());
    if let Err(cuda) = CudaUnavailable::check(&found.cuda, found.ordinal) {
        advice.push(format!("No CUDA: expected {}, found {}.\n  hint: {}", cuda.expected, cuda.found, cuda.hint));
    }
    advice
}

fn rows(found: &Findings) -> Vec<Vec<String>> {
    let yes = |is: bool| if is { "found" } else { "not found" }.to_owned();
    let mut rows: Vec<(&str, String)> = vec![
        ("oasis", found.version.to_owned()),
        ("system", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        ("cpu", found.machine.cpu.clone().unwrap_or_else(|| "unknown".to_owned())),
        ("threads", found.machine.threads.to_string()),
        ("simd", found.machine.cpu_features.join(" ")),
        ("memory", found.machine.memory.map_or_else(|| "unknown".to_owned(), text::size)),
        ("memory limit", found.machine.memory_limit.map_or_else(|| "none".to_owned(), text::size)),
        (
            "locked memory limit",
            match found.lock_limit {
                Some(LockLimit::Bytes(bytes)) => format!("{} (ulimit -l)", text::size(bytes)),
                Some(LockLimit::Unlimited) => "none".to_owned(),
                None => "unknown".to_owned(),
            },
        ),
    ];
    match &found.cuda.driver {
        None => rows.push(("cuda driver", yes(false))),
        Some(driver) => {
            rows.push(("cuda driver", driver.problem.clone().unwrap_or_else(|| driver.version.clone())));
            for d in &driver.devices {
                let (major, minor) = d.compute_capability;
                rows.push((
                    "cuda device",
                    format!("{}: {}, {}, sm_{major}{minor}", d.ordinal, d.name, text::size(d.memory)),
                ));
            }
        }
    }
    rows.push(("nvrtc", yes(found.cuda.nvrtc)));
    rows.push(("cublaslt", yes(found.cuda.cublaslt)));
    if let Some(ceilings) = &found.ceilings {
        let device = found.ordinal;
        rows.push(("memory read", format!("{:.2} TB/s of device {device}, measured", ceilings.memory_read / 1e12)));
        let (to, from) = (ceilings.host_to_device / 1e9, ceilings.device_to_host / 1e9);
        rows.push(("link", format!("{to:.1} GB/s to device {device}, {from:.1} GB/s back, pinned, measured")));
    }
    rows.extend(found.nodes.rows());
    rows.push(("config file", found.config.file.clone().unwrap_or_else(|| "none, defaults only".to_owned())));
    let plugins: Vec<String> = found
        .plugins
        .iter()
        .map(|(role, count)| format!("{count} {role}{}", if *count == 1 { "" } else { "s" }))
        .collect();
    rows.push(("plugins", plugins.join(", ")));
    rows.push(("embedded models", EMBEDDED_MODELS.join(", ")));
    rows.push(("embedded heads", EMBEDDED_HEADS.join(", ")));
    rows.push(("model cache", found.models.cache.clone().unwrap_or_else(|| "none".to_owned())));
    rows.push((
        "in the cache",
        match found.models.cached.as_slice() {
            [] => "nothing; `oasis pull REPO` downloads a model".to_owned(),
            cached => cached.join(", "),
        },
    ));
    rows.push(("hub endpoint", found.models.endpoint.clone()));
    rows.push(("hub token", if found.models.token { "set" } else { "none" }.to_owned()));
    rows.extend(found.environment.iter().map(|(name, value)| ("environment", format!("{name}={value}"))));
    rows.into_iter().map(|(key, value)| vec![key.to_owned(), value]).collect()
}
