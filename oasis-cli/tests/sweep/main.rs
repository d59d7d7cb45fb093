//! `oasis sweep` on the embedded model: killed, resumed, stale, wrong; and its report in a browser.

#[path = "../common/mod.rs"]
mod common;

mod anew;
mod report;
mod wrong;

use common::{oasis, outcome};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::{TempDir, tempdir};

/// 24 points of a workload that takes a fraction of a second each.
const SWEEP: &str = r#"
title = "Coverage over <budget>, cap and policy"

[[measure]]
command = "eval coverage"
arguments = ["--configured", "--file", "text.txt", "--context", "300", "--steps", "4", "--windows", "1"]

[grid]
kv.budget_blocks = [4, 8]
selector.fetch_ratio = [0.01, 0.1, 0.3, 1.0]

[[case]]
name = "draft-query"

[[case]]
name = "last-query"
settings = { predictor.kind = "last-query" }

[[case]]
name = "exact"
settings = { predictor.kind = "exact" }
"#;

/// Two points of a fraction of a second each.
const SMALL: &str = r#"
title = "Coverage over the cap"

[[measure]]
command = "eval coverage"
arguments = ["--configured", "--file", "text.txt", "--context", "100", "--steps", "3", "--windows", "1"]

[settings]
kv.budget_blocks = 4

[grid]
selector.fetch_ratio = [0.3, 1.0]
"#;

fn folder(sweep: &str) -> TempDir {
    let folder = tempdir().unwrap();
    std::fs::write(folder.path().join("tiny.toml"), sweep).unwrap();
    let verse = "And he said, I will not do it, if I find thirty there; and the king went into the city by night. ";
    std::fs::write(folder.path().join("text.txt"), verse.repeat(40)).unwrap();
    folder
}

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    outcome(oasis(folder).arg("sweep").args(args).stdin(Stdio::null()).output().unwrap())
}

/// Finished points and their contents.
fn points(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder.join("sweeps/tiny/points")) else { return BTreeMap::new() };
    let files = entries.map(|entry| entry.unwrap()).filter(|e| e.file_name().to_string_lossy().ends_with(".json"));
    files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())).collect()
}

#[test]
fn a_killed_sweep_goes_on_where_it_was() {
    let folder = folder(SWEEP);
    let mut command = oasis(folder.path());
    let mut child = command.args(["sweep", "tiny.toml"]).stdout(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while points(folder.path()).len() < 3 {
        assert!(start.elapsed() < Duration::from_secs(300), "no point is finished");
        assert!(child.try_wait().unwrap().is_none(), "the sweep ended before it could be killed");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = points(folder.path());
    assert!((3..24).contains(&before.len()), "{}", before.len());
    for (name, text) in &before {
        assert!(serde_json::from_slice::<serde_json::Value>(text).is_ok(), "{name} is not complete");
    }
    assert!(!folder.path().join("sweeps/tiny/report.html").exists());

    let (code, out, err) = run(folder.path(), &["tiny.toml"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.contains(&format!("24 points, {} of them finished before", before.len())), "{out}");
    assert_eq!(out.matches("eval coverage").count(), 24 - before.len(), "{out}");
    let after = points(folder.path());
    assert_eq!(after.len(), 24);
    assert!(before.iter().all(|(name, text)| after[name] == *text), "a finished point was measured again");

    // A third run measures nothing and finds the same.
    let results = folder.path().join("sweeps/tiny");
    let read = |name: &str| std::fs::read_to_string(results.join(name)).unwrap();
    let (csv, report) = (read("results.csv"), read("report.html"));
    let (_, out, _) = run(folder.path(), &["tiny.toml"]);
    assert!(!out.contains(" s  eval"), "{out}");
    assert_eq!((read("results.csv"), read("report.html")), (csv.clone(), report.clone()));

    assert_eq!(csv.lines().count(), 25);
    assert!(csv.lines().next().unwrap().starts_with("command,case,kv.budget_blocks,policy,selector.fetch_ratio,"));
    assert!(report.contains("Coverage over &lt;budget&gt;, cap and policy") && report.contains("24 of 24 points"));
    let network = ["src=", "href=\"", "@import", "url(", "fetch("];
    assert!(network.iter().all(|word| !report.contains(word)), "the report asks the network");
    let drawn = read("eval-coverage-mean.svg");
    assert_eq!(drawn.matches("<circle").count(), 24);
    let all: serde_json::Value = serde_json::from_str(&read("results.json")).unwrap();
    let point = &all["points"][5];
    assert_eq!((point["case"].as_str(), &point["axes"]["kv.budget_blocks"]), (Some("draft-query"), &8.into()));
    assert_eq!(point["measured"]["config"]["selector.fetch_ratio"], 0.1);
    assert_eq!(point["measured"]["provenance"]["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn a_dry_run_measures_nothing() {
    let folder = folder(SWEEP);
    let (code, out, err) = run(folder.path(), &["--dry-run", "tiny.toml"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out.matches("to do").count(), 24);
    assert!(out.contains("last-query kv.budget_blocks=4 selector.fetch_ratio=0.3"), "{out}");
    assert!(!folder.path().join("sweeps").exists());
}

#[test]
fn arguments_of_the_measurements_are_replaced_for_a_trial() {
    let folder = folder(&SWEEP.replace("[0.01, 0.1, 0.3, 1.0]", "[0.1]"));
    let (code, out, err) = run(folder.path(), &["--argument", "context=200", "tiny.toml"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let points = points(folder.path());
    assert!(!points.is_empty());
    for point in points.values() {
        assert!(String::from_utf8_lossy(point).contains("\"--context\",\n    \"200\""), "{point:?}");
    }
    for (argument, message) in [
        ("contex=200", "--argument contex=200: expected an argument of a measurement, found none that names --contex"),
        ("context", "--argument: expected NAME=VALUE, found context"),
    ] {
        let (code, out, err) = run(folder.path(), &["--argument", argument, "tiny.toml"]);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.starts_with(&format!("error: {message}\n  hint: ")), "{err}");
    }
}

#[test]
fn a_point_that_fails_does_not_end_the_others() {
    let sweep = SWEEP.replace("kv.budget_blocks = [4, 8]", "kv.budget_blocks = [4]\n\"--context\" = [100000, 200]");
    let sweep = sweep.replace("\"--context\", \"300\", ", "").replace("[0.01, 0.1, 0.3, 1.0]", "[0.1]");
    let folder = folder(&sweep);
    let (code, out, err) = run(folder.path(), &["tiny.toml"]);
    assert_eq!(code, 1, "{out}");
    let message = "error: 3 points failed, all with: ";
    assert!(err.starts_with(message) && err.contains("expected at least 100005 tokens"), "{err}");
    assert_eq!(err.matches("expected at least").count(), 1, "{err}");
    assert_eq!(points(folder.path()).len(), 3);
    assert!(out.contains("3 of 6 points"), "{out}");
}

#[test]
fn without_a_finished_point_there_is_no_report() {
    let folder = folder(&SMALL.replace("\"100\"", "\"100000\""));
    let (code, out, err) = run(folder.path(), &["tiny.toml"]);
    assert_eq!(code, 1, "{out}");
    assert!(err.starts_with("error: 2 points failed, all with: "), "{err}");
    let results: Vec<_> = std::fs::read_dir(folder.path().join("sweeps/tiny")).unwrap().collect();
    assert_eq!(results.len(), 1, "{results:?}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_report_of_what_is_finished() {
    let folder = folder(SWEEP);
    let mut command = oasis(folder.path());
    command.args(["sweep", "tiny.toml"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let start = Instant::now();
    while points(folder.path()).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(300), "no point is finished");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (code, out, err) = outcome(child.wait_with_output().unwrap());
    assert_eq!((code, err.as_str()), (130, "error: interrupted\n"), "{out}");
    let finished = points(folder.path()).len();
    assert!((1..24).contains(&finished), "{finished}");
    let report = std::fs::read_to_string(folder.path().join("sweeps/tiny/report.html")).unwrap();
    assert!(report.contains(&format!("{finished} of 24 points")), "{out}");
}
