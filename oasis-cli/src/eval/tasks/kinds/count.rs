//! How often something happened.

use super::{Draw, Fact, Kind, Prose, Question};

/// A bell that rang 1 to 4 times at a place.
pub struct Count;

impl Question for Count {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (place, count) = (draw.thing(), draw.between(1, 4));
        let times = if count == 1 { "time" } else { "times" };
        Fact {
            records: vec![format!("A bell rang at the {place}."); count],
            question: format!("How many times did a bell ring at the {place}?"),
            answer: format!("A bell rang at the {place} {count} {times}."),
            values: vec![count.to_string()],
            own: vec![place],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Count, 20), (Kind::Kv, 8)]
    }
}
