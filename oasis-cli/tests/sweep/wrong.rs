//! What is wrong is said before anything is measured.

use crate::{SMALL, folder, points, run};
use std::path::Path;

/// Runs a sweep that must be refused without a measurement, and returns what is said.
fn refused(folder: &Path, args: &[&str]) -> String {
    let (code, out, err) = run(folder, args);
    assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
    assert!(err.starts_with("error: ") && err.contains("\n  hint: "), "{args:?}: {err}");
    assert!(points(folder).is_empty(), "{args:?}: {err}");
    err
}

#[test]
fn what_is_wrong_is_said_before_anything_runs() {
    let measure = "[[measure]]\ncommand = \"eval recall\"\n";
    let cases = [
        ("title = 3".to_owned(), "tiny.toml: expected a sweep"),
        ("title = \"t\"\nmeasure = []".to_owned(), "tiny.toml: measure: expected at least one measurement"),
        (format!("title = \"t\"\n{measure}[grid]\nkv.budget_blocs = [1]"), "kv.budget_blocs: expected one of the keys"),
        (format!("title = \"t\"\n{measure}[grid]\nkv.budget_blocks = 1"), "grid.kv.budget_blocks: expected a list"),
        ("title = \"t\"\n[[measure]]\ncommand = \"run\"".to_owned(), "measure: expected a command of `oasis eval` or"),
    ];
    for (sweep, message) in cases {
        let folder = folder(&sweep);
        let err = refused(folder.path(), &["tiny.toml"]);
        assert!(err.starts_with(&format!("error: {message}")), "{sweep}: {err}");
    }
}

#[test]
fn commands_that_measure_nothing_are_refused_with_those_that_do() {
    for command in ["eval nope", "eval", "bench", "trace record", "run"] {
        let folder = folder(&format!("title = \"t\"\n[[measure]]\ncommand = \"{command}\""));
        let err = refused(folder.path(), &["tiny.toml"]);
        let problem = format!(
            "error: measure: expected a command of `oasis eval` or `oasis bench`, or `trace replay`, found {command}"
        );
        let (first, hint) = err.trim_end().split_once('\n').unwrap();
        assert_eq!(first, problem);
        assert!(hint.starts_with("  hint: one of eval recall, ") && hint.contains(", trace replay"), "{hint}");
    }
}

#[test]
fn what_points_need_is_looked_for_once() {
    let cases = [
        (SMALL.replace("text.txt", "no.txt"), "--file no.txt: expected a readable file, found: No such file"),
        (SMALL.replace("text.txt", "."), "--file .: expected a readable file, found: a folder"),
        (format!("{SMALL}[[case]]\nname = \"c\"\nsettings = {{ model.path = \"no.gguf\" }}"), "no.gguf: expected "),
        (SMALL.replace("\"--configured\"", "\"--model\", \"no\""), "no: expected a checkpoint folder"),
        (
            SMALL.replace("\"--configured\"", "\"--with\", \"selector.fetch_ratio=7\""),
            "policy selector.fetch_ratio=7: selector.fetch_ratio: expected ",
        ),
        // No machine has so many GPUs; most have none.
        (SMALL.replace("kv.budget_blocks", "device = { kind = \"cuda\", ordinal = 99 }\nkv.budget_blocks"), "CUDA"),
        (
            SMALL.replace("[0.3, 1.0]", "[0.3, 1.0, 7.0]"),
            "1 of 3 points, the first eval coverage  selector.fetch_ratio=7.0: selector.fetch_ratio: expected ",
        ),
        (
            "title = \"t\"\n[[measure]]\ncommand = \"eval recall\"\narguments = [\"--tasks\", \"no.jsonl\"]".to_owned(),
            "--tasks no.jsonl: expected a readable file",
        ),
        (
            "title = \"t\"\n[[measure]]\ncommand = \"trace replay\"\narguments = [\"no.selections\"]".to_owned(),
            "RECORDING no.selections: expected a readable file",
        ),
    ];
    for (sweep, message) in cases {
        let folder = folder(&sweep);
        let err = refused(folder.path(), &["tiny.toml"]);
        assert!(err.starts_with(&format!("error: {message}")), "{sweep}: {err}");
        assert_eq!(err.matches("expected").count(), 1, "{err}");
        assert!(!folder.path().join("sweeps").exists(), "{err}");
    }
}

#[test]
fn plots_are_checked_before_and_at_the_first_point() {
    let plot = |plot: &str| folder(&format!("{SMALL}\n[[plot]]\nname = \"p\"\n{plot}\n"));
    let err = refused(plot("y = \"mean\"\ncommand = \"eval recall\"").path(), &["tiny.toml"]);
    assert!(err.starts_with("error: tiny.toml: plot: p: command: expected one of the sweep's, found eval recall\n"));
    let outside = folder(&format!("{SMALL}\n[[plot]]\nname = \"../../p\"\ny = \"mean\"\n"));
    let err = refused(outside.path(), &["tiny.toml"]);
    assert!(err.starts_with("error: tiny.toml: plot: name: expected a file name without a folder"), "{err}");

    for (text, message) in [
        ("y = \"maen\"", "tiny.toml: plot p: y: expected a figure, found maen\n  hint: eval coverage has "),
        (
            "y = \"mean\"\nx = \"fetch_ratio\"",
            "tiny.toml: plot p: x: expected a key of the grid with numbers, or a figure, found fetch_ratio\n  \
             hint: eval coverage has selector.fetch_ratio, ",
        ),
    ] {
        let folder = plot(text);
        // The second time the finished point says so at once.
        for measured in [1, 0] {
            let (code, out, err) = run(folder.path(), &["tiny.toml"]);
            assert_eq!((code, out.matches(" s  eval").count()), (2, measured), "{out}");
            assert!(err.starts_with(&format!("error: {message}")) && err.contains("mean"), "{err}");
        }
        assert_eq!(points(folder.path()).len(), 1);
        assert!(!folder.path().join("sweeps/tiny/report.html").exists());
    }
}

#[test]
fn results_need_a_folder_of_their_own() {
    let folder = folder(SMALL);
    std::fs::create_dir(folder.path().join("other")).unwrap();
    std::fs::copy(folder.path().join("tiny.toml"), folder.path().join("other/tiny.toml")).unwrap();
    let err = refused(folder.path(), &["tiny.toml", "other/tiny.toml"]);
    let problem = "error: expected files of different names, as sweeps/tiny holds one sweep's results, found tiny.toml and \
                   other/tiny.toml\n";
    assert!(err.starts_with(problem), "{err}");
    let err = refused(folder.path(), &["-o", "text.txt", "tiny.toml"]);
    assert!(err.starts_with("error: text.txt: expected a folder for results, found a file\n"), "{err}");
}

#[test]
fn settings_that_the_sweep_overrides_are_named() {
    let folder = folder(SMALL);
    let (code, _, err) = run(
        folder.path(),
        &[
            "--dry-run",
            "--set",
            "kv.budget_blocks=8",
            "--set",
            "selector.fetch_ratio=0.5",
            "--set",
            "engine.max_batch=1",
            "tiny.toml",
        ],
    );
    let warning = |set: &str| format!("warning: --set {set}: tiny.toml sets this key itself, and its value counts\n");
    assert_eq!((code, err), (0, warning("kv.budget_blocks=8") + &warning("selector.fetch_ratio=0.5")));
}
