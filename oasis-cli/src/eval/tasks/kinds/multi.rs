//! Several needles: the values of several keys in one answer.

use super::kv::Attribute;
use super::{Draw, Fact, Kind, Prose, Question, enumerate, mentions};

/// One attribute of 2 to 5 things.
pub struct Multi;

impl Question for Multi {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (attribute, count) = (Attribute::draw(draw), draw.between(2, 5));
        let mut own: Vec<String> = Vec::new();
        let mut pairs = Vec::new();
        for _ in 0..count {
            let is_new = |text: &String| !own.iter().any(|own| mentions(own, text) || mentions(text, own));
            let thing = draw.until(Draw::thing, is_new);
            let value = draw.until(|draw| attribute.value(draw), |value| is_new(value) && !value.contains(&thing));
            own.extend([thing.clone(), value.clone()]);
            pairs.push((thing, value));
        }
        let records = pairs.iter().map(|(thing, value)| attribute.record(draw, thing, value)).collect();
        // Asked for in another order than they stand in.
        draw.shuffle(&mut pairs);
        let things: Vec<String> = pairs.iter().map(|(thing, _)| format!("the {thing}")).collect();
        let answers: Vec<String> = pairs.iter().map(|(thing, value)| format!("the {thing}: {value}")).collect();
        Fact {
            records,
            question: format!("List the {} of {}.", attribute.name, enumerate(&things)),
            answer: format!("{}.", answers.join("; ")),
            values: pairs.into_iter().map(|(_, value)| value).collect(),
            own,
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        &[(Kind::Kv, 60), (Kind::Kv, 8)]
    }
}
