//! `oasis pull` against a hub on this machine.

#[path = "common/mod.rs"]
mod common;
#[path = "common/hub.rs"]
mod hub;

use common::{oasis, outcome};
use hub::{COMMIT, Fault, Hub};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

const WEIGHTS: &str = "model.safetensors";

struct Pull {
    hub: Hub,
    home: TempDir,
}

impl Pull {
    /// A repository with a small model: 100 kB of weights under their SHA-256.
    fn new() -> Self {
        let hub = Hub::start();
        let weights = weights();
        let tag = Sha256::digest(&weights).iter().map(|byte| format!("{byte:02x}")).collect();
        hub.put("config.json", b"{}", None).put("tokenizer.json", b"{\"model\": {}}", None).put(
            "README.md",
            b"#",
            None,
        );
        hub.put("tiny-Q8_0.gguf", b"GGUF", None).put(WEIGHTS, &weights, Some(tag));
        Self { hub, home: tempdir().unwrap() }
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = oasis(self.home.path());
        outcome(command.args(["pull", "--endpoint", &self.hub.endpoint]).args(args).output().unwrap())
    }

    fn cache(&self) -> PathBuf {
        self.home.path().join(".cache/huggingface/hub/models--owner--model")
    }

    fn snapshot(&self) -> PathBuf {
        self.cache().join("snapshots").join(COMMIT)
    }

    /// Names of files in the snapshot that can be opened.
    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.snapshot())
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().exists())
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Blobs that look complete.
    fn blobs(&self) -> usize {
        let blobs = fs::read_dir(self.cache().join("blobs")).into_iter().flatten().flatten();
        blobs.filter(|entry| entry.path().extension().is_none()).count()
    }
}

fn weights() -> Vec<u8> {
    (0..100_000u32).map(|i| (i % 251) as u8).collect()
}

#[test]
fn a_model_arrives_and_the_second_pull_finds_it() {
    let pull = Pull::new();
    let (code, out, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(Path::new(out.trim_end()), pull.snapshot());
    assert_eq!(pull.files(), ["config.json", WEIGHTS, "tokenizer.json"]);
    assert_eq!(fs::read(pull.snapshot().join(WEIGHTS)).unwrap(), weights());
    assert_eq!(fs::read_to_string(pull.cache().join("refs/main")).unwrap(), COMMIT);
    assert_eq!(pull.hub.bodies().len(), 3);

    let (code, again, err) = pull.run(&["owner/model"]);
    assert_eq!((code, again), (0, out), "{err}");
    assert_eq!(err.matches("in the cache").count(), 3, "{err}");
    assert!(pull.hub.bodies().is_empty());
    let (_, found, _) = outcome(oasis(pull.home.path()).arg("doctor").output().unwrap());
    assert!(found.contains("owner/model"), "{found}");
}

#[test]
fn a_broken_connection_is_taken_up_where_it_broke() {
    let pull = Pull::new();
    pull.hub.fail(WEIGHTS, &[Fault::Cut(40_000)]);
    let (code, _, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(fs::read(pull.snapshot().join(WEIGHTS)).unwrap(), weights());
    let bodies: Vec<String> = pull.hub.bodies().into_iter().filter(|body| body.starts_with(WEIGHTS)).collect();
    assert_eq!(bodies, ["model.safetensors 0-", "model.safetensors 40000-"]);
}

#[test]
fn what_never_arrives_looks_like_nothing() {
    let pull = Pull::new();
    pull.hub.fail(WEIGHTS, &[Fault::Cut(10_000), Fault::Cut(10_000), Fault::Cut(10_000), Fault::Cut(10_000)]);
    let (code, out, err) = pull.run(&["owner/model"]);
    assert_eq!((code, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("error: owner/model/model.safetensors: the download broke off"), "{err}");
    assert_eq!((pull.files().len(), pull.blobs()), (2, 2));

    let (code, _, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(fs::read(pull.snapshot().join(WEIGHTS)).unwrap(), weights());
    assert!(pull.hub.bodies().contains(&"model.safetensors 40000-".to_owned()));
}

#[test]
fn a_short_file_without_a_length_is_noticed() {
    let pull = Pull::new();
    pull.hub.fail(WEIGHTS, &vec![Fault::ShortWithoutLength(500); 4]);
    let (code, _, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 1);
    assert!(err.contains("expected 100000 bytes, found 500"), "{err}");
    assert_eq!((pull.files().len(), pull.blobs()), (2, 2));
    assert_eq!(pull.run(&["owner/model"]).0, 0);
}

#[test]
fn wrong_bytes_are_noticed() {
    let pull = Pull::new();
    pull.hub.fail(WEIGHTS, &[Fault::WrongBytes]);
    let (code, _, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 1);
    assert!(err.contains("expected SHA-256") && err.contains("hint: run the command again"), "{err}");
    assert_eq!((pull.files().len(), pull.blobs()), (2, 2));
    assert_eq!(pull.run(&["owner/model"]).0, 0);
}

#[test]
fn a_complete_part_and_a_damaged_cache_do_not_stand_in_the_way() {
    let pull = Pull::new();
    let tag: String = Sha256::digest(weights()).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::create_dir_all(pull.cache().join("blobs")).unwrap();
    fs::write(pull.cache().join("blobs").join(tag).with_extension("part"), vec![0; 100_000]).unwrap();
    assert_eq!(pull.run(&["owner/model"]).0, 0);
    // Truncate behind the link.
    fs::write(pull.snapshot().join(WEIGHTS), b"short").unwrap();
    let (code, _, err) = pull.run(&["owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(fs::read(pull.snapshot().join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn shards_follow_their_index() {
    let hub = Hub::start();
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    hub.put("config.json", b"{}", None).put("model.safetensors.index.json", index, None);
    hub.put("model-1.safetensors", b"one", None).put("model-2.safetensors", b"two!", None).put(
        "x.safetensors",
        b"x",
        None,
    );
    let pull = Pull { hub, home: tempdir().unwrap() };
    assert_eq!(pull.run(&["owner/model"]).0, 0);
    let files = ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(pull.files(), files);
}

#[test]
fn a_gguf_file_is_what_run_takes() {
    let pull = Pull::new();
    let (code, out, err) = pull.run(&["owner/model", "--file", "*.gguf"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(Path::new(out.trim_end()), pull.snapshot().join("tiny-Q8_0.gguf"));
    let (code, _, err) = pull.run(&["owner/model", "--file", "*.onnx"]);
    assert_eq!(code, 2);
    assert!(err.contains("`*.onnx`, which matches none") && err.contains("tiny-Q8_0.gguf"), "{err}");
}

#[test]
fn wrong_names_are_wrong_input() {
    let pull = Pull::new();
    for (repository, message) in [
        ("owner/other", "has no model `owner/other`"),
        ("../owner", "REPO: expected OWNER/NAME"),
        ("https://huggingface.co/owner/model", "hint: without the address: `owner/model`"),
    ] {
        let (code, out, err) = pull.run(&[repository]);
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.starts_with("error: ") && err.contains(message), "{err}");
    }
    let (code, _, err) = pull.run(&["owner/model", "--revision", "../x"]);
    assert_eq!(code, 2, "{err}");
}

#[test]
fn refusals_and_faults_of_the_hub_are_told_apart() {
    for (fault, code, message) in [
        (Fault::Status(401), 2, "refuses access"),
        (Fault::Status(403), 2, "HF_TOKEN"),
        (Fault::Status(503), 1, "found status 503"),
        (Fault::Page, 1, "expected the hub's list of files in JSON"),
    ] {
        let pull = Pull::new();
        pull.hub.fail_listing(fault.clone());
        let (found, out, err) = pull.run(&["owner/model"]);
        assert_eq!((found, out.as_str()), (code, ""), "{fault:?}: {err}");
        assert!(err.starts_with("error: ") && err.contains(message) && err.contains("hint: "), "{err}");
    }
}

#[test]
fn a_hub_that_answers_nonsense_for_a_file_is_refused() {
    for (fault, message) in
        [(Fault::Page, "expected the answer of a Hugging Face hub"), (Fault::HostileTag, "plain ETag")]
    {
        let pull = Pull::new();
        pull.hub.fail(WEIGHTS, &[fault]);
        let (code, _, err) = pull.run(&["owner/model"]);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains(message), "{err}");
        assert!(!pull.home.path().join("escape").exists());
        assert_eq!(pull.files().len(), 2);
    }
}

#[test]
fn an_endpoint_that_is_not_there() {
    let home = tempdir().unwrap();
    for (endpoint, code) in [("http://127.0.0.1:9", 1), ("not an address", 2)] {
        let mut command = oasis(home.path());
        let (found, out, err) =
            outcome(command.args(["pull", "owner/model", "--endpoint", endpoint]).output().unwrap());
        assert_eq!((found, out.as_str()), (code, ""), "{err}");
        assert!(err.starts_with("error: ") && err.contains(endpoint) && err.contains("hint: "), "{err}");
    }
}
