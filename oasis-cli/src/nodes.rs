//! What commands that speak to other nodes share, and the client of a decode node.

use crate::assemble::{self, Loaded};
use crate::error::{CliError, CliResult};
use crate::generate::Finish;
use crate::progress::Progress;
use crate::text::{columns, grouped, size};
use crate::tokens::{Decode, ModelText};
use clap::Args;
use oasis_core::config::{DeviceKind, Resolved};
use oasis_core::engine::GenerateRequest;
use oasis_core::geometry::{KvDtype, KvGeometry, LAYOUT_VERSION};
use oasis_core::ids::TokenId;
use oasis_models::checkpoint::Checkpoint;
use oasis_nodes::{NodeAnswer, NodeClient, client_facts, node_facts};
use oasis_transport::remote::{Fact, NodeMetrics, Secret, Terms, Tls, TlsFiles};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long the client waits for news before it looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// How nodes are spoken to.
#[derive(Debug, Default, Args)]
pub struct NodeArgs {
    /// File with the secret that all nodes share; needed on addresses that others can reach
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Seconds that any single operation between nodes may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    timeout: f64,
    /// Connect over TLS, to nodes whose certificate an authority of this PEM file has signed
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
}

/// How a node shows who it is.
#[derive(Debug, Default, Args)]
pub struct CertificateArgs {
    /// Certificate that the node shows its clients, and those between it and its authority, PEM; clients must then connect
    /// over TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Let clients connect without TLS too
    #[arg(long, requires = "tls_cert")]
    tls_optional: bool,
}

/// A number of seconds above 0 and at most a day.
pub fn seconds(argument: &str, value: f64) -> CliResult<Duration> {
    match value > 0.0 && value <= 86_400.0 {
        true => Ok(Duration::from_secs_f64(value)),
        false => Err(CliError::Input(format!("{argument}: expected seconds above 0 and at most 86400, found {value}"))),
    }
}

impl NodeArgs {
    /// Terms of sessions in which both ends state `facts`, and servers show a certificate where there is one.
    ///
    /// # Errors
    /// When the secret cannot be read or is empty, files of TLS cannot be used, or the time is out of range.
    pub fn terms(&self, facts: Vec<Fact>, shown: &CertificateArgs) -> CliResult<Terms> {
        let secret = match &self.secret_file {
            None => Secret::default(),
            Some(path) => {
                let name = path.display();
                let bytes = std::fs::read(path).map_err(|error| {
                    CliError::Input(format!("--secret-file {name}: expected a readable file, found: {error}"))
                })?;
                let secret = Secret::new(bytes.trim_ascii());
                if secret.is_empty() {
                    return Err(CliError::Input(format!("--secret-file {name}: expected a secret, found none")));
                }
                secret
            }
        };
        let files = TlsFiles {
            authorities: self.tls_ca.clone(),
            certificate: shown.tls_cert.clone(),
            key: shown.tls_key.clone(),
            is_optional: shown.tls_optional,
        };
        let tls = Tls::load(&files).map_err(|error| CliError::Input(format!("TLS: {error}")))?;
        Ok(Terms { secret, tls, facts, timeout: seconds("--timeout", self.timeout)? })
    }
}

/// What a prefill and a decode node of this configuration must agree on.
pub fn facts(resolved: &Resolved, weights: &Loaded, budget_blocks: usize) -> Vec<Fact> {
    let decides = |key: &str| {
        ["kv.dense_layers", "kv.draft_blocks", "summarizer.", "predictor.", "selector."]
            .iter()
            .any(|prefix| key.starts_with(prefix))
    };
    let values = resolved.values.iter().filter(|(key, ..)| decides(key));
    let policies: Vec<_> = values.map(|(key, value, _)| (key.clone(), value.to_string())).collect();
    let geometry = assemble::geometry(&resolved.config, &weights.spec);
    let (geometry, entry_layout) = match resolved.config.device.kind {
        DeviceKind::Cpu => (geometry, LAYOUT_VERSION),
        DeviceKind::Cuda => (KvGeometry { dtype: KvDtype::Bf16, ..geometry }, oasis_cuda::layout::LAYOUT_VERSION),
    };
    node_facts(weights.fingerprint(), &geometry, entry_layout, budget_blocks, &policies)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document {
    text: String,
    tokens: Vec<u32>,
    finish: Finish,
    node: NodeReport,
}

/// What a request cost, as the client and the decode node saw it.
#[derive(Debug, Default, Serialize)]
struct NodeReport {
    prompt_tokens: usize,
    /// From the submission to the first token.
    first_token_seconds: f64,
    decode_tokens_per_second: Option<f64>,
    state_bytes: u64,
    admission_bytes: u64,
    miss_bytes: u64,
    misses: u64,
    blocks: u64,
    prompt_blocks: u64,
    /// What a full transfer of the prompt's blocks would be.
    prompt_bytes: u64,
    resident_bytes: u64,
}

impl NodeReport {
    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let rate = self.decode_tokens_per_second.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1} tokens/s"));
        let share = self.blocks as f64 * 100.0 / self.prompt_blocks.max(1) as f64;
        let rows = [
            [
                "first token",
                &format!("{:.2} s", self.first_token_seconds),
                &format!("{} tokens of prompt", self.prompt_tokens),
            ],
            ["decode", &rate, ""],
            ["admission", &size(self.admission_bytes), &format!("and {} of state", size(self.state_bytes))],
            ["misses", &size(self.miss_bytes), &format!("in {} fetches", grouped(self.misses))],
            [
                "crossed",
                &format!("{} blocks", grouped(self.blocks)),
                &format!("{share:.0}% of the prompt's {}, {}", grouped(self.prompt_blocks), size(self.prompt_bytes)),
            ],
            ["resident", &size(self.resident_bytes), "in the decode node's store"],
        ];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        columns(&rows).iter().try_for_each(|line| writeln!(out, "{line}"))
    }
}

/// An answer in the making.
struct Asked {
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    text: String,
    tokens: Vec<TokenId>,
}

/// Lets a decode node answer: text on standard output, the report on standard error, or both as JSON.
///
/// # Errors
/// When the node cannot be reached, refuses or fails, or Ctrl-C ends the answer, which the node then gives up.
pub fn ask(
    address: &str,
    args: &NodeArgs,
    checkpoint: &Checkpoint,
    text: &ModelText<'_>,
    request: GenerateRequest,
    json: bool,
    out: &mut dyn Write,
) -> CliResult {
    let terms = args.terms(client_facts(checkpoint.spec()), &CertificateArgs::default())?;
    let mut asked = Asked { start: Instant::now(), first: None, last: None, text: String::new(), tokens: Vec::new() };
    let mut client = NodeClient::submit(address, &terms, &request)?;
    let mut decoder = text.decoder();
    let bar = Progress::parts("reading the prompt");
    let (finish, metrics) = loop {
        crate::interrupt::check()?;
        match client.next(PATIENCE)? {
            None => {}
            Some(NodeAnswer::Progress { done, total }) => bar.set(done, total),
            Some(NodeAnswer::Token(token)) => {
                bar.clear();
                asked.last = Some(Instant::now());
                asked.first = asked.first.or(asked.last);
                asked.tokens.push(token);
                if !request.stop_tokens.contains(&token) {
                    asked.push(&decoder.push(token)?, json, out)?;
                }
            }
            Some(NodeAnswer::Failed(reason)) => return Err(CliError::Failure(format!("{address}: {reason}"))),
            Some(NodeAnswer::Finished { stopped, metrics }) => {
                break (if stopped { Finish::Stop } else { Finish::Length }, metrics);
            }
        }
    };
    asked.push(&decoder.finish()?, json, out)?;
    let node = asked.report(request.prompt.len(), &metrics);
    if json {
        let tokens = asked.tokens.iter().map(|token| token.0).collect();
        serde_json::to_writer_pretty(&mut *out, &Document { text: asked.text, tokens, finish, node })?;
        return Ok(writeln!(out)?);
    }
    writeln!(out)?;
    out.flush()?;
    let mut stderr = std::io::stderr().lock();
    writeln!(stderr)?;
    Ok(node.write(&mut stderr)?)
}

impl Asked {
    fn push(&mut self, piece: &str, json: bool, out: &mut dyn Write) -> CliResult {
        self.text.push_str(piece);
        if !json && !piece.is_empty() {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }

    fn report(&self, prompt_tokens: usize, metrics: &NodeMetrics) -> NodeReport {
        let first = self.first.unwrap_or(self.start);
        let decode = self.last.map_or(0.0, |last| (last - first).as_secs_f64());
        let steps = self.tokens.len().saturating_sub(1);
        NodeReport {
            prompt_tokens,
            first_token_seconds: (first - self.start).as_secs_f64(),
            decode_tokens_per_second: (decode > 0.0).then(|| steps as f64 / decode),
            state_bytes: metrics.state_bytes,
            admission_bytes: metrics.admission_bytes,
            miss_bytes: metrics.miss_bytes,
            misses: metrics.misses,
            blocks: metrics.blocks,
            prompt_blocks: metrics.prompt_blocks,
            prompt_bytes: metrics.prompt_blocks * metrics.block_bytes,
            resident_bytes: metrics.resident_bytes,
        }
    }
}
