//! Numbers and settings that cannot be, on the binary: one clear error each, before anything is measured.

mod common;

use common::{oasis, outcome};
use std::path::Path;
use std::process::Stdio;
use tempfile::tempdir;

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    outcome(oasis(folder).args(args).stdin(Stdio::null()).output().unwrap())
}

/// Arguments, the one that is wrong, and what was expected of it.
const WRONG_NUMBERS: [(&[&str], &str, &str); 36] = [
    (&["eval", "agreement", "--windows", "0"], "--windows", "a whole number from 1 to"),
    (&["eval", "perplexity", "--windows", "0"], "--windows", "a whole number from 1 to"),
    (&["eval", "divergence", "--windows", "-1"], "--windows", "a whole number from 1 to"),
    (&["eval", "coverage", "--windows", "1.5"], "--windows", "a whole number from 1 to"),
    (&["eval", "perplexity", "--file", "text.txt", "--context", "0"], "--context", "a whole number from 1 to"),
    // The first step sees the full KV with every policy.
    (&["eval", "perplexity", "--file", "text.txt", "--steps", "1"], "--steps", "a whole number from 2 to"),
    (&["eval", "turnover", "--file", "text.txt", "--steps", "0"], "--steps", "a whole number from 2 to"),
    (&["eval", "recall", "--per", "0"], "--per", "a whole number from 1 to"),
    (&["trace", "record", "--output", "x", "--windows", "0"], "--windows", "a whole number from 1 to"),
    (
        &["trace", "record", "--output", "x", "--file", "text.txt", "--steps", "0"],
        "--steps",
        "a whole number from 2 to",
    ),
    (&["bench", "cpu", "--steps", "0"], "--steps", "a whole number from 1 to"),
    (&["bench", "cpu", "--context", "18446744073709551615"], "--context", "a whole number from 1 to"),
    (&["bench", "cpu", "--steps", "6148914691236517205"], "--steps", "a whole number from 1 to"),
    (&["bench", "decode", "--context", "18446744073709551615"], "--context", "a whole number from 1 to"),
    (&["bench", "decode", "--batch", "1,0"], "--batch", "a whole number from 1 to"),
    (&["bench", "decode", "--batch", ""], "--batch", "a whole number from 1 to"),
    (&["bench", "decode", "--steps", "0"], "--steps", "a whole number from 1 to"),
    (&["bench", "decode", "--alias-host", "0"], "--alias-host", "a whole number from 1 to"),
    (&["bench", "decode", "--hbm-limit", "0"], "--hbm-limit", "a number of bytes above 0"),
    (&["bench", "decode", "--host-memory", "lots"], "--host-memory", "a number of bytes above 0"),
    (&["bench", "decode", "--fetch-ratio", "2"], "--fetch-ratio", "a number above 0 and at most 1"),
    (&["bench", "decode", "--fetch-ratio", "nan"], "--fetch-ratio", "a number above 0 and at most 1"),
    (&["bench", "traffic", "--fetch-ratio", "-1"], "--fetch-ratio", "a number above 0 and at most 1"),
    (&["bench", "traffic", "--steps", "18446744073709551615"], "--steps", "a whole number from 1 to"),
    (&["bench", "prefill", "--context", "16,0"], "--context", "a whole number from 1 to"),
    (&["bench", "prefill", "--repeat", "0"], "--repeat", "a whole number from 1 to"),
    (&["bench", "serve-sim", "--concurrency", "0"], "--concurrency", "a whole number from 1 to"),
    (&["bench", "serve-sim", "--input", "0"], "--input", "a whole number from 1 to"),
    (&["bench", "serve-sim", "--output", "3"], "--output", "a whole number from 4 to"),
    (&["bench", "serve-sim", "--seconds", "-1"], "--seconds", "a whole number from 1 to"),
    (&["bench", "kernels", "--batch", "0"], "--batch", "a whole number from 1 to"),
    (&["bench", "kernels", "--context", "15"], "--context", "a whole number from 16 to"),
    (&["trace", "replay", "x", "--link-bandwidth", "0"], "--link-bandwidth", "a number of bytes above 0"),
    (&["trace", "replay", "x", "--link-latency-us", "-4"], "--link-latency-us", "microseconds of at least 0"),
    (&["trace", "replay", "x", "--layer-us", "inf"], "--layer-us", "microseconds of at least 0"),
    (&["bench", "decode", "--shape", "nonsense"], "--shape", "one of qwen3-8b, llama-3.1-8b"),
];

#[test]
fn a_number_that_cannot_be_is_named_with_its_argument() {
    let folder = tempdir().unwrap();
    for (args, argument, expected) in WRONG_NUMBERS {
        let (code, out, err) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        let found = args.last().unwrap().split(',').next_back().unwrap();
        assert!(err.starts_with(&format!("error: invalid value '{found}' for '{argument} <")), "{args:?}: {err}");
        assert!(err.contains(&format!(">': expected {expected}")), "{args:?}: {err}");
    }
}

/// What needs no device is checked on a machine without one, too.
#[test]
fn wrong_measurements_are_one_clear_error() {
    let folder = tempdir().unwrap();
    std::fs::write(folder.path().join("text.txt"), "And he said, I will not do it. ".repeat(20)).unwrap();
    let one = ["--file", "text.txt", "--windows", "1"];
    let shape = ["--shape", "qwen3-8b"];
    let on_shape = |bench, args: &[&'static str]| [&["bench", bench], &shape[..], args].concat();
    let too_long = "as 59 more are decoded and qwen3-8b has 40,960 positions, found 50,000\n  hint: lower --context";
    let cases: [(Vec<&str>, &str); 23] = [
        (vec!["eval", "recall", "--task", "nope"], "--task: expected one of copy, count"),
        (vec!["eval", "recall", "--length", "100"], "--length: expected one of 4096, 8192, 16384, found 100"),
        (vec!["eval", "coverage", "--context", "5"], "found 5\n  hint: --file takes a text of any length"),
        (vec!["eval", "coverage", "--file", "nofile.txt"], "--file nofile.txt: expected readable UTF-8 text"),
        (vec!["eval", "coverage", "--with", "foo"], "policy foo: --with foo: expected key=value"),
        (
            vec!["eval", "coverage", "--file", "text.txt", "--context", "999999999", "--steps", "999999999"],
            "the text: expected at least 1999999999 tokens, found ",
        ),
        // No step would choose among blocks.
        (
            [&["eval", "agreement", "--context", "64"], &one[..], &["--steps", "17"]].concat(),
            "kv.budget_blocks: expected fewer than the 5 blocks of the longest context: choices are compared, found 128",
        ),
        (
            [&["eval", "turnover", "--context", "64"], &one[..], &["--set", "kv.budget_blocks=7"]].concat(),
            "kv.budget_blocks: expected fewer than the 7 blocks",
        ),
        (vec!["run", "--file", "nofile.txt"], "--file nofile.txt: expected readable text"),
        (
            vec!["trace", "record", "--output", "no/such/x"],
            "--output no/such/x: expected a file that can be written, found: entity not found\n",
        ),
        (
            vec!["bench", "cpu", "--context", "16384"],
            "--context: expected at most 16,214 tokens, as 170 more are decoded",
        ),
        (vec!["bench", "cpu", "--steps", "999999999"], "--context: expected at most 0 tokens"),
        (
            vec!["bench", "cpu", "--set", "device.kind=cuda"],
            "device.kind: expected cpu, which is measured here, found cuda",
        ),
        (
            vec!["bench", "link", "--set", "device.kind=cpu"],
            "device.kind: expected cuda, which is measured here, found cpu",
        ),
        (vec!["bench", "decode", "--set", "device.kind=tpu"], "device.kind: expected `cpu` or `cuda`, found \"tpu\""),
        (
            on_shape("decode", &["--set", "device.kind=cpu"]),
            "device.kind: expected cuda, which is measured here, found cpu",
        ),
        (on_shape("decode", &["--context", "50000"]), too_long),
        (on_shape("traffic", &["--context", "16,40959"]), "--context: expected at most 40,830 tokens, as 130 more"),
        (on_shape("prefill", &["--context", "16,40959"]), "--context: expected at most 40,958 tokens, as 2 more"),
        (on_shape("serve-sim", &["--input", "40000"]), "--input: expected at most 38,912 tokens, as 2,048 more"),
        (on_shape("decode", &["--set", "transport.depth=99"]), "transport.depth: expected 2 to 16 entries in flight"),
        (on_shape("decode", &["--set", "transport.ctas=1025"]), "transport.ctas: expected at most 1024 thread blocks"),
        (vec!["explain", "--set", "device.prefill_multiprocessors=99999999999"], "expected a whole number from 0 to"),
    ];
    for (args, message) in cases {
        let (code, out, err) = run(folder.path(), &args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.starts_with("error: ") && err.contains(message), "{args:?}: {err}");
        assert!(err.contains("\n  hint: "), "{args:?}: {err}");
        assert_eq!(err.matches("error:").count(), 1, "{err}");
    }
}

/// The measurement goes on with the windows that there are.
#[test]
fn fewer_windows_than_asked_for_are_a_warning() {
    let folder = tempdir().unwrap();
    std::fs::write(folder.path().join("text.txt"), "And he said, I will not do it. ".repeat(20)).unwrap();
    let measure = |windows: &str, context: &str| {
        let args = ["eval", "perplexity", "--configured", "--json", "--file", "text.txt", "--steps", "2"];
        run(folder.path(), &[&args[..], &["--context", context, "--windows", windows]].concat())
    };
    let (code, out, err) = measure("8", "100");
    assert_eq!(code, 0, "{err}");
    assert_eq!(err, "warning: the text has room for 1 window of 103 tokens, 8 were asked for\n");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&out).unwrap()[0]["tokens"], 1);
    let (code, _, err) = measure("1", "100");
    assert_eq!((code, err.as_str()), (0, ""));
}
