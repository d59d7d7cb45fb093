//! A row of a table.

use super::{Draw, Fact, Kind, Prose, Question};

/// The number or the city beside a name.
pub struct Table;

impl Question for Table {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let name = draw.thing();
        let value = if draw.below(10) < 7 {
            let digits = draw.between(2, 5);
            draw.digits(digits)
        } else {
            draw.city().to_owned()
        };
        let row = format!("{name}: {value}");
        Fact {
            records: vec![format!("- {row}")],
            question: format!("What does the table say for {name}?"),
            answer: row,
            own: vec![name, value.clone()],
            values: vec![value],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Table, 60), (Kind::Kv, 8)]
    }
}
