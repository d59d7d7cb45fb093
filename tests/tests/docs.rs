//! The documentation says what is true: files, links, configurations, commands and their help.

// Its selector is used in the book.
use oasis_example_policy as _;
use oasis_tests as _;

use oasis_core::config::{Layer, Resolved};
use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use oasis_core::policy::{SelectBatch, SelectRequest, SelectorSpec};
use oasis_core::registry;
use oasis_core::working_set::{Admission, RankedBlock, Ranking, TransferPlan, WorkingSet};
use oasis_policies::selectors::CappedLru;
use oasis_tests::references::workspace;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A fenced block of a page: what stands behind the fence, and the text.
struct Block {
    language: String,
    text: String,
}

struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn read(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, text }
    }

    /// README, ARCHITECTURE and the book.
    fn all() -> Vec<Self> {
        let mut paths = ["README.md", "ARCHITECTURE.md"].map(|name| workspace().join(name)).to_vec();
        paths.extend(markdown(&book()));
        paths.into_iter().map(Self::read).collect()
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap()
    }

    fn name(&self) -> String {
        self.path.strip_prefix(workspace()).unwrap().display().to_string()
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut open: Option<Block> = None;
        for line in self.text.lines() {
            match (line.strip_prefix("```"), open.as_mut()) {
                (Some(language), None) => open = Some(Block { language: language.to_owned(), text: String::new() }),
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => block.text.extend([line, "\n"]),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block is not closed", self.name());
        blocks
    }

    /// Targets of links and images outside blocks of code.
    fn links(&self) -> Vec<String> {
        let mut is_code = false;
        let prose = self.text.lines().filter(|line| {
            is_code ^= line.starts_with("```");
            !is_code
        });
        let prose = prose.collect::<Vec<_>>().join("\n");
        let targets = prose.split("](").skip(1).map(|rest| rest.split(')').next().unwrap().to_owned());
        targets.collect()
    }
}

fn book() -> PathBuf {
    workspace().join("docs/src")
}

/// All pages below a folder.
fn markdown(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries
        .flat_map(|path| if path.is_dir() { markdown(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    paths.sort();
    paths
}

/// Lines of shell in a block, continued ones joined, without comments and environment.
fn shell(block: &Block) -> Vec<Vec<String>> {
    let is_console = block.language == "console";
    if !is_console && block.language != "sh" {
        return Vec::new();
    }
    let joined = block.text.replace("\\\n", " ").replace("|\n", "| ");
    let lines = joined.lines().filter_map(|line| if is_console { line.strip_prefix("$ ") } else { Some(line) });
    lines.flat_map(|line| line.split('|').map(words).collect::<Vec<_>>()).filter(|words| !words.is_empty()).collect()
}

/// Words of a command; quotes hold one together, `#` begins a comment, leading assignments are dropped.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for character in command.chars() {
        match character {
            '"' => quoted = !quoted,
            '#' if !quoted && word.is_empty() => break,
            ' ' if !quoted => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
            _ => word.push(character),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    let is_assignment = |word: &String| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_uppercase() || c == '_'))
    };
    words.into_iter().skip_while(is_assignment).collect()
}

/// The arguments of `oasis` in a command, however it is called; `None` for another program.
fn oasis_arguments(words: &[String]) -> Option<Vec<String>> {
    let program = words.first()?;
    let arguments = match program.as_str() {
        "oasis" | "target/release/oasis" => &words[1..],
        "cargo" if words.get(1).is_some_and(|word| word == "run") && !words.iter().any(|word| word == "--example") => {
            let end = words.iter().position(|word| word == "--").expect("cargo run -- ARGUMENTS");
            &words[end + 1..]
        }
        _ => return None,
    };
    Some(arguments.to_vec())
}

/// Text with every run of white space as one space.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_summary_has_every_page_and_every_page_of_the_summary_is_there() {
    let summary = Page::read(book().join("SUMMARY.md"));
    let listed: BTreeSet<PathBuf> = summary.links().iter().map(|link| book().join(link)).collect();
    let there: BTreeSet<PathBuf> = markdown(&book()).into_iter().filter(|path| *path != summary.path).collect();
    assert_eq!(listed, there);
}

#[test]
fn links_images_and_included_files_are_there() {
    let mut checked = 0;
    for page in Page::all() {
        let included = page.text.split("{{#include ").skip(1).map(|rest| rest.split("}}").next().unwrap().to_owned());
        for target in page.links().into_iter().chain(included).filter(|target| !target.starts_with("http")) {
            let file = page.folder().join(target.split('#').next().unwrap());
            assert!(file.exists(), "{}: {target} is not there", page.name());
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn configurations_can_be_read() {
    let mut checked = 0;
    for page in Page::all() {
        for block in page.blocks().iter().filter(|b| b.language == "toml" && !b.text.contains("#include")) {
            let layer = Layer::file("the example", &block.text).unwrap();
            Resolved::new(&[layer]).unwrap_or_else(|error| panic!("{}: {error}\n{}", page.name(), block.text));
            checked += 1;
        }
    }
    assert!(checked >= 4, "{checked}");
}

#[test]
fn commands_can_be_parsed() {
    let mut checked = 0;
    for page in Page::all() {
        let written = page.blocks().iter().flat_map(shell).collect::<Vec<_>>();
        let outputs = page.text.lines().filter_map(|line| line.strip_prefix("<!-- output: ")?.strip_suffix(" -->"));
        for words in outputs.map(words).chain(written) {
            let Some(arguments) = oasis_arguments(&words) else { continue };
            let parsed = oasis_cli::command().try_get_matches_from([vec!["oasis".to_owned()], arguments].concat());
            if let Err(error) = parsed {
                assert_eq!(error.exit_code(), 0, "{}: {}\n{error}", page.name(), words.join(" "));
            }
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn the_reference_prints_the_help_of_every_command() {
    let page = Page::read(book().join("reference/cli.md"));
    let mut documented = BTreeSet::new();
    for block in page.blocks() {
        let (command, text) = block.text.split_once('\n').unwrap();
        let words = words(command.strip_prefix("$ ").unwrap());
        let help = oasis_cli::command().try_get_matches_from(&words).unwrap_err().to_string();
        assert_eq!(plain(text), plain(&help), "the help of `{command}` changed");
        documented.insert(words[1..words.len() - 1].join(" "));
    }
    let command = oasis_cli::command();
    for subcommand in command.get_subcommands() {
        assert!(documented.contains(subcommand.get_name()), "{} is not documented", subcommand.get_name());
        for inner in subcommand.get_subcommands() {
            let name = format!("{} {}", subcommand.get_name(), inner.get_name());
            assert!(documented.contains(&name), "{name} is not documented");
        }
    }
}

#[test]
fn the_reference_has_every_key_with_its_default() {
    let page = Page::read(book().join("reference/configuration.md"));
    let resolved = Resolved::new(&[]).unwrap();
    let expected: Vec<String> =
        resolved.values.iter().map(|(key, value, origin)| plain(&format!("{key} {value} {origin}"))).collect();
    let blocks = page.blocks();
    let explained = blocks.iter().find_map(|block| block.text.strip_prefix("$ oasis explain\n")).unwrap();
    assert_eq!(explained.lines().map(plain).collect::<Vec<_>>(), expected);
    for (key, ..) in &resolved.values {
        assert!(page.text.contains(&format!("| `{key}` |")), "{key} is not explained");
    }
}

#[test]
fn the_reference_has_a_row_for_every_kind() {
    let page = Page::read(book().join("reference/policies.md"));
    let ours = registry::plugins().into_iter().filter(|plugin| plugin.crate_name != "oasis-example-policy");
    let missing: Vec<_> =
        ours.map(|plugin| plugin.kind).filter(|kind| !page.text.contains(&format!("| `{kind}` |"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The example of `concepts/selection.md`.
#[test]
fn the_worked_example_of_selection_is_what_capped_lru_plans() {
    let head = KvHead(0);
    let mut have = WorkingSet::new(1, 8);
    let residents = [(3, 11), (9, 12), (14, 12), (20, 7), (27, 12), (31, 12), (40, 9), (52, 12)];
    for (slot, (block, step)) in residents.into_iter().enumerate() {
        have.place(head, Admission { block: BlockId(block), slot: SlotId::from(slot) }, Step(step));
    }
    let mut want = Ranking::new(1, 1);
    let ranked = [52, 33, 9, 14, 61, 31, 45, 27];
    let ranked = ranked.into_iter().map(|block| RankedBlock { block: BlockId(block), score: 0.0 });
    want.set(0, head, ranked.collect());

    let mut plan = TransferPlan::new(1, 1);
    let batch = SelectBatch { layer: LayerId(0), want: &want, requests: &[SelectRequest { have: &have }], link: None };
    CappedLru { fetch_ratio: 0.25 }.build().unwrap().plan(&batch, &mut plan);
    let pair = |block, slot| Admission { block: BlockId(block), slot: SlotId(slot) };
    assert_eq!(plan.head(0, head), [pair(33, 3), pair(61, 6)]);
}

#[test]
fn figures_of_oasis_tiny_stand_beside_its_caveat() {
    let has_figures = |page: &Page| page.name() == "README.md" || page.name().contains("results/");
    for page in Page::all().into_iter().filter(|page| has_figures(page) && page.text.contains("oasis-tiny")) {
        let text = plain(&page.text.replace(['*', '>'], ""));
        assert!(text.contains("Quest-friendly partly by construction"), "{}", page.name());
    }
}
