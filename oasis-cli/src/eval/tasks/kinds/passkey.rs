//! One needle: the pass key.

use super::{Draw, Fact, Kind, Prose, Question};

/// Says the key twice, in one place.
pub struct Passkey;

/// What the context says of `key`.
pub fn record(key: &str) -> String {
    format!("The pass key is {key}. Remember it. {key} is the pass key.")
}

impl Question for Passkey {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let key = draw.digits(5);
        Fact {
            records: vec![record(&key)],
            question: "What is the pass key?".to_owned(),
            answer: format!("The pass key is {key}."),
            own: vec!["pass key".to_owned(), key.clone()],
            values: vec![key],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[]
    }
}
