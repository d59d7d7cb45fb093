//! Two hops: the question names a place, one fact its guard, another what is asked of the guard.

use super::{Draw, Fact, Kind, Prose, Question};

/// The city or the badge of a place's guard.
pub struct Hop2;

impl Question for Hop2 {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (person, place) = (draw.person(), draw.thing());
        let first = format!("{person} guards the {place}.");
        let (second, question, value) = match draw.below(2) {
            0 => {
                let city = draw.city().to_owned();
                (
                    format!("{person} lives in {city}."),
                    format!("In which city does the guard of the {place} live?"),
                    city,
                )
            }
            _ => {
                let badge = draw.digits(4);
                let question = format!("Which badge does the guard of the {place} carry?");
                (format!("{person} carries badge {badge}."), question, badge)
            }
        };
        let answer = format!("{first} {second}");
        let mut records = vec![first, second];
        draw.shuffle(&mut records);
        Fact { records, question, answer, own: vec![person, place, value.clone()], values: vec![value] }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Hop2, 15), (Kind::Kv, 8)]
    }
}
