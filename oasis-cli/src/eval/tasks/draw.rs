//! Seeded draws: numbers, names and things that facts are about.

use oasis_core::policy::split_mix64;
use std::sync::LazyLock;

/// Lists of words under their names, `[name]` above each.
const WORDS: &str = include_str!("../../../assets/words.txt");

static ADJECTIVES: LazyLock<Vec<&str>> = LazyLock::new(|| words("adjectives"));
static NOUNS: LazyLock<Vec<&str>> = LazyLock::new(|| words("nouns"));
static FIRST_NAMES: LazyLock<Vec<&str>> = LazyLock::new(|| words("first"));
static LAST_NAMES: LazyLock<Vec<&str>> = LazyLock::new(|| words("last"));
static CITIES: LazyLock<Vec<&str>> = LazyLock::new(|| words("cities"));
static ITEMS: LazyLock<Vec<&str>> = LazyLock::new(|| words("items"));

/// Letters of tags: none that looks like a digit.
const LETTERS: &[u8] = b"ABCDEFGHJKLMNPQRSTUVWXYZ";

/// The list of a name.
fn words(name: &str) -> Vec<&'static str> {
    let heading = format!("[{name}]");
    let list = WORDS.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| !line.starts_with('['));
    list.flat_map(str::split_whitespace).collect()
}

/// A seeded source of draws. The same seed gives the same draws on every machine.
#[derive(Debug, Clone)]
pub struct Draw {
    state: u64,
}

impl Draw {
    /// A source of its own for each list of `parts`.
    pub fn new(seed: u64, parts: &[u64]) -> Self {
        let mix = |state: u64, part: &u64| split_mix64(&mut (state ^ part));
        Self { state: parts.iter().fold(split_mix64(&mut seed.clone()), mix) }
    }

    /// A number of `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        // The high word of the product: uniform but for one part in 2^64 / end.
        ((u128::from(split_mix64(&mut self.state)) * end as u128) >> 64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high + 1 - low)
    }

    /// A share of 1, below 1.
    pub fn share(&mut self) -> f64 {
        (split_mix64(&mut self.state) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// One of `choices`.
    pub fn one<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Puts `list` in another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.between(0, last));
        }
    }

    /// `draw`s until `fits`.
    pub fn until<T>(&mut self, draw: impl Fn(&mut Self) -> T, fits: impl Fn(&T) -> bool) -> T {
        loop {
            let drawn = draw(self);
            if fits(&drawn) {
                return drawn;
            }
        }
    }

    /// `count` digits.
    pub fn digits(&mut self, count: usize) -> String {
        (0..count).map(|_| char::from(b'0' + self.below(10) as u8)).collect()
    }

    /// Letter, digit, letter, digit.
    pub fn tag(&mut self) -> String {
        let mut pair = || format!("{}{}", char::from(self.one(LETTERS)), self.below(10));
        pair() + &pair()
    }

    /// An adjective, then `nouns` nouns.
    pub fn phrase(&mut self, nouns: usize) -> String {
        let nouns: Vec<&str> = (0..nouns).map(|_| self.one(&NOUNS)).collect();
        format!("{} {}", self.one(&ADJECTIVES), nouns.join(" "))
    }

    /// A thing, such as `copper forge`.
    pub fn thing(&mut self) -> String {
        self.phrase(1)
    }

    /// First and last name.
    pub fn person(&mut self) -> String {
        format!("{} {}", self.one(&FIRST_NAMES), self.one(&LAST_NAMES))
    }

    /// A city.
    pub fn city(&mut self) -> &'static str {
        self.one(&CITIES)
    }

    /// Different goods.
    pub fn items(&mut self, count: usize) -> Vec<&'static str> {
        let mut items = ITEMS.clone();
        self.shuffle(&mut items);
        items.truncate(count);
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_list_has_different_words() {
        for (name, least) in
            [("adjectives", 100), ("nouns", 150), ("first", 70), ("last", 70), ("cities", 70), ("items", 80)]
        {
            let list = words(name);
            assert!(list.len() >= least, "{name}: {}", list.len());
            assert_eq!(list.iter().collect::<BTreeSet<_>>().len(), list.len(), "{name}");
            assert!(list.iter().all(|word| word.chars().all(char::is_alphabetic)), "{name}");
        }
    }

    #[test]
    fn draws_are_even_and_of_their_seed() {
        let mut counts = [0; 7];
        let mut draw = Draw::new(3, &[1]);
        for _ in 0..7000 {
            counts[draw.below(7)] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        let first = |seed, parts: &[u64]| Draw::new(seed, parts).digits(12);
        assert_eq!(first(3, &[1, 2]), first(3, &[1, 2]));
        let different = [first(3, &[1, 2]), first(3, &[2, 1]), first(4, &[1, 2]), first(3, &[1])];
        assert_eq!(different.iter().collect::<BTreeSet<_>>().len(), 4, "{different:?}");
    }

    #[test]
    fn a_shuffle_keeps_all_and_items_do_not_repeat() {
        let mut draw = Draw::new(0, &[]);
        let mut list: Vec<usize> = (0..50).collect();
        draw.shuffle(&mut list);
        assert_ne!(list, (0..50).collect::<Vec<_>>());
        assert_eq!(list.into_iter().collect::<BTreeSet<_>>().len(), 50);
        assert_eq!(draw.items(9).into_iter().collect::<BTreeSet<_>>().len(), 9);
    }
}
