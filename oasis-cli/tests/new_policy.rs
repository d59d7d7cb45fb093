//! `oasis new-policy`: what it writes compiles and passes the suite of its role.

mod common;

use common::{oasis, outcome};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::tempdir;

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    outcome(oasis(folder).arg("new-policy").args(args).stdin(Stdio::null()).output().unwrap())
}

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Makes `name` a package of the workspace that `folder` is, so that one build serves all roles.
fn scaffold(folder: &Path, role: &str, name: &str) {
    let (code, out, err) = run(folder, &[role, name, "--checkout", checkout().to_str().unwrap()]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    for file in ["Cargo.toml", "src/lib.rs", "src/main.rs", "tests/conformance.rs"] {
        assert!(out.contains(&format!("{name}/{file}\n")), "{out}");
        assert!(!std::fs::read_to_string(folder.join(name).join(file)).unwrap().contains("{{"), "{file}");
    }
    // The program is that of tests/example-policy, which the workspace builds; here it would build every crate once more.
    let code = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().filter(|line| !line.starts_with("//")).map(|line| format!("{line}\n")).collect::<String>()
    };
    let example = code(&checkout().join("tests/example-policy/src/main.rs"));
    let program = folder.join(name).join("src/main.rs");
    assert_eq!(code(&program).replace(&name.replace('-', "_"), "oasis_example_policy"), example);
    std::fs::remove_file(program).unwrap();
    let manifest = folder.join(name).join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let cli = text.lines().find(|line| line.starts_with("oasis-cli = { path = ")).unwrap();
    std::fs::write(&manifest, text.replace(&format!("{cli}\n"), "")).unwrap();
}

#[test]
fn new_crates_of_every_role_pass_their_tests() {
    let folder = tempdir().unwrap();
    for role in ["selector", "summarizer", "predictor", "transport", "store"] {
        scaffold(folder.path(), role, &format!("my-{role}"));
    }
    // Versions and profiles of the repository's own workspace: what is compiled already is used again, offline.
    let workspace = std::fs::read_to_string(checkout().join("Cargo.toml")).unwrap();
    let profiles = &workspace[workspace.find("[profile.dev]").unwrap()..];
    let manifest = format!("[workspace]\nresolver = \"3\"\nmembers = [\"my-*\"]\n\n{profiles}");
    std::fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(checkout().join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();

    // target/debug/oasis
    let target = Path::new(env!("CARGO_BIN_EXE_oasis")).ancestors().nth(2).unwrap();
    let mut command = Command::new(env!("CARGO"));
    command.args(["test", "--tests", "--offline"]).current_dir(folder.path()).env("CARGO_TARGET_DIR", target);
    let (code, out, err) = outcome(command.stdin(Stdio::null()).output().unwrap());
    assert_eq!(code, 0, "{out}\n{err}");
    let tests = out + &err;
    let passed = tests.lines().filter_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next());
    assert_eq!(passed.map(|count| count.parse::<usize>().unwrap()).sum::<usize>(), 9, "{tests}");
    // The profiles name crates that these do not need.
    let is_ours = |line: &&str| line.starts_with("warning") && !line.contains("profile package spec");
    assert_eq!(tests.lines().find(is_ours), None, "{tests}");
}

#[test]
fn wrong_names_and_folders_are_wrong_input() {
    let folder = tempdir().unwrap();
    std::fs::create_dir(folder.path().join("there")).unwrap();
    let cases: [(&[&str], &str); 6] = [
        (&["selector", "My_Selector"], "the name: expected new lower-case words with hyphens, found My_Selector"),
        (&["selector", "a--b"], "the name: expected"),
        (
            &["selector", "capped-lru"],
            "the name: expected new lower-case words with hyphens, found capped-lru, which is",
        ),
        (&["selector", "there"], "there: expected a folder that is not there yet"),
        (&["selector", "new", "--checkout", "there"], "--checkout: expected a checkout of OasisKV"),
        (&["router", "new"], "invalid value 'router'"),
    ];
    for (args, message) in cases {
        let (code, out, err) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(err.starts_with(&format!("error: {message}")), "{args:?}: {err}");
        assert!(!folder.path().join("new").exists());
    }
}

#[test]
fn without_a_checkout_cargo_fetches_the_repository() {
    let folder = tempdir().unwrap();
    let (code, _, err) = run(folder.path(), &["selector", "far-away", "--folder", "a/b"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let manifest = std::fs::read_to_string(folder.path().join("a/b/Cargo.toml")).unwrap();
    let expected = format!("oasis-core = {{ git = \"{}\" }}", env!("CARGO_PKG_REPOSITORY"));
    assert!(manifest.contains(&expected), "{manifest}");
}

/// What cargo says of the crate at `folder`, without building it.
fn metadata(folder: &Path) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO"));
    command.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).current_dir(folder);
    outcome(command.stdin(Stdio::null()).output().unwrap())
}

#[test]
fn inside_a_workspace_cargo_accepts_the_crate() {
    let folder = tempdir().unwrap();
    let manifest = "[workspace]\nresolver = \"3\"\nmembers = [\"policies/*\"]\n";
    std::fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    std::fs::create_dir(folder.path().join("policies")).unwrap();
    for (path, is_member) in [("stranger", false), ("policies/member", true), ("policies/../deep/er/one", false)] {
        let (code, _, err) = run(folder.path(), &["selector", "my-selector", "--folder", path]);
        assert_eq!((code, err.as_str()), (0, ""));
        let path = folder.path().join(path);
        let manifest = std::fs::read_to_string(path.join("Cargo.toml")).unwrap();
        assert_eq!(manifest.contains("\n[workspace]\n"), !is_member, "{manifest}");
        let (code, out, err) = metadata(&path);
        assert!(code == 0 && out.contains("\"name\":\"my-selector\""), "{}: {err}", path.display());
    }
    // Alone it needs no workspace.
    let alone = tempdir().unwrap();
    assert_eq!(run(alone.path(), &["selector", "my-selector"]).0, 0);
    let manifest = std::fs::read_to_string(alone.path().join("my-selector/Cargo.toml")).unwrap();
    assert!(!manifest.contains("[workspace]"), "{manifest}");
}
