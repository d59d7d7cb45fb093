//! Writes tasks of any length.

use super::draw::Draw;
use super::kinds::{Kind, passkey_record};
use super::layout::Layout;
use super::prose::Prose;
use super::{Message, Task};
use crate::error::{CliError, CliResult};
use crate::tokens::ModelText;

/// Said before a question to models that would rather tell what they know.
const LEAD: &str = "Answer this question from the text above: ";

/// What surrounds the pass keys of tasks: the sentences of theirs, each once.
pub fn prose_of(tasks: &[Task]) -> Option<Prose> {
    let of_task = |task: &Task| {
        let text = task.question().split_once("question. ")?.1.rsplit_once("\n\n")?.0;
        let key = task.answer.strip_prefix("The pass key is ")?.strip_suffix('.')?;
        Some(text.replace(&passkey_record(key), "\n"))
    };
    Prose::of_texts(tasks.iter().filter(|task| task.task == "passkey").filter_map(of_task))
}

/// Makes tasks for the tokenizer and the chat template of a model.
pub struct Generator<'a> {
    /// Tokenizer and template.
    pub text: &'a ModelText<'a>,
    /// What the facts are hidden in.
    pub prose: &'a Prose,
    /// Same seed, same tasks.
    pub seed: u64,
    /// Whether the answer is asked for from the text and counts when it contains the values, rather than word for word.
    pub contains: bool,
}

impl Generator<'_> {
    /// The task `number` of a kind. With its answer it fills a context of `length` tokens as far as whole sentences do.
    ///
    /// # Errors
    /// When the facts alone are longer, the text is about nothing else, or the model has no chat template.
    pub fn task(&self, kind: Kind, length: usize, number: usize) -> CliResult<Task> {
        let mut draw = Draw::new(self.seed, &[kind as u64, length as u64, number as u64]);
        let mut layout = Layout::draw(kind, length, self.prose, &mut draw);
        let written = |layout: &Layout| -> CliResult<(Task, usize)> {
            let mut task = self.write(kind, length, number, layout);
            let prompt = task.prompt(self.text)?.len();
            task.prompt_tokens = Some(prompt);
            let tokens = prompt + task.most_tokens(self.text)?;
            Ok((task, tokens))
        };

        let (mut task, mut tokens) = written(&layout)?;
        if tokens > length {
            return Err(CliError::input(
                format!("--length: expected at least {tokens} tokens for the facts of {}, found {length}", task.id),
                "ask for longer tasks",
            ));
        }
        let mut hay = self.hay(kind, &layout, draw)?;
        // First by the tokens of single sentences, whose sum need not be quite that of the whole.
        while tokens <= length {
            let sentence = hay.next().expect("there is no end of hay");
            tokens += self.text.encode(&sentence)?.len();
            layout.hay.push(sentence);
        }
        (task, tokens) = written(&layout)?;
        while tokens <= length {
            layout.hay.extend(hay.next());
            (task, tokens) = written(&layout)?;
        }
        while tokens > length {
            layout.hay.pop();
            (task, tokens) = written(&layout)?;
        }
        Ok(task)
    }

    fn write(&self, kind: Kind, length: usize, number: usize, layout: &Layout) -> Task {
        let (content, depths) = layout.write(if self.contains { LEAD } else { "" });
        let target = &layout.target;
        Task {
            id: format!("{}-{length}-{number}", kind.name()),
            task: kind.name(),
            length,
            prompt_tokens: None,
            answer: target.answer.clone(),
            contains: if self.contains { target.values.clone() } else { Vec::new() },
            depths,
            messages: vec![Message { role: "user".to_owned(), content }],
        }
    }

    /// Sentences without end that mention nothing of the target's own.
    fn hay<'b>(
        &'b self,
        kind: Kind,
        layout: &Layout,
        mut draw: Draw,
    ) -> CliResult<Box<dyn Iterator<Item = String> + 'b>> {
        let (prose, target) = (self.prose, layout.target.clone());
        if kind.is_dense() {
            let fact = move |draw: &mut Draw| format!(" {}", kind.draw(draw, prose).records.concat());
            return Ok(Box::new(std::iter::repeat_with(move || draw.until(fact, |fact| !target.is_mentioned(fact)))));
        }
        if prose.starting_at(0).take(prose.count()).all(|sentence| target.is_mentioned(sentence)) {
            return Err(CliError::input(
                format!("--text: expected a sentence without any of {}, found none", target.own.join(", ")),
                "give a longer text, or another --seed",
            ));
        }
        let sentences = prose.starting_at(draw.below(prose.count()));
        Ok(Box::new(sentences.filter(move |sentence| !target.is_mentioned(sentence)).map(str::to_owned)))
    }
}
