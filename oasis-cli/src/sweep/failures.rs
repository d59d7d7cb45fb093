//! Points that failed, by what they said.

use crate::error::{CliError, CliResult};

/// The points that failed so far.
#[derive(Default)]
pub struct Failures {
    /// What was said, with the points that said it.
    groups: Vec<(String, Vec<String>)>,
}

impl Failures {
    /// Adds a point and what it said, its hint included.
    pub fn add(&mut self, point: String, text: &str) {
        match self.groups.iter_mut().find(|(known, _)| known == text) {
            Some((_, points)) => points.push(point),
            None => self.groups.push((text.to_owned(), vec![point])),
        }
    }

    /// All of them as one error.
    ///
    /// # Errors
    /// When any point failed.
    pub fn result(self) -> CliResult {
        let count: usize = self.groups.iter().map(|(_, points)| points.len()).sum();
        let text = match self.groups.as_slice() {
            [] => return Ok(()),
            [(text, points)] if points.len() > 1 => {
                let text = format!("{count} points failed, all with: {text}");
                if text.contains("\n  hint: ") {
                    return Err(CliError::Failure(text));
                }
                text
            }
            groups => {
                let group = |(text, points): &(String, Vec<String>)| {
                    let points: String = points.iter().map(|point| format!("\n    {point}")).collect();
                    format!("\n  {}{points}", text.replace('\n', "\n  "))
                };
                let noun = if count == 1 { "point" } else { "points" };
                format!("{count} {noun} failed:{}", groups.iter().map(group).collect::<String>())
            }
        };
        Err(CliError::failure(text, "the same command measures what is missing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(failed: &[(&str, &str)]) -> String {
        let mut failures = Failures::default();
        failed.iter().for_each(|(point, text)| failures.add((*point).to_owned(), text));
        failures.result().unwrap_err().text().unwrap().to_owned()
    }

    #[test]
    fn points_that_say_the_same_are_counted() {
        let again = "\n  hint: the same command measures what is missing";
        assert!(Failures::default().result().is_ok());
        assert_eq!(
            text(&[("a", "no room\n  hint: less"), ("b", "no room\n  hint: less")]),
            "2 points failed, all with: no room\n  hint: less"
        );
        assert_eq!(
            text(&[("a", "no room\n  hint: less"), ("b", "wrong"), ("c", "no room\n  hint: less")]),
            format!("3 points failed:\n  no room\n    hint: less\n    a\n    c\n  wrong\n    b{again}")
        );
        assert_eq!(text(&[("a", "no"), ("b", "no")]), format!("2 points failed, all with: no{again}"));
        assert_eq!(text(&[("a", "wrong")]), format!("1 point failed:\n  wrong\n    a{again}"));
    }
}
