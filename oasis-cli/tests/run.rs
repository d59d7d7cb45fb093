//! `oasis run` on the embedded model.

mod common;

use common::{oasis, outcome};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::tempdir;

const PROMPT: &str = "And he said, I will not do it, if I find thirty there.";

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    outcome(oasis(folder).arg("run").args(args).stdin(Stdio::null()).output().unwrap())
}

fn json(folder: &Path, args: &[&str]) -> serde_json::Value {
    let (code, out, err) = run(folder, args);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn text_on_standard_output_and_the_report_beside_it() {
    let folder = tempdir().unwrap();
    let (code, out, err) = run(folder.path(), &[PROMPT, "-n", "6"]);
    assert_eq!(code, 0, "{err}");
    assert!(!out.trim().is_empty() && out.ends_with('\n') && !out.contains("device KV"));
    for part in ["oasis-tiny, draft head oasis-tiny-eagle3", "prefill", "tokens/s", "device KV", "link", "transfer"] {
        assert!(err.contains(part), "{part} in {err}");
    }
}

#[test]
fn a_budget_over_the_context_equals_dense_decoding() {
    let folder = tempdir().unwrap();
    let sparse = json(folder.path(), &[PROMPT, "-n", "12", "--ignore-eos", "--json"]);
    let dense = json(folder.path(), &[PROMPT, "-n", "12", "--ignore-eos", "--json", "--dense"]);
    assert_eq!(sparse["tokens"], dense["tokens"]);
    assert_eq!(sparse["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(sparse["finish"], "length");
    assert_eq!(
        (&dense["report"]["link"], &dense["report"]["memory"]["budget_blocks"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
}

#[test]
fn a_small_budget_moves_entries_and_is_traced() {
    let folder = tempdir().unwrap();
    let long = PROMPT.repeat(20);
    let args = [&long, "-n", "8", "--ignore-eos", "--json", "--trace", "spans.json", "--set", "kv.budget_blocks=2"];
    let document = json(folder.path(), &args);
    let report = &document["report"];
    assert!(report["memory"]["working_set_bytes"].as_u64() < report["memory"]["dense_bytes"].as_u64());
    assert_eq!(report["link"]["steps"], 7);
    assert!(report["link"]["filled_entries"].as_u64().unwrap() > 0);
    let trace = std::fs::read_to_string(folder.path().join("spans.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 8);
}

#[test]
fn sampling_repeats_with_its_seed() {
    let folder = tempdir().unwrap();
    let sample = |seed| {
        let args =
            [PROMPT, "-n", "16", "--ignore-eos", "--json", "--temperature", "1.5", "--top-p", "0.95", "--seed", seed];
        json(folder.path(), &args)["tokens"].clone()
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn a_chat_from_a_pipe() {
    let folder = tempdir().unwrap();
    let mut command = oasis(folder.path());
    command.args(["run", "--chat", "-n", "4", "-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"What is the pass key?\n").unwrap();
    let (code, out, err) = outcome(child.wait_with_output().unwrap());
    assert_eq!(code, 0, "{err}");
    assert!(!out.trim().is_empty());
}

#[test]
fn wrong_input_is_told_before_the_weights_are_read() {
    let folder = tempdir().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["hi", "--temperature", "-1"], "sampling.temperature: expected a number of at least 0"),
        (&["hi", "--model", "none"], "none: expected a checkpoint folder"),
        (&["hi", "-n", "0"], "invalid value '0'"),
        (&["hi", "-n", "99999"], "the context is too long"),
        (&["hi", "--trace", "no/such/folder.json"], "--trace no/such/folder.json: expected a file"),
    ];
    for (args, message) in cases {
        let (code, out, err) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.contains(&format!("error: {message}")), "{args:?}: {err}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_with_its_report() {
    let folder = tempdir().unwrap();
    let mut command = oasis(folder.path());
    command.args(["run", PROMPT, "-n", "16000", "--ignore-eos"]).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first byte of the answer says that it runs.
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let start = Instant::now();
    let (code, _, err) = outcome(child.wait_with_output().unwrap());
    assert_eq!(code, 130, "{err}");
    assert!(err.contains("decode") && err.ends_with("error: interrupted\n"), "{err}");
    assert!(start.elapsed() < Duration::from_secs(20));
}
