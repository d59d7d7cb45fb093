//! Chat templates, rendered the way transformers renders them.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::strftime::strftime;
use crate::format::error::{CheckpointError, Result};

/// Steps that a template may take: far above real templates, low enough that a hostile one ends within a second.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat_template";

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// "system", "user" or "assistant".
    pub role: String,
    /// Text.
    pub content: String,
}

impl ChatMessage {
    /// A message of that role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template (Jinja, with the functions transformers adds).
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    file: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles `source`; `file` names it in messages. `bos` and `eos` are the tokens' texts, empty where there are
    /// none; templates see them as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`CheckpointError::Template`] for a syntax error.
    pub fn new(source: &str, file: &str, bos: &str, eos: &str) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| failure(file, &error))?;
        Ok(Self { environment, file: file.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The prompt for a chat; with `generation_prompt` it ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`CheckpointError::Template`] when the template refuses the messages (`raise_exception`) or fails.
    pub fn render(&self, messages: &[ChatMessage], generation_prompt: bool) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|error| failure(&self.file, &error))?;
        let context = minijinja::context! {
            messages => messages,
            add_generation_prompt => generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
        };
        template.render(context).map_err(|error| failure(&self.file, &error))
    }
}

fn failure(file: &str, error: &Error) -> CheckpointError {
    let line = error.line().map_or_else(String::new, |line| format!(" in line {line}"));
    CheckpointError::template(
        format!("{file}: chat template"),
        "a Jinja template that accepts these messages",
        format!("{error}{line}"),
        "check the roles and their order, or give the prompt as plain text",
    )
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The current time in UTC, formatted after strftime.
fn strftime_now(format: String) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    strftime(&format, now)
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False, indent=...)` writes it, without HTML escapes.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter)),
    };
    let bad = |error: String| Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| bad(error.to_string()))?;
    String::from_utf8(out).map_err(|error| bad(error.to_string()))
}

/// Python's default separators: `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[(&str, &str)], generation_prompt: bool) -> Result<String> {
        let messages: Vec<_> = messages.iter().map(|(role, content)| ChatMessage::new(*role, *content)).collect();
        ChatTemplate::new(source, "test", "<s>", "</s>")?.render(&messages, generation_prompt)
    }

    #[test]
    fn python_methods_slices_and_namespaces_work() {
        let source = "{%- set ns = namespace(last=-1) %}{%- for message in messages[::-1] %}
            {%- if message.content is string and message.content.startswith('a') %}{%- set ns.last = loop.index0 %}{%- endif %}
        {%- endfor %}{{ bos_token }}{{ messages[0].content.split('|')[-1].lstrip('x').strip() }}{{ ns.last }}";
        let text = render(source, &[("user", "q|xx yes "), ("assistant", "abc")], false).unwrap();
        assert_eq!(text, "<s>yes0");
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_does() {
        let source =
            "{% for message in messages %}\n  {% if true %}\n{{ message.role }}\n  {% endif %}\n{% endfor %}\n";
        assert_eq!(render(source, &[("user", "x")], false).unwrap(), "user\n");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let source = "{{ messages | tojson }}|{{ [] | tojson(indent=2) }}|{{ [1] | tojson(indent=2) }}";
        let text = render(source, &[("user", "<é>")], false).unwrap();
        let (plain, rest) = text.split_once('|').unwrap();
        assert_eq!(plain, r#"[{"role": "user", "content": "<é>"}]"#);
        assert_eq!(rest, "[]|[\n  1\n]");
    }

    #[test]
    fn a_template_may_refuse_and_the_message_says_so() {
        let error = render("{{ raise_exception('roles must alternate') }}", &[("user", "x")], false).unwrap_err();
        assert!(matches!(error, CheckpointError::Template(_)));
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[test]
    fn syntax_errors_are_reported_when_compiled() {
        assert!(matches!(ChatTemplate::new("{% for %}", "test", "", ""), Err(CheckpointError::Template(_))));
    }

    #[test]
    fn a_template_that_would_not_end_is_stopped() {
        let nested = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
        assert!(matches!(render(nested, &[], false), Err(CheckpointError::Template(_))));
    }
}
