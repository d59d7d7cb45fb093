//! Token ids and text against the references, and streaming.

use oasis_models::checkpoint::{self, Checkpoint, CheckpointError};
use oasis_models::tokenizer::{ChatMessage, Tokenizer};

use crate::common;

/// Compares with `tokenizer_reference.json`, both ways; returns the number of strings.
fn check(tokenizer: &Tokenizer, reference: &std::path::Path) -> usize {
    let reference = common::json(reference);
    let cases = reference.as_array().unwrap();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), text);
        assert_eq!(stream(tokenizer, &expected), tokenizer.decode(&expected, true).unwrap(), "{text:?}");
    }
    cases.len()
}

/// Text of the ids given one by one; every piece must be whole characters.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    for &id in ids {
        text += &stream.push(id).unwrap();
        assert!(!text.ends_with('\u{FFFD}'));
    }
    text + &stream.finish().unwrap()
}

#[test]
fn the_embedded_tokenizer_matches_its_reference() {
    let Some(reference) = common::shared("models/oasis-tiny/tokenizer_reference.json") else { return };
    let opened = checkpoint::open("oasis-tiny").unwrap();
    assert_eq!(check(opened.tokenizer().unwrap(), &reference), 13);
}

#[test]
fn the_gguf_tokenizer_matches_its_reference() {
    let Some(path) = common::smollm2() else { return };
    let Some(reference) = common::shared("models/smollm2-135m/tokenizer_reference.json") else { return };
    let opened = checkpoint::open(path.to_str().unwrap()).unwrap();
    assert_eq!(check(opened.tokenizer().unwrap(), &reference), 13);
}

#[test]
fn long_prose_streams_as_it_decodes() {
    let opened = checkpoint::open("oasis-tiny").unwrap();
    let tokenizer = opened.tokenizer().unwrap();
    let text = "naïve 日本語 👩‍👩‍👧 and so on, ".repeat(40);
    let ids = tokenizer.encode(&text).unwrap();
    assert!(ids.len() > 1000);
    assert_eq!(stream(tokenizer, &ids), text);
}

#[test]
fn a_stream_holds_back_half_a_character_and_gives_it_up_at_the_end() {
    let opened = checkpoint::open("oasis-tiny").unwrap();
    let tokenizer = opened.tokenizer().unwrap();
    let ids = tokenizer.encode("👩").unwrap();
    assert_eq!(ids.len(), 4);
    let mut stream = tokenizer.stream();
    for &id in &ids[..3] {
        assert_eq!(stream.push(id).unwrap(), "");
    }
    assert_eq!(stream.push(ids[3]).unwrap(), "👩");
    assert_eq!(stream.push(ids[0]).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
    // Continuation bytes without a beginning never become text, and never stop the stream.
    let mut broken = tokenizer.stream();
    let text: String = (0..100).map(|_| broken.push(ids[1]).unwrap()).collect();
    assert_eq!(text.chars().filter(|&c| c == '\u{FFFD}').count(), 99);
}

#[test]
fn the_embedded_chat_template_renders() {
    let opened = checkpoint::open("oasis-tiny").unwrap();
    let template = opened.chat_template().unwrap();
    let messages = [ChatMessage::new("user", "Where?")];
    assert_eq!(
        template.render(&messages, true).unwrap(),
        "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    );
    let both = [messages[0].clone(), ChatMessage::new("assistant", "Here.")];
    assert_eq!(
        template.render(&both, false).unwrap(),
        "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nHere.<|im_end|>\n"
    );
    let ids = opened.tokenizer().unwrap().encode_prompt(&template.render(&messages, true).unwrap()).unwrap();
    assert_eq!((ids[0], opened.tokenizer().unwrap().token_id("<|im_start|>")), (1, Some(1)));
}

/// The tiny model with other tokenizer settings.
fn with_settings(settings: &serde_json::Value, template: Option<&str>) -> checkpoint::Result<Checkpoint> {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(common::asset("oasis-tiny").join(file), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    if let Some(template) = template {
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    }
    checkpoint::open(folder.path().to_str().unwrap())
}

#[test]
fn bos_is_put_in_front_once_where_the_settings_ask() {
    let settings = serde_json::json!({ "add_bos_token": true, "bos_token": { "content": "<|endoftext|>" } });
    let opened = with_settings(&settings, None).unwrap();
    let tokenizer = opened.tokenizer().unwrap();
    assert_eq!(opened.spec().bos, Some(0));
    let plain = tokenizer.encode("Hello").unwrap();
    assert_eq!(tokenizer.encode_prompt("Hello").unwrap(), [&[0], plain.as_slice()].concat());
    assert_eq!(tokenizer.encode_prompt("<|endoftext|>Hello").unwrap(), [&[0], plain.as_slice()].concat());
    let unknown = serde_json::json!({ "add_bos_token": true, "bos_token": "<nowhere>" });
    assert!(matches!(with_settings(&unknown, None), Err(CheckpointError::Tokenizer(_))));
}

#[test]
fn templates_come_from_a_string_a_list_or_a_file() {
    let render = |settings: serde_json::Value, file| {
        let opened = with_settings(&settings, file).unwrap();
        opened.chat_template().map(|template| template.render(&[], true).unwrap())
    };
    let list = serde_json::json!({ "eos_token": "E", "chat_template": [
        { "name": "tool_use", "template": "tools" }, { "name": "default", "template": "{{ eos_token }}plain" }
    ] });
    assert_eq!(render(list.clone(), None).as_deref(), Some("Eplain"));
    assert_eq!(render(list, Some("file")).as_deref(), Some("file"));
    assert_eq!(render(serde_json::json!({}), None), None);
    let bad = with_settings(&serde_json::json!({ "chat_template": 3 }), None);
    assert!(matches!(bad, Err(CheckpointError::Template(_))));
}
