//! Latest value: something that is set several times.

use super::{Draw, Fact, Kind, Prose, Question};

/// A dial that is set 1 to 4 times.
pub struct Var;

impl Question for Var {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (thing, settings) = (draw.thing(), draw.between(1, 4));
        let number = |draw: &mut Draw| {
            let digits = draw.between(2, 3);
            draw.digits(digits)
        };
        let last = number(draw);
        let mut values: Vec<String> = (1..settings).map(|_| draw.until(number, |value| *value != last)).collect();
        values.push(last.clone());
        let record = |(index, value)| {
            let now = if index == 0 { "" } else { "now " };
            format!("The dial of the {thing} is {now}set to {value}.")
        };
        Fact {
            records: values.iter().enumerate().map(record).collect(),
            question: format!("What is the dial of the {thing} set to at the end?"),
            answer: format!("The dial of the {thing} is set to {last}."),
            values: vec![last.clone()],
            own: vec![thing, last],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Var, 20), (Kind::Kv, 8)]
    }
}
