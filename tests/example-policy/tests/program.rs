//! The program with the crate's selectors has them wherever the built-in ones are.

use std::path::Path;
use std::process::{Command, Stdio};

fn oasis(folder: &Path, args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oasis-example-policy"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OASIS_")) {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

const SWEEP: &str = r#"
title = "Selectors"
measure = [{ command = "trace replay", arguments = ["run.selections", "--configured", "--selectors"] }]
grid = { kv.budget_blocks = [4, 8, 16] }
plot = [{ name = "hits", x = "kv.budget_blocks", y = "hit_rate" }]
"#;

#[test]
fn plugins_are_listed_configured_recorded_replayed_and_plotted() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let list = oasis(folder, &["list"]);
    let line = |kind: &str| list.lines().find(|line| line.trim_start().starts_with(kind)).unwrap().to_owned();
    assert!(line("upper-half").contains("oasis-example-policy") && line("upper-half").contains("yes"), "{list}");
    assert!(line("top-only").contains("no"), "{list}");
    let explained = oasis(folder, &["explain", "--set", "selector.kind=upper-half"]);
    assert!(explained.contains("argument --set selector.kind=upper-half"), "{explained}");

    let verse = "And he said, I will not do it, if I find thirty there; and the king went into the city by night. ";
    std::fs::write(folder.join("text.txt"), verse.repeat(40)).unwrap();
    std::fs::write(folder.join("selectors.toml"), SWEEP).unwrap();
    let window = ["--file", "text.txt", "--context", "400", "--steps", "20", "--windows", "1"];
    let record = ["trace", "record", "--output", "run.selections", "--set", "kv.budget_blocks=16"];
    let setting = ["--set", "selector.kind=upper-half"];
    let out = oasis(folder, &[&record[..], &setting[..], &window[..]].concat());
    // 6 layers, one selection a layer and step.
    assert!(out.contains("run.selections: 120 selections of 20 steps after 1 prompts"), "{out}");

    oasis(folder, &["sweep", "selectors.toml"]);
    let results = folder.join("sweeps/selectors");
    let drawn = std::fs::read_to_string(results.join("hits.svg")).unwrap();
    for kind in ["upper-half", "top-only", "capped-lru", "static"] {
        assert!(drawn.contains(&format!(">selector.kind={kind}</text>")), "{kind}: {drawn}");
    }
    let table: serde_json::Value =
        serde_json::from_str(&oasis(folder, &["trace", "replay", "run.selections", "--json"])).unwrap();
    let [live, replayed] = table.as_array().unwrap().as_slice() else { panic!("{table}") };
    for figure in ["hits", "misses", "admitted", "deferred", "filled", "link_bytes", "cap"] {
        assert_eq!(live[figure], replayed[figure], "{figure}");
    }
    assert!(live["misses"].as_u64().unwrap() > 0, "{live}");
}
