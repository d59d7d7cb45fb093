//! Which files of a repository to download, and which names are allowed at all.

use crate::error::{CliError, CliResult};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Small files that go with the weights, where the repository has them.
const COMPANIONS: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Files to download.
#[derive(Debug, PartialEq, Eq)]
pub struct Selection {
    /// Files, small ones first.
    pub files: Vec<String>,
    /// The file of [`files`](Self::files) that names further ones, the weights' shards.
    pub index: Option<String>,
}

impl Selection {
    /// Chooses from `available`: what the patterns match, or without patterns what a model needs.
    ///
    /// # Errors
    /// When a pattern matches nothing, or no weights of a supported format are there.
    pub fn choose(repository: &str, available: &[String], patterns: &[String]) -> CliResult<Self> {
        let selection = match patterns {
            [] => Self::model(repository, available)?,
            patterns => Self::matching(repository, available, patterns)?,
        };
        for file in &selection.files {
            check_file(repository, file)?;
        }
        Ok(selection)
    }

    fn matching(repository: &str, available: &[String], patterns: &[String]) -> CliResult<Self> {
        let mut files = BTreeSet::new();
        for pattern in patterns {
            let matches: Vec<&String> = available.iter().filter(|file| matches(pattern, file)).collect();
            if matches.is_empty() {
                return Err(CliError::input(
                    format!("--file: expected a file of {repository}, found `{pattern}`, which matches none"),
                    format!("it has {}", some_of(available)),
                ));
            }
            files.extend(matches.into_iter().cloned());
        }
        Ok(Self { files: files.into_iter().collect(), index: None })
    }

    fn model(repository: &str, available: &[String]) -> CliResult<Self> {
        let has = |name: &str| available.iter().any(|file| file == name);
        let weights = if has(WEIGHTS) { WEIGHTS } else { INDEX };
        if !has(weights) || !has(COMPANIONS[0]) {
            let gguf = available.iter().any(|file| file.ends_with(".gguf"));
            return Err(CliError::input(
                format!(
                    "{repository}: expected {} and {WEIGHTS} (or its index), found {}",
                    COMPANIONS[0],
                    some_of(available)
                ),
                if gguf {
                    "choose one of its GGUF files: --file NAME.gguf"
                } else {
                    "choose a repository with safetensors weights"
                },
            ));
        }
        let mut files: Vec<String> =
            COMPANIONS.iter().filter(|name| has(name)).map(|name| (*name).to_owned()).collect();
        files.push(weights.to_owned());
        Ok(Self { files, index: (weights == INDEX).then(|| INDEX.to_owned()) })
    }
}

/// Shards that an index names.
///
/// # Errors
/// When the text is no index, or names a file outside the repository.
pub fn shards(repository: &str, index: &str, available: &[String]) -> CliResult<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_str(index).map_err(|error| {
        CliError::Failure(format!("{repository}/{INDEX}: expected a weight_map of tensors to files, found: {error}"))
    })?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    for shard in &shards {
        check_file(repository, shard)?;
        if !available.contains(shard) {
            return Err(CliError::Failure(format!(
                "{repository}/{INDEX}: expected the shard {shard}, found no such file"
            )));
        }
    }
    Ok(shards.into_iter().collect())
}

/// Checks `NAME` or `OWNER/NAME`.
///
/// # Errors
/// Says what a repository is called.
pub fn check_repository(repository: &str) -> CliResult {
    let parts: Vec<&str> = repository.split('/').collect();
    let sound = |part: &&str| {
        is_plain(part) && !part.contains("--") && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
    };
    if parts.len() <= 2 && parts.iter().all(sound) {
        return Ok(());
    }
    let hint = match repository.split_once("://").and_then(|(_, rest)| rest.split_once('/')) {
        Some((_, path)) => format!("without the address: `{}`; --endpoint names another hub", path.trim_matches('/')),
        None => "letters, digits, `-`, `_` and `.`, such as HuggingFaceTB/SmolLM2-135M-Instruct".to_owned(),
    };
    Err(CliError::input(format!("REPO: expected OWNER/NAME, found `{repository}`"), hint))
}

/// Checks the name of a branch, a tag or a commit: it becomes a path below the cache folder.
///
/// # Errors
/// Says what a revision is called.
pub fn check_revision(revision: &str) -> CliResult {
    if revision.split('/').all(is_plain) {
        return Ok(());
    }
    Err(CliError::input(format!("--revision: expected a branch, tag or commit, found `{revision}`"), "such as main"))
}

/// Checks a file name that the hub sent.
fn check_file(repository: &str, file: &str) -> CliResult {
    if file.split('/').all(is_plain) {
        return Ok(());
    }
    Err(CliError::Failure(format!("{repository}: expected plain file names from the hub, found {file:?}")))
}

/// One step of a path that stays where it is put and means the same in a URL.
pub fn is_plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+=@".contains(c);
    !part.is_empty() && part.chars().all(allowed) && part.chars().any(|c| c != '.')
}

/// Whether a pattern with `*` (anything) and `?` (one character) matches all of `name`.
fn matches(pattern: &str, name: &str) -> bool {
    fn go(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|skip| go(rest, &name[skip..])),
            Some((b'?', rest)) => !name.is_empty() && go(rest, &name[1..]),
            Some((c, rest)) => name.first() == Some(c) && go(rest, &name[1..]),
        }
    }
    go(pattern.as_bytes(), name.as_bytes())
}

fn some_of(files: &[String]) -> String {
    const SHOWN: usize = 8;
    match files.len() {
        0 => "no files".to_owned(),
        n if n <= SHOWN => files.join(", "),
        n => format!("{} and {} more", files[..SHOWN].join(", "), n - SHOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn repository_names() {
        for good in ["gpt2", "HuggingFaceTB/SmolLM2-135M", "a/b.c_d-e"] {
            check_repository(good).unwrap();
        }
        for bad in ["", "/", "a/", "a/b/c", "../b", "a/..", "a b/c", "a--b/c", "-a/b", "https://hub/a/b", "ä/b"] {
            assert!(matches!(check_repository(bad), Err(CliError::Input(_))), "{bad}");
        }
    }

    #[test]
    fn a_pasted_address_is_recognised() {
        let error = check_repository("https://huggingface.co/a/b/").unwrap_err();
        assert!(error.text().unwrap().contains("`a/b`"), "{error:?}");
    }

    #[test]
    fn revisions_stay_in_the_cache() {
        check_revision("refs/pr/1").unwrap();
        for bad in ["", "..", "a/../../b", "/main", "a//b"] {
            assert!(check_revision(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns() {
        assert!(matches("*.gguf", "model-Q4.gguf") && matches("*", "") && matches("a?c*", "abcd"));
        assert!(!matches("*.gguf", "model.gguf.txt") && !matches("a?", "a"));
    }

    #[test]
    fn a_model_is_its_companions_and_weights() {
        let files = names(&["README.md", "config.json", "model.safetensors", "tokenizer.json", "x.gguf"]);
        let chosen = Selection::choose("a/b", &files, &[]).unwrap();
        assert_eq!(chosen.files, ["config.json", "tokenizer.json", "model.safetensors"]);
        assert_eq!(chosen.index, None);
    }

    #[test]
    fn gguf_only_when_asked() {
        let files = names(&["a.gguf", "b.gguf"]);
        let error = Selection::choose("a/b", &files, &[]).unwrap_err();
        assert!(error.text().unwrap().contains("--file NAME.gguf"));
        assert_eq!(Selection::choose("a/b", &files, &names(&["b.*"])).unwrap().files, ["b.gguf"]);
        assert!(Selection::choose("a/b", &files, &names(&["c.*"])).is_err());
    }

    #[test]
    fn a_hostile_listing_is_refused() {
        for name in ["../../escape", "/etc/passwd", "a\\b", "a/./b", ""] {
            assert!(Selection::choose("a/b", &names(&[name]), &names(&["*"])).is_err(), "{name}");
        }
    }

    #[test]
    fn shards_come_from_the_index() {
        let available = names(&["s1.safetensors", "s2.safetensors"]);
        let index = r#"{"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors", "c": "s1.safetensors"}}"#;
        assert_eq!(shards("r", index, &available).unwrap(), available);
        assert!(shards("r", r#"{"weight_map": {"a": "../x"}}"#, &available).is_err());
        assert!(shards("r", r#"{"weight_map": {"a": "s3.safetensors"}}"#, &available).is_err());
        assert!(shards("r", "<html>", &available).is_err());
    }
}
