//! The text that facts are hidden in, as sentences.

use super::draw::Draw;
use crate::error::{CliError, CliResult};
use std::collections::HashSet;
use std::path::Path;

/// A sentence with no end is cut here.
const MOST_WORDS: usize = 40;
/// Words of a passage that can be repeated.
const PASSAGE_WORDS: std::ops::RangeInclusive<usize> = 8..=30;
/// Titles whose dot ends no sentence.
const TITLES: [&str; 5] = ["Mr.", "Mrs.", "Dr.", "St.", "Messrs."];

/// A text in sentences. Each begins with the space or the line break that stands before it.
#[derive(Debug, Clone)]
pub struct Prose {
    sentences: Vec<String>,
    /// Those that are neither short nor long.
    passages: Vec<usize>,
}

impl Prose {
    /// Of several texts, each sentence once.
    pub fn of_texts(texts: impl Iterator<Item = String>) -> Option<Self> {
        let mut seen = HashSet::new();
        let all = texts.flat_map(|text| sentences(&text));
        Self::new(all.filter(|sentence| seen.insert(sentence.trim_start().to_owned())).collect())
    }

    /// Of a file.
    ///
    /// # Errors
    /// When it cannot be read, or has no sentences.
    pub fn read(path: &Path) -> CliResult<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            CliError::Input(format!("--text {}: expected readable UTF-8 text, found: {error}", path.display()))
        })?;
        Self::of_text(&text).ok_or_else(|| {
            CliError::input(
                format!("--text {}: expected sentences of 8 to 30 words, found none", path.display()),
                "give prose in a language with spaces between its words",
            )
        })
    }

    /// Of a text; `None` where it has no sentence of a passage's length.
    pub fn of_text(text: &str) -> Option<Self> {
        Self::new(sentences(text))
    }

    fn new(sentences: Vec<String>) -> Option<Self> {
        let is_passage = |sentence: &str| PASSAGE_WORDS.contains(&sentence.split_whitespace().count());
        let passages: Vec<usize> = (0..sentences.len()).filter(|index| is_passage(&sentences[*index])).collect();
        (!passages.is_empty()).then_some(Self { sentences, passages })
    }

    /// The sentences in their order, from one of them on and around again, without end.
    pub fn starting_at(&self, first: usize) -> impl Iterator<Item = &str> {
        self.sentences.iter().map(String::as_str).cycle().skip(first)
    }

    /// How many sentences there are.
    pub fn count(&self) -> usize {
        self.sentences.len()
    }

    /// A sentence that can be repeated, without the space before it.
    pub fn passage(&self, draw: &mut Draw) -> &str {
        self.sentences[draw.one(&self.passages)].trim_start()
    }
}

/// The sentences of a text. Paragraphs stand between empty lines; where there are none, each line is one.
fn sentences(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n");
    let paragraphs = text.trim().split(if text.trim().contains("\n\n") { "\n\n" } else { "\n" });
    paragraphs.flat_map(of_paragraph).collect()
}

fn of_paragraph(paragraph: &str) -> Vec<String> {
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let (mut sentences, mut start) = (Vec::new(), 0);
    for end in 1..=words.len() {
        let ends = words.get(end).is_none_or(|next| is_end(words[end - 1], next));
        if ends || end - start == MOST_WORDS {
            let lead = if start == 0 { '\n' } else { ' ' };
            sentences.push(format!("{lead}{}", words[start..end].join(" ")));
            start = end;
        }
    }
    sentences
}

/// Whether a sentence ends between two words.
fn is_end(word: &str, next: &str) -> bool {
    let begins = next.starts_with(|first: char| first.is_uppercase() || matches!(first, '"' | '\'' | '“' | '‘'));
    begins && word.ends_with(['.', '!', '?', ';', ':', '"', '”']) && !TITLES.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_the_ends_of_sentences() {
        let wrapped = "Mr. Bingley came. \"How\nnice!\" He said:  It is so.\r\n\r\nThen he went";
        let expected = ["\nMr. Bingley came.", " \"How nice!\"", " He said:", " It is so.", "\nThen he went"];
        assert_eq!(sentences(wrapped), expected);
        assert_eq!(sentences("One. two\nThree."), ["\nOne. two", "\nThree."]);
        assert!(sentences(" \n\n ").is_empty());
        let endless = "word ".repeat(100);
        let lengths: Vec<usize> = sentences(&endless).iter().map(|s| s.split_whitespace().count()).collect();
        assert_eq!(lengths, [40, 40, 20]);
    }

    #[test]
    fn a_text_without_sentences_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "two words").unwrap();
        let error = Prose::read(file.path()).unwrap_err();
        assert!(error.text().unwrap().contains("expected sentences of 8 to 30 words, found none"), "{error:?}");
    }
}
