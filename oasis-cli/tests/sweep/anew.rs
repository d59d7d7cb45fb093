//! Which points are measured again: those whose files changed, and with `--fresh` all of them.

use crate::common::{oasis, outcome};
use crate::{SMALL, folder, points, run};
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs the sweep and returns how many points were measured, and what was printed.
fn measured(folder: &Path, args: &[&str]) -> (usize, String) {
    let (code, out, err) = run(folder, &[args, &["tiny.toml"]].concat());
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    (out.lines().filter(|line| line.contains(" s  ")).count(), out)
}

#[test]
fn a_changed_file_is_measured_anew() {
    let folder = folder(SMALL);
    assert_eq!(measured(folder.path(), &[]).0, 2);
    assert_eq!(measured(folder.path(), &[]).0, 0);
    let text = folder.path().join("text.txt");
    let before = std::fs::read_to_string(&text).unwrap();
    std::fs::write(&text, before.replace("thirty", "twenty")).unwrap();
    assert_eq!(measured(folder.path(), &[]).0, 2);
    let report = folder.path().join("sweeps/tiny/results.json");
    let results: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    let digest = results["points"][0]["measured"]["inputs"]["text.txt"].as_str().unwrap();
    assert!(digest.starts_with("sha256 ") && digest.len() == 71, "{digest}");
    // What was measured on the old text is still known.
    std::fs::write(&text, before).unwrap();
    assert_eq!(measured(folder.path(), &[]).0, 0);
}

#[test]
fn a_changed_recording_is_replayed_anew() {
    let sweep = "title = \"t\"\n[[measure]]\ncommand = \"trace replay\"\narguments = [\"kept\", \"--configured\"]\n\
                 [grid]\nkv.budget_blocks = [2, 4]\n";
    let folder = folder(sweep);
    let record = |steps: &str| {
        let mut command = oasis(folder.path());
        command.args(["trace", "record", "--file", "text.txt", "--context", "100", "--windows", "1", "-o", "kept"]);
        command.args(["--set", "kv.budget_blocks=4", "--steps", steps]).stdin(Stdio::null());
        let (code, _, err) = outcome(command.output().unwrap());
        assert_eq!(code, 0, "{err}");
    };
    record("4");
    assert_eq!(measured(folder.path(), &[]).0, 2);
    record("5");
    assert_eq!(measured(folder.path(), &[]).0, 2);
    assert_eq!(measured(folder.path(), &[]).0, 0);
}

#[test]
fn points_of_another_program_are_kept_but_named() {
    let folder = folder(SMALL);
    let other = folder.path().join("my-oasis");
    std::fs::copy(env!("CARGO_BIN_EXE_oasis"), &other).unwrap();
    // As a build of another day would be.
    let day = std::time::UNIX_EPOCH + std::time::Duration::from_secs(951_868_800);
    std::fs::File::options().append(true).open(&other).unwrap().set_modified(day).unwrap();
    let mut command = Command::new(&other);
    let command = command.current_dir(folder.path()).env("HOME", folder.path()).stdin(Stdio::null());
    let (code, out, err) = outcome(command.args(["sweep", "tiny.toml"]).output().unwrap());
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(!out.contains("another program"), "{out}");

    let (count, out) = measured(folder.path(), &[]);
    assert_eq!((count, out.matches("another program").count()), (0, 1), "{out}");
    let line = out.lines().nth(1).unwrap();
    assert!(
        line.starts_with(&format!("  2 of them by another program (oasis {}, ", env!("CARGO_PKG_VERSION"))),
        "{out}"
    );
    assert!(
        line.contains(" bytes of 2000-03-01T00:00:00.000000000Z") && line.ends_with("; --fresh measures all anew"),
        "{out}"
    );

    let before = points(folder.path());
    let (count, out) = measured(folder.path(), &["--fresh"]);
    assert_eq!((count, out.contains("2 points, 0 of them finished before\n")), (2, true), "{out}");
    let after = points(folder.path());
    assert!(after.keys().eq(before.keys()) && after.iter().all(|(name, text)| before[name] != *text));
    assert!(!measured(folder.path(), &[]).1.contains("another program"));
}
