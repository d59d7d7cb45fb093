//! A passage, word for word.

use super::{Draw, Fact, Kind, Prose, Question};

/// A sentence of the surrounding text under a name.
pub struct Copy;

impl Question for Copy {
    fn draw(&self, draw: &mut Draw, prose: &Prose) -> Fact {
        let (tag, passage) = (draw.tag(), prose.passage(draw).to_owned());
        let named = format!("Passage {tag}: {passage}");
        Fact {
            records: vec![named.clone()],
            question: format!("Repeat passage {tag} word for word."),
            answer: named,
            values: vec![passage],
            own: vec![tag],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Copy, 7), (Kind::Kv, 8)]
    }
}
