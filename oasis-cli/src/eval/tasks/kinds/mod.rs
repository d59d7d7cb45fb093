//! Kinds of questions, a type each: what stands in the context, what is asked, and what the answer is.
//!
//! Their wording is that of the embedded tasks, which oasis-tiny was trained on. They follow the categories of RULER
//! (Hsieh et al., arXiv 2404.06654): retrieval with one needle among other keys or several needles, tracing over two hops
//! or over the values of a variable, and aggregation.

mod copy;
mod count;
mod hop2;
mod kv;
mod list;
mod multi;
mod passkey;
mod table;
mod var;

use super::draw::Draw;
use super::prose::Prose;
use clap::ValueEnum;
pub use passkey::record as passkey_record;

/// Facts with a question about them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// Sentences or rows, in the order in which they must stand.
    pub records: Vec<String>,
    /// The question.
    pub question: String,
    /// The answer, word for word.
    pub answer: String,
    /// What of the answer the question does not say.
    pub values: Vec<String>,
    /// Names and values that nothing else in the prompt may mention, so that the question has one answer.
    pub own: Vec<String>,
}

impl Fact {
    /// Whether `text` mentions what is this fact's own.
    pub fn is_mentioned(&self, text: &str) -> bool {
        self.own.iter().any(|own| mentions(text, own))
    }
}

/// Whether `words` stand in `text`, not as a part of longer words or numbers.
pub fn mentions(text: &str, words: &str) -> bool {
    text.match_indices(words).any(|(start, _)| {
        let (before, after) = (text[..start].chars().next_back(), text[start + words.len()..].chars().next());
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// How a kind of question is drawn.
trait Question {
    /// Facts of this kind; `prose` is the text that surrounds them.
    fn draw(&self, draw: &mut Draw, prose: &Prose) -> Fact;

    /// Kinds of the facts that stand in the context beside the one that is asked for, and how many in 4,096 tokens.
    fn others(&self) -> &'static [(Kind, usize)];
}

/// Kind of question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    /// One needle: a pass key
    Passkey,
    /// One needle among others: the value of a key
    Kv,
    /// The same in a context of nothing but such facts
    #[value(name = "kv_dense")]
    KvDense,
    /// A row of a table
    Table,
    /// Several needles: the values of 2 to 5 keys
    Multi,
    /// Two hops: who guards a place, then what is said of the guard
    Hop2,
    /// Latest value: a dial that is set up to 4 times
    Var,
    /// A passage, word for word
    Copy,
    /// All of a list
    List,
    /// How often something happened
    Count,
}

impl Kind {
    /// As the tasks call it.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no kind is skipped").get_name().to_owned()
    }

    /// Whether the context is to have nothing but facts.
    pub fn is_dense(self) -> bool {
        self == Self::KvDense
    }

    /// Draws facts; `prose` is the text that surrounds them.
    pub fn draw(self, draw: &mut Draw, prose: &Prose) -> Fact {
        self.question().draw(draw, prose)
    }

    /// Kinds of the facts that stand beside the one that is asked for, and how many in a context of `length` tokens: at
    /// least 2, and no more in long contexts than in 4,096 tokens.
    pub fn others(self, length: usize) -> impl Iterator<Item = (Self, usize)> {
        let count = move |per: usize| (per * length / 4096).clamp(2, per);
        self.question().others().iter().map(move |(kind, per)| (*kind, count(*per)))
    }

    fn question(self) -> &'static dyn Question {
        match self {
            Self::Passkey => &passkey::Passkey,
            Self::Kv => &kv::Kv { is_dense: false },
            Self::KvDense => &kv::Kv { is_dense: true },
            Self::Table => &table::Table,
            Self::Multi => &multi::Multi,
            Self::Hop2 => &hop2::Hop2,
            Self::Var => &var::Var,
            Self::Copy => &copy::Copy,
            Self::List => &list::List,
            Self::Count => &count::Count,
        }
    }
}

/// `a, b and c`.
fn enumerate(parts: &[String]) -> String {
    match parts {
        [parts @ .., last] if !parts.is_empty() => format!("{} and {last}", parts.join(", ")),
        _ => parts.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_words_are_mentioned() {
        assert!(mentions("It is 48.", "48") && mentions("48", "48") && mentions("a 480 and 48", "48"));
        assert!(!mentions("480 and 148", "48") && !mentions("the older mill", "old") && !mentions("", "old"));
        assert!(mentions("the old mill's wheel", "old mill"));
    }

    #[test]
    fn enumerations_read_as_english() {
        let parts = |list: &[&str]| enumerate(&list.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!([parts(&["a"]), parts(&["a", "b"]), parts(&["a", "b", "c"])], ["a", "a and b", "a, b and c"]);
    }

    #[test]
    fn there_are_fewer_other_facts_in_short_contexts_and_no_more_in_long_ones() {
        let counts = |length| Kind::Kv.others(length).map(|(_, count)| count).collect::<Vec<_>>();
        assert_eq!([counts(100), counts(2048), counts(4096), counts(100_000)], [[2, 2], [30, 4], [60, 8], [60, 8]]);
        assert_eq!(Kind::Passkey.others(4096).count(), 0);
    }
}
