//! A checkpoint in Hugging Face's layout: config.json, safetensors, tokenizer files; on disk or embedded.

use std::path::PathBuf;

use serde_json::Value;

use super::config::{parse_config, parse_generation_eos};
use super::embedded::File;
use crate::format::bytes::Bytes;
use crate::format::error::{CheckpointError, Result};
use crate::format::map::{ConfigMap, parse_object};
use crate::format::safetensors::SINGLE;
use crate::format::table::TensorTable;
use crate::spec::DecoderSpec;
use crate::tokenizer::{ChatTemplate, Tokenizer, token_text};

/// A folder of files, wherever it is.
pub(super) enum Folder {
    Disk(PathBuf),
    Embedded { name: String, files: &'static [File] },
}

impl Folder {
    pub fn on_disk(path: PathBuf) -> Self {
        Self::Disk(path)
    }

    pub fn embedded(name: &str, files: &'static [File]) -> Self {
        Self::Embedded { name: name.to_owned(), files }
    }

    /// A file of the folder; `None` when it has none of that name.
    fn file(&self, name: &str) -> Result<Option<Bytes>> {
        match self {
            Self::Disk(folder) => {
                let path = folder.join(name);
                if path.exists() { Bytes::open(&path).map(Some) } else { Ok(None) }
            }
            Self::Embedded { name: folder, files } => {
                let file = files.iter().find(|(file, _)| *file == name);
                Ok(file.map(|(_, bytes)| Bytes::embedded(format!("{folder} (embedded)/{name}"), bytes)))
            }
        }
    }

    /// Text of a file and its name for messages.
    fn text(&self, name: &str) -> Result<Option<(String, String)>> {
        self.file(name)?.map(|bytes| Ok((bytes.read_text()?, bytes.name))).transpose()
    }

    /// Text of config.json and its name for messages.
    pub fn config(&self) -> Result<(String, String)> {
        self.text("config.json")?.ok_or_else(|| {
            CheckpointError::not_found(
                self.name(),
                "a config.json",
                "none",
                "name the folder that holds config.json and model.safetensors",
            )
        })
    }

    fn name(&self) -> String {
        match self {
            Self::Disk(folder) => folder.display().to_string(),
            Self::Embedded { name, .. } => format!("{name} (embedded)"),
        }
    }

    /// Headers of the weight files.
    pub fn weights(&self) -> Result<TensorTable> {
        match self {
            Self::Disk(folder) => TensorTable::open_safetensors(folder),
            Self::Embedded { .. } => {
                let mut table = TensorTable { name: self.name(), ..TensorTable::default() };
                if let Some(bytes) = self.file(SINGLE)? {
                    table.add_safetensors(bytes)?;
                }
                Ok(table)
            }
        }
    }

    /// config.json with the end-of-sequence ids of generation_config.json added.
    pub fn decoder_spec(&self) -> Result<DecoderSpec> {
        let (text, file) = self.config()?;
        let mut spec = parse_config(&text, &file)?;
        if let Some((text, file)) = self.text("generation_config.json")? {
            for id in parse_generation_eos(&text, &file, spec.vocab)? {
                if !spec.eos.contains(&id) {
                    spec.eos.push(id);
                }
            }
        }
        Ok(spec)
    }

    /// Tokenizer and chat template, each where the folder has one.
    pub fn tokenizer(&self) -> Result<(Option<Tokenizer>, Option<ChatTemplate>)> {
        let settings = self.text("tokenizer_config.json")?;
        let settings = settings.map(|(text, file)| Ok::<_, CheckpointError>((parse_object(&text, &file)?, file)));
        let settings = settings.transpose()?;
        let settings = settings.as_ref().map(|(object, file)| ConfigMap::new(object, file));
        let tokenizer = match self.text("tokenizer.json")? {
            None => None,
            Some((text, file)) => Some(Tokenizer::from_json(&text, &file, settings.as_ref())?),
        };
        let source = match self.text("chat_template.jinja")? {
            Some(source) => Some(source),
            None => settings.as_ref().map(template_source).transpose()?.flatten(),
        };
        let token = |key| settings.as_ref().and_then(|settings| token_text(settings, key)).unwrap_or_default();
        let compile = |(source, file): (String, String)| {
            ChatTemplate::new(&source, &file, &token("bos_token"), &token("eos_token"))
        };
        Ok((tokenizer, source.map(compile).transpose()?))
    }
}

/// `chat_template` of tokenizer_config.json: a string, or a list of named ones of which `default` counts.
fn template_source(settings: &ConfigMap<'_>) -> Result<Option<(String, String)>> {
    let named = |item: &Value| {
        let name = item.get("name")?.as_str()?;
        Some((name == "default", item.get("template")?.as_str()?.to_owned()))
    };
    let source = match settings.get("chat_template") {
        None => return Ok(None),
        Some(Value::String(source)) => Some(source.clone()),
        Some(Value::Array(items)) => {
            let templates: Vec<_> = items.iter().filter_map(named).collect();
            let default = templates.iter().find(|(default, _)| *default).or(templates.first());
            default.map(|(_, source)| source.clone())
        }
        Some(_) => None,
    };
    match source {
        Some(source) => Ok(Some((source, settings.file.to_owned()))),
        None => Err(CheckpointError::template(
            settings.what("chat_template"),
            "a string, or a list of objects with name and template",
            "something else",
            "put the template into chat_template.jinja",
        )),
    }
}
