//! All of a list.

use super::{Draw, Fact, Kind, Prose, Question, enumerate};

/// What somebody's bag holds: 3 to 9 things.
pub struct List;

impl Question for List {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (person, count) = (draw.person(), draw.between(3, 9));
        let items: Vec<String> = draw.items(count).into_iter().map(str::to_owned).collect();
        let record = format!("The bag of {person} holds {}.", enumerate(&items));
        Fact {
            records: vec![record.clone()],
            question: format!("What does the bag of {person} hold?"),
            answer: record,
            values: items,
            own: vec![person],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::List, 20), (Kind::Kv, 8)]
    }
}
