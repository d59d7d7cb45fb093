//! `oasis serve-node`: one of two nodes, for prompts or for answers.

use crate::args::{GlobalArgs, ModelArgs};
use crate::assemble::{self, Loaded, Model, Policies, cuda};
use crate::error::{CliError, CliResult};
use crate::nodes::{self, CertificateArgs, NodeArgs, seconds};
use crate::settings::resolve;
use clap::{Args, ValueEnum};
use oasis_core::config::{Budget, Config, DeviceKind, NodeTransport, Resolved};
use oasis_core::hand_over::HandsOver;
use oasis_core::memory::KvStore;
use oasis_core::pipeline::Tracer;
use oasis_cuda::executor::CudaOptions;
use oasis_nodes::{DecodeExecutor, DecodeNode, DecodeOptions, PrefillNode, PrefillOptions, TransferMode, client_facts};
use oasis_transport::remote::{PeerOptions, StagingPool, open_ucx};
use oasis_ucx::Engine;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// How often the node looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// Arguments of `serve-node`.
#[derive(Debug, Args)]
pub struct ServeNodeArgs {
    /// What the node does
    #[arg(long, value_enum)]
    role: Role,
    /// Address to listen on; port 0 takes a free one, which is printed
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    /// Prefill node of a decode node
    #[arg(long, value_name = "HOST:PORT", required_if_eq("role", "decode"))]
    peer: Option<String>,
    /// What crosses before a request decodes; of a decode node
    #[arg(long, value_enum, default_value = "partial")]
    transfer: Transfer,
    /// Seconds that blocks are kept without a sign of life from the decode node; of a prefill node
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    lease: f64,
    /// Seconds from a prompt to its first token, and that a prompt waits for room
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    prefill_timeout: f64,
    #[command(flatten)]
    session: NodeArgs,
    #[command(flatten)]
    certificate: CertificateArgs,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Reads prompts, runs the first decode step, keeps the KV in `store`
    Prefill,
    /// Answers `oasis run --node`; blocks come to `store` when they are needed
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Transfer {
    /// Every block of the prompt
    Full,
    /// The blocks that the first decode step chose; others when a step misses them
    Partial,
}

/// Serves until Ctrl-C.
///
/// # Errors
/// When the input is wrong, the address cannot be listened on, or the machine gives no threads.
pub fn run(args: &ServeNodeArgs, global: &GlobalArgs, out: &mut dyn Write) -> CliResult {
    let resolved = resolve(global, args.model.layers()?)?;
    let config = &resolved.config;
    let Budget::Blocks(budget_blocks) = config.kv.budget_blocks else {
        return Err(CliError::input(
            "serve-node: expected sparse decoding, found kv.budget_blocks = \"all\"",
            "set a number of blocks",
        ));
    };
    let (lease, prefill_timeout) =
        (seconds("--lease", args.lease)?, seconds("--prefill-timeout", args.prefill_timeout)?);
    let terms = |facts| args.session.terms(facts, &args.certificate);
    // The secret is read and UCX opened before the weights: what is wrong is said at once.
    terms(Vec::new())?;
    if config.device.kind == DeviceKind::Cuda && config.nodes.transport != NodeTransport::Tcp {
        return Err(CliError::input(
            "serve-node: expected nodes.transport = \"tcp\" with device.kind = \"cuda\", found one-sided reads",
            "blocks of a GPU's requests cross as messages of the session",
        ));
    }
    let ucx = open_ucx(&config.nodes)?;
    let staging = match (args.role, &ucx) {
        (Role::Prefill, Some(ucx)) => Some(staging_pool(config, ucx.clone())?),
        _ => None,
    };
    crate::interrupt::catch();
    let model = assemble::open_model(config)?;
    let parts = Parts::of(&resolved, &model)?;
    assemble::check_device(config)?;
    let store = staging.as_ref().map_or_else(|| parts.store(), |staging| staging.store());
    let layers = model.checkpoint.spec().layers;
    let weights = assemble::load_weights(config, &model)?;
    let node_terms = terms(nodes::facts(&resolved, &weights, budget_blocks))?;
    let start = |store| parts.start(config, weights, store);
    match args.role {
        Role::Prefill => {
            let options = PrefillOptions {
                listen: args.listen.clone(),
                terms: node_terms,
                lease,
                wait: prefill_timeout,
                staging,
            };
            let node = PrefillNode::start(start(store.clone())?, store, options)?;
            serve("prefill", node.address(), out)
        }
        Role::Decode => {
            let address = args.peer.clone().unwrap_or_default();
            let options = DecodeOptions {
                peer: PeerOptions { address, terms: node_terms, layers },
                ucx,
                transfer: match args.transfer {
                    Transfer::Full => TransferMode::Full,
                    Transfer::Partial => TransferMode::Partial,
                },
                prefill_timeout,
            };
            let start = |store| {
                start(store)
                    .map_err(|error| anyhow::anyhow!("{}", error.text().unwrap_or("the executor could not be started")))
            };
            let executor = DecodeExecutor::start(options, store, start)?;
            let terms = terms(client_facts(model.checkpoint.spec()))?;
            let node = DecodeNode::start(executor, config.engine.max_batch, &args.listen, terms)?;
            serve("decode", node.address(), out)
        }
    }
}

/// What a node computes with, checked before weights are read.
enum Parts {
    Cpu(Policies),
    Cuda { options: CudaOptions, store: Arc<dyn KvStore> },
}

impl Parts {
    fn of(resolved: &Resolved, model: &Model) -> CliResult<Self> {
        match resolved.config.device.kind {
            DeviceKind::Cpu => Ok(Self::Cpu(assemble::build_policies(resolved, model)?)),
            DeviceKind::Cuda => {
                let options = cuda::node_options(resolved, model.checkpoint.spec(), model.head.is_some())?;
                Ok(Self::Cuda { options, store: assemble::build_store(resolved)? })
            }
        }
    }

    /// The store of the configuration.
    fn store(&self) -> Arc<dyn KvStore> {
        match self {
            Self::Cpu(policies) => policies.store.clone(),
            Self::Cuda { store, .. } => store.clone(),
        }
    }

    /// Starts an executor whose KV goes to `store`.
    fn start(self, config: &Config, weights: Loaded, store: Arc<dyn KvStore>) -> CliResult<Box<dyn HandsOver>> {
        match self {
            Self::Cpu(policies) => {
                let policies = Policies { store, ..policies };
                Ok(Box::new(assemble::start_executor(config, weights.on_cpu(), policies, Tracer::default())?))
            }
            Self::Cuda { options, .. } => {
                Ok(Box::new(cuda::start_over(config, &cuda::Weights::Loaded(&weights), options, Some(store))?))
            }
        }
    }
}

/// Registered memory of the store's size: one-sided reads need the blocks there.
fn staging_pool(config: &Config, ucx: Engine) -> CliResult<Arc<StagingPool>> {
    let capacity = config.store.host_memory().ok_or_else(|| {
        CliError::input(
            format!(
                "serve-node: expected store.kind = \"dram\" where blocks are read from memory, found `{}`",
                config.store.typetag_name()
            ),
            "nodes.transport = \"tcp\" serves blocks from any store",
        )
    })?;
    Ok(StagingPool::start(ucx, capacity)?)
}

fn serve(role: &str, address: SocketAddr, out: &mut dyn Write) -> CliResult {
    writeln!(out, "{role} node: listening on {address}")?;
    out.flush()?;
    while !crate::interrupt::requested() {
        std::thread::sleep(PATIENCE);
    }
    Ok(())
}
