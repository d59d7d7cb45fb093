//! Prefill and decode in processes of their own, and a third that asks.

mod common;

use common::{has_ucx, oasis, outcome};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::tempdir;

const PROMPT: &str = "And he said, I will not do it, if I find thirty there.";
const BUDGET: [&str; 4] = ["--set", "kv.budget_blocks=4", "--set", "selector.kind=fetch-all"];

const MESSAGES: [&str; 2] = ["--set", "nodes.transport=tcp"];
const MEMORY: [&str; 2] = ["--set", "nodes.transport=ucx-tcp"];

/// How blocks cross: by messages, and where there is UCX by reads of memory.
fn transports() -> Vec<[&'static str; 2]> {
    if has_ucx() { vec![MESSAGES, MEMORY] } else { vec![MESSAGES] }
}

/// A node that is killed when the test ends.
struct Node {
    child: Child,
    address: String,
}

impl Node {
    fn start(folder: &Path, role: &str, args: &[&str]) -> Self {
        let mut command = oasis(folder);
        command.args(["serve-node", "--role", role]).args(args).args(BUDGET);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix(&format!("{role} node: listening on "));
        let address = address.unwrap_or_else(|| panic!("expected an address, found {line:?}")).to_owned();
        Self { child, address }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(folder: &Path, node: &Node, args: &[&str]) -> Command {
    let mut command = oasis(folder);
    command.args(["run", "--node", &node.address, "--ignore-eos", "--json"]).args(args).stdin(Stdio::null());
    command
}

fn json(mut command: Command) -> serde_json::Value {
    let (code, out, err) = outcome(command.output().unwrap());
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn three_processes_say_what_one_says() {
    let folder = tempdir().unwrap();
    let folder = folder.path();
    let long = PROMPT.repeat(20);
    let mut alone = oasis(folder);
    alone.args(["run", &long, "-n", "24", "--ignore-eos", "--json"]).args(BUDGET);
    let expected = json(alone);
    let pairs = transports().into_iter().flat_map(|by| ["full", "partial"].map(|transfer| (by, transfer)));
    for (by, transfer) in pairs {
        let prefill = Node::start(folder, "prefill", &by);
        let peer = ["--peer", &prefill.address, "--transfer", transfer];
        let decode = Node::start(folder, "decode", &[&peer[..], &by].concat());
        let document = json(ask(folder, &decode, &[&long, "-n", "24"]));
        let (tokens, text) = (&expected["tokens"], &expected["text"]);
        assert_eq!((&document["tokens"], &document["text"]), (tokens, text), "{by:?} {transfer}");
        let number = |key: &str| document["node"][key].as_u64().unwrap();
        let is_full = transfer == "full";
        assert_eq!(number("blocks") == number("prompt_blocks"), is_full, "{document}");
        assert_eq!(number("admission_bytes") == number("prompt_bytes"), is_full, "{document}");
        assert_eq!(number("misses") == 0, is_full, "{document}");
    }
}

#[test]
fn a_killed_node_ends_the_request_with_a_reason() {
    let folder = tempdir().unwrap();
    let folder = folder.path();
    let long = PROMPT.repeat(20);
    let pairs = transports().into_iter().flat_map(|by| ["prefill", "decode"].map(|victim| (by, victim)));
    for (by, victim) in pairs {
        let mut prefill = Node::start(folder, "prefill", &by);
        let mut decode = Node::start(folder, "decode", &[&["--peer", &prefill.address], &by[..]].concat());
        let mut command = oasis(folder);
        command.args(["run", "--node", &decode.address, &long, "-n", "3000", "--ignore-eos"]).stdin(Stdio::null());
        let mut client = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = [0];
        client.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        if victim == "prefill" {
            prefill.kill()
        } else {
            decode.kill()
        }
        let killed = Instant::now();
        let (code, _, err) = outcome(client.wait_with_output().unwrap());
        assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
        assert_eq!(code, 1, "{err}");
        assert!(err.contains(&format!("{victim} node")), "{err}");
    }
}

#[test]
fn what_does_not_fit_is_refused_at_once() {
    let folder = tempdir().unwrap();
    let folder = folder.path();
    let refused = |args: &[&str], expected: &str| {
        let (code, _, err) = outcome(oasis(folder).args(["serve-node"]).args(args).output().unwrap());
        assert!(code == 2 || code == 1, "{code}: {err}");
        assert!(err.contains(expected), "{err}");
    };
    refused(&["--role", "decode"], "--peer <HOST:PORT>");
    refused(&["--role", "prefill", "--set", "kv.budget_blocks=all"], "expected sparse decoding");
    refused(&["--role", "prefill", "--listen", "0.0.0.0:0"], "expected a shared secret");
    refused(&["--role", "prefill", "--lease", "0"], "--lease: expected seconds above 0");
    let on_gpu = |sets: &[&str], expected: &str| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        for role in [&["prefill"][..], &["decode", "--peer", "127.0.0.1:1"]] {
            let roles = [&["--role"], role].concat();
            refused(
                &[&roles, &["--set", "device.kind=cuda", "--set", "kv.budget_blocks=4"][..], &sets].concat(),
                expected,
            );
        }
    };
    on_gpu(&["kv.budget_blocks=all"], "expected sparse decoding");
    on_gpu(&["nodes.transport=ucx-tcp"], "expected nodes.transport = \"tcp\" with device.kind = \"cuda\"");
    on_gpu(&["nodes.transport=roce"], "expected nodes.transport = \"tcp\" with device.kind = \"cuda\"");
    on_gpu(&["transport.kind=pcie-copy-engine"], "found the copy engine as transport");
    on_gpu(&["selector.kind=adaptive-cap"], "found a policy that the host runs");
    let elsewhere = ["--set", "nodes.ucx_library=/nowhere/libucp.so.0"];
    refused(
        &[&["--role", "prefill"], &MEMORY[..], &elsewhere].concat(),
        "RDMA transport unavailable: expected UCX's library /nowhere/libucp.so.0, found /nowhere/libucp.so.0: cannot open",
    );

    let file = folder.join("secret");
    std::fs::write(&file, "open sesame\n").unwrap();
    let secret = ["--secret-file", file.to_str().unwrap()];
    let prefill = Node::start(folder, "prefill", &secret);
    let decode = Node::start(folder, "decode", &[&secret[..], &["--peer", &prefill.address]].concat());
    let (code, _, err) = outcome(ask(folder, &decode, &[PROMPT, "-n", "2"]).output().unwrap());
    assert_eq!(code, 1);
    assert!(err.contains("the shared secrets differ") && !err.contains("sesame"), "{err}");
    let document = json(ask(folder, &decode, &[&[PROMPT, "-n", "2"], &secret[..]].concat()));
    assert_eq!(document["tokens"].as_array().unwrap().len(), 2);
}

/// Files of a certificate that is its own authority, for this machine.
fn certificate(folder: &Path, name: &str) -> [String; 2] {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let texts = [("crt", made.cert.pem()), ("key", made.signing_key.serialize_pem())];
    texts.map(|(ending, text)| {
        let path = folder.join(format!("{name}.{ending}"));
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

#[test]
fn three_processes_speak_over_tls() {
    let folder = tempdir().unwrap();
    let folder = folder.path();
    let ([crt, key], [other, _]) = (certificate(folder, "node"), certificate(folder, "other"));
    let shown = ["--tls-cert", &crt, "--tls-key", &key];
    let prefill = Node::start(folder, "prefill", &shown);
    let peer = ["--peer", &prefill.address];
    let decode = Node::start(folder, "decode", &[&shown[..], &peer, &["--tls-ca", &crt]].concat());
    let prompt = [PROMPT, "-n", "4"];
    let document = json(ask(folder, &decode, &[&prompt[..], &["--tls-ca", &crt]].concat()));
    assert_eq!(document["tokens"].as_array().unwrap().len(), 4);

    let refused = |node: &Node, args: &[&str], expected: &str| {
        let (code, _, err) = outcome(ask(folder, node, &[&prompt[..], args].concat()).output().unwrap());
        assert!(code == 1 && err.contains(expected), "{code}: {err}");
    };
    refused(&decode, &[], "expected a client with TLS, found one without it");
    refused(&decode, &["--tls-ca", &other], "expected a certificate of an authority that is trusted here");
    // A plain decode node, and a prefill node that is not.
    let plain = Node::start(folder, "decode", &peer);
    refused(&plain, &["--tls-ca", &crt], "expected a server with TLS, found one without it");
    refused(&plain, &[], "prefill node");

    let both = Node::start(folder, "decode", &[&shown[..], &peer, &["--tls-ca", &crt, "--tls-optional"]].concat());
    assert_eq!(json(ask(folder, &both, &prompt))["tokens"], document["tokens"]);

    let missing = folder.join("missing.pem");
    let files = ["--tls-cert", missing.to_str().unwrap(), "--tls-key", &key];
    let output = oasis(folder).args(["serve-node", "--role", "prefill"]).args(files).output().unwrap();
    let (code, _, err) = outcome(output);
    assert!(code == 2 && err.contains("missing.pem: expected certificates in PEM"), "{code}: {err}");
}
