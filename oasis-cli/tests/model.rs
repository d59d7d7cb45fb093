//! `oasis model`.

mod common;

use common::{oasis, outcome};
use std::path::Path;
use tempfile::tempdir;

fn run(args: &[&str]) -> (i32, String, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    outcome(oasis(root).args(["model", "ttft"]).args(args).output().unwrap())
}

#[test]
fn the_book_shows_what_the_model_says() {
    let page = include_str!("../../docs/src/results/paper-nodes.md");
    for args in ["", " --measured docs/experiments/ttft/paper.toml --missed share --hit 0.1,0.9"] {
        let (code, out, err) = run(&args.split_whitespace().collect::<Vec<_>>());
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(page.contains(&format!("$ oasis model ttft{args}\n{out}```")), "{out}");
    }
    let folder = tempdir().unwrap();
    let picture = folder.path().join("ttft.svg");
    assert_eq!(run(&["--plot", picture.to_str().unwrap()]).0, 0);
    let drawn = std::fs::read_to_string(picture).unwrap();
    assert_eq!(drawn, include_str!("../../docs/src/images/ttft.svg"), "the book's picture");
}

#[test]
fn points_come_as_json_and_impossible_ones_are_refused() {
    let (code, out, _) = run(&["--json", "--context", "1000,2000", "--hit", "0,1", "--link", "10"]);
    assert_eq!(code, 0);
    let points: Vec<serde_json::Value> = serde_json::from_str(&out).unwrap();
    let of = |key: &str| points.iter().map(|point| point[key].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("context"), [1000.0, 1000.0, 2000.0, 2000.0]);
    assert_eq!(of("hit_rate"), [0.0, 1.0, 0.0, 1.0]);
    assert!(of("speedup").iter().all(|speedup| *speedup >= 1.0));
    for (args, expected) in [
        (["--hit", "1.5"], "--hit: expected a share of 0 to 1, found 1.5"),
        (["--link", "0"], "--link: expected a rate above 0, found 0"),
        (["--context", "0"], "--context: expected a number of tokens from 1 to 2^32, found 0"),
        (["--measured", "none.toml"], "none.toml: expected a readable file"),
        (["--plot", "/none/here.svg"], "--plot /none/here.svg: expected a file that can be written"),
    ] {
        let (code, _, err) = run(&args);
        assert!(code == 2 && err.contains(expected), "{code}: {err}");
    }
}
