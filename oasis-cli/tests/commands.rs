//! The binary's commands as a user meets them: output, messages, exit codes.

mod common;

use common::{oasis, outcome};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use tempfile::{TempDir, tempdir};

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    outcome(oasis(folder).args(args).stdin(Stdio::null()).output().unwrap())
}

fn folder(config: &str) -> TempDir {
    let folder = tempdir().unwrap();
    std::fs::write(folder.path().join("oasis.toml"), config).unwrap();
    folder
}

/// Value and origin of a key in what `explain` prints.
fn explained(output: &str, key: &str) -> (String, String) {
    let line = output.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{key} in {output}"));
    let columns: Vec<&str> = line.split("  ").filter(|cell| !cell.trim().is_empty()).collect();
    (columns[1].trim().to_owned(), columns[2].trim().to_owned())
}

#[test]
fn list_is_the_golden_file() {
    let folder = tempdir().unwrap();
    let (code, out, err) = run(folder.path(), &["list"]);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/list.txt");
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(
        out,
        std::fs::read_to_string(&golden).unwrap(),
        "the linked plugins changed; if they should: oasis list > {}",
        golden.display()
    );
}

#[test]
fn list_as_json_has_every_plugin() {
    let folder = tempdir().unwrap();
    let (code, out, _) = run(folder.path(), &["list", "--json"]);
    let plugins: serde_json::Value = serde_json::from_str(&out).unwrap();
    let lru = plugins.as_array().unwrap().iter().find(|p| p["kind"] == "capped-lru").unwrap();
    assert_eq!(code, 0);
    assert_eq!(lru["role"], "selector");
    assert_eq!(lru["defaults"]["fetch_ratio"], 0.05);
}

#[test]
fn later_layers_win_and_say_so() {
    let folder = folder("[selector]\nfetch_ratio = 0.1\n[kv]\nbudget_blocks = 64\n[engine]\nmax_batch = 2\n");
    let mut command = oasis(folder.path());
    command.env("OASIS_SELECTOR__FETCH_RATIO", "0.2").env("OASIS_KV__BUDGET_BLOCKS", "32");
    command.args(["explain", "--set", "selector.fetch_ratio=0.3"]);
    let (code, out, err) = outcome(command.output().unwrap());
    assert_eq!((code, err.as_str()), (0, ""));
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    assert_eq!(explained(&out, "selector.fetch_ratio"), pair("0.3", "argument --set selector.fetch_ratio=0.3"));
    assert_eq!(explained(&out, "kv.budget_blocks"), pair("32", "environment OASIS_KV__BUDGET_BLOCKS"));
    assert_eq!(explained(&out, "engine.max_batch"), pair("2", "oasis.toml"));
    assert_eq!(explained(&out, "engine.prefill_chunk"), pair("0", "default"));
}

#[test]
fn the_printed_file_configures_the_same_run() {
    let folder = tempdir().unwrap();
    let (code, toml, _) = run(folder.path(), &["explain", "--toml", "--set", "kv.budget_blocks=all"]);
    assert_eq!(code, 0);
    std::fs::write(folder.path().join("other.toml"), &toml).unwrap();
    let (code, again, err) = run(folder.path(), &["--config", "other.toml", "explain", "--toml"]);
    assert_eq!((code, err.as_str(), again), (0, "", toml));
}

#[test]
fn the_schema_is_json() {
    let folder = tempdir().unwrap();
    let (code, out, _) = run(folder.path(), &["explain", "--schema"]);
    let schema: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0);
    assert!(schema["properties"]["selector"]["oneOf"].as_array().unwrap().len() > 1);
}

#[test]
fn wrong_configuration_is_one_clear_error() {
    let cases = [
        ("[selektor]\nkind = \"static\"", "selektor: expected one of the sections", "did you mean `selector`?"),
        ("[selector]\nfetch_ration = 1", "selector.fetch_ration: expected one of the keys", "`fetch_ratio`?"),
        ("[selector]\nkind = \"caped-lru\"", "selector.kind: expected one of", "did you mean `capped-lru`?"),
        ("[kv]\nbudget_blocks = 0", "kv.budget_blocks: expected at least 1 block", "hint:"),
        ("[kv]\nblock_tokens = \"x\"", "kv.block_tokens: expected", "found \"x\" (from oasis.toml)"),
        ("[store]\ncapacity = \"lots\"", "store.capacity: expected", "found \"lots\" (from oasis.toml)"),
        ("[kv\n", "oasis.toml: expected TOML", "hint:"),
    ];
    for (config, message, more) in cases {
        let folder = folder(config);
        for command in ["explain", "check"] {
            let (code, out, err) = run(folder.path(), &[command]);
            assert_eq!((code, out.as_str()), (2, ""), "{config}");
            assert!(err.starts_with(&format!("error: {message}")), "{config}: {err}");
            assert!(err.contains(more), "{config}: {err}");
            assert_eq!(err.matches("error:").count(), 1, "{err}");
        }
    }
}

#[test]
fn wrong_arguments_are_wrong_input() {
    let folder = tempdir().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["explain", "--set", "nonsense"], "--set nonsense: expected key=value"),
        (&["explain", "--config", "none.toml"], "none.toml: expected a readable configuration file"),
        (&["lst"], "unrecognized subcommand"),
        (&["pull"], "required arguments"),
        (&["explain", "--toml", "--schema"], "cannot be used with"),
    ];
    for (args, message) in cases {
        let (code, out, err) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.starts_with("error: ") && err.contains(message), "{args:?}: {err}");
    }
}

#[test]
fn a_named_file_replaces_the_usual_one() {
    let folder = folder("[engine]\nmax_batch = 2\n");
    std::fs::write(folder.path().join("env.toml"), "[engine]\nmax_batch = 3\n").unwrap();
    std::fs::write(folder.path().join("arg.toml"), "[engine]\nmax_batch = 4\n").unwrap();
    let batch = |args: &[&str]| {
        let output = oasis(folder.path()).env("OASIS_CONFIG", "env.toml").args(args).output().unwrap();
        explained(&outcome(output).1, "engine.max_batch")
    };
    assert_eq!(batch(&["explain"]), ("3".to_owned(), "env.toml".to_owned()));
    assert_eq!(batch(&["explain", "--config", "arg.toml"]), ("4".to_owned(), "arg.toml".to_owned()));
}

#[test]
fn completions_for_every_shell() {
    let folder = tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = run(folder.path(), &["completions", shell]);
        assert_eq!(code, 0);
        assert!(out.contains("oasis") && out.contains("doctor"), "{shell}");
    }
}

#[test]
fn check_builds_everything_but_the_weights() {
    let folder = tempdir().unwrap();
    let (code, out, err) = run(folder.path(), &["check"]);
    assert_eq!(code, 0, "{err}");
    for part in
        ["model", "tokenizer", "draft head", "summarizer", "predictor", "selector", "transport", "store", "budget"]
    {
        assert!(out.lines().any(|line| line.starts_with(&format!("OK  {part}"))), "{part} in {out}");
    }
}

#[test]
fn check_refuses_what_does_not_fit_together() {
    let folder = tempdir().unwrap();
    let cases = [
        ("model.path=/no/such/model", "/no/such/model: expected a checkpoint folder"),
        ("model.draft=none", "model.draft: expected a draft head"),
        ("model.draft=smollm2-135m-eagle3", "draft head smollm2-135m-eagle3"),
        ("device.kv_memory=1MiB", "kv.budget_blocks: expected a working set within device.kv_memory = 1.0 MiB"),
    ];
    // The missing driver would be the last thing to be found.
    let on_gpu = [
        ("transport.depth=99", "transport.depth: expected 2 to 16 entries in flight, or 0, found 99"),
        ("transport.ctas=5000", "transport.ctas: expected at most 1024 thread blocks, or 0, found 5000"),
        ("transport.kind=memcpy", "transport.kind: expected a transport that reaches GPU memory"),
        ("device.max_context=999999", "device.max_context: expected at most the model's 16384 tokens, found 999999"),
        ("kv.block_tokens=8", "kv.block_tokens: expected 16, the block size of the GPU's kernels, found 8"),
    ];
    let on_cpu = cases.map(|(set, message)| ("device.kind=cpu", set, message));
    let on_gpu = on_gpu.map(|(set, message)| ("device.kind=cuda", set, message));
    for (device, set, message) in on_cpu.into_iter().chain(on_gpu) {
        let (code, out, err) = run(folder.path(), &["check", "--set", device, "--set", set]);
        assert_eq!((code, out.as_str()), (2, ""), "{set}: {err}");
        assert!(err.contains(&format!("error: {message}")) && err.contains("hint: "), "{set}: {err}");
    }
}

#[test]
fn cuda_is_refused_with_the_reason() {
    let folder = tempdir().unwrap();
    let evals = ["recall", "perplexity", "divergence", "agreement", "turnover", "coverage"];
    let evals = evals.map(|measure| vec!["eval", measure]);
    let others = [vec!["check"], vec!["run", "hello"], vec!["trace", "record", "--output", "selections"]];
    for command in evals.into_iter().chain(others) {
        let (code, out, err) =
            outcome(oasis(folder.path()).args(command).args(["--set", "device.kind=cuda"]).output().unwrap());
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.starts_with("error: CUDA was asked for (device.kind = \"cuda\"): expected "), "{err}");
        assert!(err.contains("\n  hint: "), "{err}");
    }
}

#[test]
fn doctor_finds_rather_than_fails() {
    let folder = folder("[kv]\nbudget_blocks = 0\n");
    let (code, out, _) = run(folder.path(), &["doctor"]);
    assert_eq!(code, 0);
    assert!(out.contains("threads") && out.contains("oasis-tiny"), "{out}");
    let line = |what: &str| out.lines().find(|line| line.starts_with(what)).map(|line| line[what.len()..].trim());
    assert!(line("locked memory limit").is_some_and(|limit| !limit.is_empty()), "{out}");
    assert!(line("cublas ").is_none() && line("cublaslt ").is_some(), "{out}");
    assert!(out.contains("! The configuration cannot be used: kv.budget_blocks"), "{out}");
    let output = oasis(folder.path()).env("HF_TOKEN", "hf_secret").args(["doctor", "--json"]).output().unwrap();
    let (code, out, _) = outcome(output);
    let findings: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, findings["config"]["file"].as_str()), (0, Some("oasis.toml")));
    // The file is wrong, so the defaults are looked at.
    assert_eq!(findings["nodes"]["transport"], "tcp");
    assert!(findings["nodes"]["ports"].is_array() && findings["nodes"]["problem"].is_null(), "{out}");
    assert!(!out.contains("hf_secret"));
}

#[test]
fn an_empty_prompt_is_wrong_input() {
    let folder = tempdir().unwrap();
    for args in [&["run", "--dense"][..], &["run", ""], &["run", "-"]] {
        let (code, out, err) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(err.starts_with("error: the prompt: expected some text, found none\n  hint: "), "{err}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let folder = tempdir().unwrap();
    for args in [&["list"][..], &["explain", "--schema"], &["completions", "zsh"], &["doctor", "--json"]] {
        let mut command = oasis(folder.path());
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        // The pipe closes when the reader is dropped.
        BufReader::with_capacity(1, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (code, _, err) = outcome(child.wait_with_output().unwrap());
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn version_and_help_are_no_errors() {
    let folder = tempdir().unwrap();
    let (code, out, _) = run(folder.path(), &["--version"]);
    assert_eq!((code, out), (0, format!("oasis {}\n", env!("CARGO_PKG_VERSION"))));
    let (code, out, err) = run(folder.path(), &["help"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("OASIS_<SECTION>__<KEY>"));
}

/// Spans of two layers and three steps, each stage of a layer under the next layer's attention.
fn trace() -> String {
    let mut events = Vec::new();
    let mut span = |cat: &str, name: &str, layer: u32, step: u32, ts: u32, dur: u32| {
        events.push(serde_json::json!({
            "ph": "X", "pid": 1, "tid": 0, "name": name, "cat": cat, "ts": ts, "dur": dur,
            "args": {"layer": layer, "step": step},
        }));
    };
    span("transfer", "offload", 0, 0, 0, 90);
    for step in 1..=3 {
        let start = 1000 * step;
        span("foreground", "draft head", 0, step, start, 50);
        for layer in 0..2 {
            let start = start + 50 + 400 * layer;
            span("foreground", "wait", layer, step - 1, start, 5);
            span("foreground", "qkv", layer, step, start + 5, 95);
            span("foreground", "attention", layer, step, start + 100, 200);
            span("foreground", "output + mlp", layer, step, start + 300, 100);
            span("predict", "predict", layer, step, start + 110, 50);
            span("select", "select", layer, step, start + 310, 20);
            span("transfer", "transfer", layer, step, start + 400, 40);
        }
    }
    serde_json::json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string()
}

#[test]
fn a_step_of_a_trace_is_drawn() {
    let folder = tempdir().unwrap();
    std::fs::write(folder.path().join("t.json"), trace()).unwrap();
    let (code, middle, err) = run(folder.path(), &["trace", "draw", "t.json", "--title", "a <small> model"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(middle.starts_with("<svg ") && middle.ends_with("</svg>\n"));
    for text in [
        "Decode step 2: 2 layers in 1.00 ms, a &lt;small&gt; model",
        "The stages work 0.22 ms: 64% under the foreground's work on the same layer,",
        "16% under other layers; the foreground waits 0.01 ms.",
        "<title>attention, layer 1: 0.200 ms</title>",
        ">predict</text>",
    ] {
        assert!(middle.contains(text), "{text} in {middle}");
    }
    let (code, out, err) = run(folder.path(), &["trace", "draw", "t.json", "--step", "3", "-o", "three.svg"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", ""));
    assert!(std::fs::read_to_string(folder.path().join("three.svg")).unwrap().contains("Decode step 3"));
}

#[test]
fn what_cannot_be_drawn_is_wrong_input() {
    let folder = tempdir().unwrap();
    let prefill = r#"{"ph":"X","cat":"transfer","name":"offload","ts":1,"dur":2,"args":{"layer":0,"step":0}}"#;
    let files = [
        ("t.json", trace()),
        ("text.json", "no JSON".to_owned()),
        ("other.json", "{\"a\": 1}".to_owned()),
        ("foreign.json", r#"{"traceEvents": [{"ph": "B", "ts": 1}]}"#.to_owned()),
        ("prefill.json", format!(r#"{{"traceEvents": [{prefill}]}}"#)),
    ];
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let cases: [(&[&str], &str); 8] = [
        (&["none.json"], "none.json: expected a trace"),
        (&["text.json"], "text.json: expected a trace"),
        (&["other.json"], "missing field `traceEvents`"),
        (&["foreign.json"], "found no spans of ours"),
        (&["prefill.json"], "expected at least one decode step"),
        (&["t.json", "--step", "0"], "--step: expected a step from 1 to 3, found 0"),
        (&["t.json", "--step", "4"], "--step: expected a step from 1 to 3, found 4"),
        (&["t.json", "-o", "no/such/folder.svg"], "--output no/such/folder.svg: expected a file that can be written"),
    ];
    for (args, message) in cases {
        let (code, out, err) = run(folder.path(), &[&["trace", "draw"], args].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.starts_with("error: ") && err.contains(message), "{args:?}: {err}");
        assert_eq!(err.matches("error:").count(), 1, "{err}");
    }
}
