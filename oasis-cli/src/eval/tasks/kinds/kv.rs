//! One needle among others: keys with values.

use super::{Draw, Fact, Kind, Prose, Question};

/// The value of one attribute of one thing.
pub struct Kv {
    /// Whether the context has nothing but such facts.
    pub is_dense: bool,
}

/// What the values of an attribute are.
#[derive(Clone, Copy)]
enum Values {
    /// Digits, so many.
    Digits(usize),
    /// An adjective and so many nouns.
    Phrase(usize),
    /// A name.
    Person,
    /// Letter, digit, letter, digit.
    Tag,
}

const ATTRIBUTES: [(&str, Values); 21] = [
    ("access code", Values::Digits(5)),
    ("locker number", Values::Digits(4)),
    ("phone extension", Values::Digits(4)),
    ("vault code", Values::Digits(6)),
    ("gate code", Values::Digits(5)),
    ("serial number", Values::Digits(6)),
    ("room number", Values::Digits(3)),
    ("invoice number", Values::Digits(5)),
    ("account number", Values::Digits(6)),
    ("badge number", Values::Digits(4)),
    ("password", Values::Phrase(1)),
    ("code word", Values::Phrase(1)),
    ("call sign", Values::Phrase(1)),
    ("secret phrase", Values::Phrase(2)),
    ("owner", Values::Person),
    ("keeper", Values::Person),
    ("inspector", Values::Person),
    ("architect", Values::Person),
    ("model tag", Values::Tag),
    ("license plate", Values::Tag),
    ("storage bin", Values::Tag),
];

/// An attribute of things, with values of its own form.
#[derive(Clone, Copy)]
pub struct Attribute {
    /// What it is called.
    pub name: &'static str,
    values: Values,
}

impl Attribute {
    /// Any of them.
    pub fn draw(draw: &mut Draw) -> Self {
        let (name, values) = draw.one(&ATTRIBUTES);
        Self { name, values }
    }

    /// A value.
    pub fn value(self, draw: &mut Draw) -> String {
        match self.values {
            Values::Digits(count) => draw.digits(count),
            Values::Phrase(nouns) => draw.phrase(nouns),
            Values::Person => draw.person(),
            Values::Tag => draw.tag(),
        }
    }

    /// Says in one of several ways that it is `value` of a thing.
    pub fn record(self, draw: &mut Draw, thing: &str, value: &str) -> String {
        let name = self.name;
        match draw.below(7) {
            0 | 1 => format!("The {name} of the {thing} is {value}."),
            2 => format!("Note that the {name} of the {thing} is {value}."),
            3 => format!("Remember: the {name} of the {thing} is {value}."),
            4 => format!("It is known that the {name} of the {thing} is {value}."),
            5 => format!("As for the {thing}, its {name} is {value}."),
            _ => format!("For the {thing}, the {name} is {value}."),
        }
    }

    /// Asks in one of several ways.
    fn question(self, draw: &mut Draw, thing: &str) -> String {
        let name = self.name;
        match draw.below(6) {
            0 | 1 => format!("What is the {name} of the {thing}?"),
            2 => format!("Tell me the {name} of the {thing}."),
            3 => format!("Which {name} does the {thing} have?"),
            4 => format!("Please recall the {name} of the {thing}."),
            _ => format!("I need the {name} of the {thing}."),
        }
    }
}

impl Question for Kv {
    fn draw(&self, draw: &mut Draw, _: &Prose) -> Fact {
        let (attribute, thing) = (Attribute::draw(draw), draw.thing());
        let value = draw.until(|draw| attribute.value(draw), |value| !value.contains(&thing));
        let (name, question) = (attribute.name, attribute.question(draw, &thing));
        let (question, answer) = match draw.below(4) {
            0 => (format!("{question} Reply with the value only."), format!("{value}.")),
            _ => (question, format!("The {name} of the {thing} is {value}.")),
        };
        Fact {
            records: vec![attribute.record(draw, &thing, &value)],
            question,
            answer,
            own: vec![thing, value.clone()],
            values: vec![value],
        }
    }

    fn others(&self) -> &'static [(Kind, usize)] {
        if self.is_dense { &[] } else { &[(Kind::Kv, 60), (Kind::Kv, 8)] }
    }
}
