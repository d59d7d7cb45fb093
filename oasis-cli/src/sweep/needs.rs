//! What a measurement reads, known from its arguments before it runs.

use crate::eval::setting::Contender;
use crate::sweep::inputs::Digests;
use oasis_core::config::{Config, Layer};
use oasis_models::checkpoint::{EMBEDDED_HEADS, EMBEDDED_MODELS};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a measurement reads, and what it runs.
pub struct Needs {
    /// Files, each with the argument that names it.
    pub files: Vec<(&'static str, PathBuf)>,
    /// What the command's own arguments set over the configuration.
    pub settings: Vec<Layer>,
    /// What it runs.
    pub work: Work,
}

/// What a measurement runs.
pub enum Work {
    /// Nothing but what was recorded: neither a device nor a model.
    Recording,
    /// The device alone.
    Device,
    /// The configured model on the configured device, with these policies where they are known beforehand.
    Model(Vec<Contender>),
}

impl Needs {
    /// Digests by path of all files that are there: those of the arguments, and the model's and draft head's of `config`.
    pub fn inputs(&self, config: &Config, digests: &mut Digests) -> BTreeMap<String, String> {
        let mut files: Vec<PathBuf> = self.files.iter().map(|(_, file)| file.clone()).collect();
        if matches!(self.work, Work::Model(_)) {
            files.extend(checkpoint_files(&config.model.path, &EMBEDDED_MODELS));
            files.extend(checkpoint_files(&config.model.draft, &EMBEDDED_HEADS));
        }
        let digest = |file: PathBuf| Some((file.display().to_string(), digests.of(&file)?));
        files.into_iter().filter_map(digest).collect()
    }
}

/// Files of a model or draft head: the file itself, or what a folder has of a checkpoint; none of an embedded one.
fn checkpoint_files(source: &str, embedded: &[&str]) -> Vec<PathBuf> {
    let path = Path::new(source);
    let is_safetensors = |path: &Path| path.extension().is_some_and(|extension| extension == "safetensors");
    if embedded.contains(&source) || !path.exists() {
        return Vec::new();
    }
    // One file of safetensors stands for its folder.
    let folder = match path {
        folder if folder.is_dir() => folder,
        file if is_safetensors(file) => file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")),
        file => return vec![file.to_owned()],
    };
    let is_read = |file: &PathBuf| {
        is_safetensors(file) || file.extension().is_some_and(|extension| extension == "json" || extension == "jinja")
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(source: &str) -> Vec<String> {
        let files = checkpoint_files(source, &EMBEDDED_MODELS);
        let mut names: Vec<String> =
            files.iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_checkpoint_is_what_is_read_of_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let there = ["README.md", "chat_template.jinja", "config.json", "model.safetensors", "m.gguf"];
        for name in there {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let path = |name: &str| folder.path().join(name).display().to_string();
        let checkpoint = ["chat_template.jinja", "config.json", "model.safetensors"];
        assert_eq!(named(&path("")), checkpoint);
        assert_eq!(named(&path("model.safetensors")), checkpoint);
        assert_eq!(named(&path("m.gguf")), ["m.gguf"]);
        assert!(named("oasis-tiny").is_empty() && named(&path("none")).is_empty());
    }

    #[test]
    fn inputs_are_files_of_arguments_model_and_draft_head() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["m.gguf", "d.gguf", "text.txt"].map(|name| folder.path().join(name));
        let set =
            |key: &str, file: &Path| Layer::assignment("test", &format!("{key}={:?}", file.display().to_string()));
        let settings = vec![set("model.path", &files[0]).unwrap(), set("model.draft", &files[1]).unwrap()];
        let config = oasis_core::config::Resolved::new(&settings).unwrap().config;
        let inputs = |work| {
            let needs = Needs { files: vec![("--file", files[2].clone())], settings: Vec::new(), work };
            needs.inputs(&config, &mut Digests::default())
        };
        assert!(inputs(Work::Model(Vec::new())).is_empty());
        files.iter().for_each(|file| std::fs::write(file, "1").unwrap());
        let before = inputs(Work::Model(Vec::new()));
        assert_eq!((before.len(), inputs(Work::Recording).len()), (3, 1));
        for file in &files {
            std::fs::write(file, "2").unwrap();
            assert_ne!(inputs(Work::Model(Vec::new())), before, "{}", file.display());
            std::fs::write(file, "1").unwrap();
        }
    }
}
