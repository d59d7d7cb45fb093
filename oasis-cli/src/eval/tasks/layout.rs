//! Where facts stand in a prompt.

use super::draw::Draw;
use super::kinds::{Fact, Kind};
use super::prose::Prose;

/// What a prompt begins with.
const HEADING: &str = "Read the text and answer the question.";
/// Fewest and most rows of a table that stand together.
const ROWS: [usize; 2] = [3, 40];

/// A prompt before it is written.
#[derive(Debug)]
pub struct Layout {
    /// What is asked for.
    pub target: Fact,
    /// What stands between the facts: sentences, each with the space before it.
    pub hay: Vec<String>,
    /// In order of their places.
    groups: Vec<Group>,
}

/// Records that stand together.
#[derive(Debug)]
struct Group {
    /// Share of the hay before them, below 1.
    place: f64,
    /// Each with the space or line break before it, and whether it is the target's.
    records: Vec<(String, bool)>,
}

impl Layout {
    /// Facts of a prompt of about `length` tokens at even random places, without hay.
    pub fn draw(kind: Kind, length: usize, prose: &Prose, draw: &mut Draw) -> Self {
        let target = kind.draw(draw, prose);
        let mut facts = vec![(kind, target.records.clone(), true)];
        for (kind, count) in kind.others(length) {
            for _ in 0..count {
                let about_else = |fact: &Fact| !fact.records.iter().any(|record| target.is_mentioned(record));
                let fact = draw.until(|draw| kind.draw(draw, prose), about_else);
                facts.push((kind, fact.records, false));
            }
        }

        // Records in any order, but those of one fact in theirs.
        let records = facts.iter().enumerate().flat_map(|(fact, (_, records, _))| records.iter().map(move |_| fact));
        let mut order: Vec<usize> = records.collect();
        draw.shuffle(&mut order);
        let mut facts: Vec<_> =
            facts.into_iter().map(|(kind, records, own)| (kind, records.into_iter(), own)).collect();
        let (mut rows, mut groups): (Vec<_>, Vec<Vec<_>>) = (Vec::new(), Vec::new());
        for fact in order {
            let (kind, records, is_target) = &mut facts[fact];
            let record = records.next().expect("the order has each record once");
            match kind {
                Kind::Table => rows.push((format!("\n{record}"), *is_target)),
                Kind::Copy => groups.push(vec![(format!("\n{record}"), *is_target)]),
                _ => groups.push(vec![(format!(" {record}"), *is_target)]),
            }
        }
        while !rows.is_empty() {
            let count = draw.between(ROWS[0], ROWS[1]).min(rows.len());
            let group = rows.drain(..count).collect();
            groups.insert(draw.between(0, groups.len()), group);
        }

        let mut places: Vec<f64> = groups.iter().map(|_| draw.share()).collect();
        places.sort_by(f64::total_cmp);
        let groups = places.into_iter().zip(groups).map(|(place, records)| Group { place, records }).collect();
        Self { target, hay: Vec::new(), groups }
    }

    /// The user's message, with `lead` before the question, and the share of its context that stands before each record of the target.
    pub fn write(&self, lead: &str) -> (String, Vec<f64>) {
        let (mut content, mut starts, mut laid) = (HEADING.to_owned(), Vec::new(), 0);
        for Group { place, records } in &self.groups {
            let before = (place * (self.hay.len() + 1) as f64) as usize;
            content.extend(self.hay[laid..before].iter().map(String::as_str));
            laid = before;
            for (record, is_target) in records {
                if *is_target {
                    starts.push(content.len());
                }
                content.push_str(record);
            }
        }
        content.extend(self.hay[laid..].iter().map(String::as_str));
        let whole = content.len() as f64;
        let depths = starts.into_iter().map(|start| (start as f64 / whole * 1000.0).round() / 1000.0).collect();
        content.push_str(&format!("\n\n{lead}{}", self.target.question));
        (content, depths)
    }
}
