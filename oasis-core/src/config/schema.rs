//! A JSON schema of the configuration, for editors.

use crate::config::{DeviceConfig, EngineConfig, KvConfig, ModelConfig, NodesConfig};
use crate::registry::{self, Role};
use crate::sampling::SamplingParams;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// JSON schema of the TOML configuration, with every linked plugin.
pub fn json_schema() -> Value {
    let mut sections = Map::new();
    sections.insert("model".to_owned(), section(&ModelConfig::default()));
    sections.insert("kv".to_owned(), section(&KvConfig::default()));
    for role in Role::ALL {
        sections.insert(role.section().to_owned(), role_section(role));
    }
    sections.insert("device".to_owned(), section(&DeviceConfig::default()));
    sections.insert("engine".to_owned(), section(&EngineConfig::default()));
    sections.insert("nodes".to_owned(), section(&NodesConfig::default()));
    sections.insert("sampling".to_owned(), section(&SamplingParams::default()));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "OasisKV configuration",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    })
}

fn section<T: Serialize>(defaults: &T) -> Value {
    let defaults = serde_json::to_value(defaults).expect("configuration structs serialise");
    object(properties(&defaults), &[])
}

fn role_section(role: Role) -> Value {
    let kinds = registry::plugins().into_iter().filter(|p| p.role == role).map(|plugin| {
        let defaults = (plugin.defaults)().ok().and_then(|d| serde_json::to_value(d).ok()).unwrap_or_default();
        let mut properties = properties(&defaults);
        properties.insert("kind".to_owned(), json!({"const": plugin.kind, "description": plugin.about}));
        object(properties, &["kind"])
    });
    json!({"oneOf": kinds.collect::<Vec<_>>()})
}

fn object(properties: Map<String, Value>, required: &[&str]) -> Value {
    json!({"type": "object", "additionalProperties": false, "required": required, "properties": properties})
}

/// One property a field, its type read off the default.
fn properties(defaults: &Value) -> Map<String, Value> {
    (defaults.as_object().into_iter().flatten())
        .map(|(key, default)| {
            let kind = match default {
                Value::Bool(_) => json!("boolean"),
                // Sizes and budgets may also be words: "8GiB", "all".
                Value::Number(n) if n.is_u64() => json!(["integer", "string"]),
                Value::Number(_) => json!("number"),
                // A part within a section; its kind decides what is in it.
                Value::Object(_) => json!("object"),
                _ => json!(["string", "integer"]),
            };
            (key.clone(), json!({"type": kind, "default": default}))
        })
        .collect()
}
