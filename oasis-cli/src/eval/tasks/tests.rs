use super::generate::{Generator, prose_of};
use super::kinds::Kind;
use super::prose::Prose;
use super::*;
use crate::args::GlobalArgs;
use crate::assemble;
use crate::eval::device::Device;
use crate::eval::recall;
use crate::eval::setting::{Contender, Setting};
use crate::settings::resolve;
use clap::ValueEnum;
use std::collections::BTreeSet;

#[test]
fn the_embedded_tasks_are_complete() {
    let tasks = read(None).unwrap();
    assert_eq!(tasks.len(), 120);
    for length in [4096, 8192, 16384] {
        assert_eq!(tasks.iter().filter(|task| task.length == length).count(), 40);
    }
    assert!(tasks.iter().all(|task| !task.question().is_empty() && !task.answer.is_empty()));
}

#[test]
fn a_line_that_is_no_task_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\n{\"id\": 3}\n").unwrap();
    let error = read(Some(file.path())).unwrap_err();
    assert!(error.text().unwrap().contains("line 2"), "{:?}", error.text());
}

#[test]
fn a_file_without_tasks_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\n").unwrap();
    let error = read(Some(file.path())).unwrap_err();
    let expected = format!("{}: expected at least one task, found none\n  hint: ", file.path().display());
    assert!(error.text().unwrap().starts_with(&expected), "{:?}", error.text());
}

#[test]
fn the_embedded_prose_is_long_and_has_no_facts() {
    let prose = prose_of(&read(None).unwrap()).unwrap();
    let sentences: Vec<&str> = prose.starting_at(0).take(prose.count()).collect();
    let bytes: usize = sentences.iter().map(|sentence| sentence.len()).sum();
    assert!(bytes > 200_000, "{bytes}");
    assert!(!sentences.iter().any(|s| s.contains("pass key") || s.contains("Read the text")));
    let distinct: BTreeSet<&str> = sentences.iter().map(|s| s.trim_start()).collect();
    assert_eq!(distinct.len(), sentences.len());
}

/// Runs `f` with the embedded model.
fn on_oasis_tiny<T>(f: impl FnOnce(&Setting<'_>) -> T) -> T {
    let global = GlobalArgs::default();
    let resolved = resolve(&global, Vec::new()).unwrap();
    let model = assemble::open_model(&resolved.config).unwrap();
    f(&Setting::new(&global, &[], &resolved, &model).unwrap())
}

/// Tasks for the embedded model.
fn generate(seed: u64, contains: bool, asked: &[(Kind, usize, usize)]) -> Vec<Task> {
    let prose = prose_of(&read(None).unwrap()).unwrap();
    on_oasis_tiny(|setting| {
        let generator = Generator { text: &setting.text, prose: &prose, seed, contains };
        asked.iter().map(|(kind, length, number)| generator.task(*kind, *length, *number).unwrap()).collect()
    })
}

/// Some tasks of a kind.
fn several(kind: Kind, seed: u64) -> Vec<Task> {
    generate(seed, true, &[1000, 1000, 1000, 2000, 4096].map(|length| (kind, length, length % 7 + seed as usize)))
}

/// What stands before the question.
fn context(task: &Task) -> &str {
    task.question().rsplit_once("\n\n").unwrap().0
}

/// The question itself.
fn question(task: &Task) -> &str {
    let asked = task.question().rsplit_once("\n\n").unwrap().1;
    asked.strip_prefix("Answer this question from the text above: ").unwrap()
}

/// How often `words` stand in `text` by themselves.
fn count(text: &str, words: &str) -> usize {
    let parts: Vec<&str> = text.split(words).collect();
    let is_alone =
        |pair: &&[&str]| !pair[0].ends_with(char::is_alphanumeric) && !pair[1].starts_with(char::is_alphanumeric);
    parts.windows(2).filter(is_alone).count()
}

#[test]
fn a_context_has_the_asked_length_but_for_one_sentence() {
    let lengths = [1000, 1001, 3000, 8192];
    let asked: Vec<_> =
        Kind::value_variants().iter().flat_map(|kind| lengths.map(|length| (*kind, length, 1))).collect();
    let tasks = generate(5, false, &asked);
    on_oasis_tiny(|setting| {
        for task in tasks {
            let prompt = task.prompt(&setting.text).unwrap().len();
            let left = task.length - prompt - task.most_tokens(&setting.text).unwrap();
            // A sentence has at most 40 words.
            assert!(left < 80, "{}: {left} tokens are left", task.id);
            assert_eq!(task.prompt_tokens, Some(prompt));
        }
    });
}

#[test]
fn too_few_tokens_for_the_facts_are_refused() {
    let prose = Prose::of_text("There is one sentence of eight words here.").unwrap();
    on_oasis_tiny(|setting| {
        let generator = Generator { text: &setting.text, prose: &prose, seed: 0, contains: false };
        let error = generator.task(Kind::Multi, 60, 0).unwrap_err();
        let text = error.text().unwrap();
        assert!(text.starts_with("--length: expected at least ") && text.contains(", found 60"), "{text}");
        let prose = Prose::of_text("The pass key is not written down in here.").unwrap();
        let error = Generator { prose: &prose, ..generator }.task(Kind::Passkey, 500, 0).unwrap_err();
        assert!(error.text().unwrap().starts_with("--text: expected a sentence without any of pass key"), "{error:?}");
    });
}

#[test]
fn a_seed_gives_the_same_bytes_and_another_seed_others() {
    let all: Vec<_> = Kind::value_variants().iter().map(|kind| (*kind, 1500, 2)).collect();
    let text = |tasks: &[Task]| tasks.iter().map(|task| serde_json::to_string(task).unwrap()).collect::<Vec<_>>();
    let whole = text(&generate(1, false, &all));
    assert_eq!(whole, text(&generate(1, false, &all)));
    // A task does not depend on which others are asked for.
    assert_eq!(whole[3..4], text(&generate(1, false, &all[3..4])));
    let others = [
        text(&generate(2, false, &all)),
        text(&generate(1, false, &all.iter().map(|t| (t.0, 1500, 3)).collect::<Vec<_>>())),
    ];
    let different: BTreeSet<&str> =
        whole.iter().chain(&others[0]).chain(&others[1]).map(|line| line.as_str()).collect();
    assert_eq!(different.len(), 3 * all.len());
    // What is written is what is read.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), whole.join("\n")).unwrap();
    assert_eq!(text(&read(Some(file.path())).unwrap()), whole);
}

#[test]
fn needles_stand_anywhere() {
    let asked: Vec<_> = (0..40).map(|number| (Kind::Passkey, 1000, number)).collect();
    let depths: Vec<f64> = generate(0, false, &asked).iter().map(|task| task.depths[0]).collect();
    for quarter in 0..4 {
        let here = depths.iter().filter(|depth| (**depth * 4.0) as usize == quarter).count();
        assert!((3..=18).contains(&here), "{here} of 40 in quarter {quarter}: {depths:?}");
    }
}

/// The values are in the facts that are asked for and nowhere else.
#[test]
fn an_answer_stands_where_it_must_and_only_there() {
    for (kind, times) in [(Kind::Passkey, 2), (Kind::Kv, 1), (Kind::KvDense, 1), (Kind::Table, 1), (Kind::Multi, 1)] {
        for task in (0..3).flat_map(|seed| several(kind, seed)) {
            assert!(!task.contains.is_empty());
            for value in &task.contains {
                assert_eq!(count(context(&task), value), times, "{}: {value}", task.id);
                assert!(task.answer.contains(value.as_str()) && !task.question().ends_with(value.as_str()));
            }
            assert_eq!(task.depths.len(), task.contains.len(), "{}", task.id);
            let depth = context(&task).find(&task.contains[0]).unwrap() as f64 / context(&task).len() as f64;
            assert!(task.depths.iter().any(|other| (0.0..0.1).contains(&(depth - other))), "{}: {depth}", task.id);
        }
    }
}

#[test]
fn two_hops_need_both_facts() {
    for task in (0..4).flat_map(|seed| several(Kind::Hop2, seed)) {
        let (first, second) = task.answer.split_once(". ").unwrap();
        let (person, place) = first.split_once(" guards the ").unwrap();
        let question = question(&task);
        // The question names the place alone; the guard stands beside it in one fact, the value beside the guard in another.
        assert!(question.contains(place) && !question.contains(person) && !question.contains(&task.contains[0]));
        let context = context(&task);
        assert_eq!([count(context, place), count(context, person), count(context, &task.contains[0])], [1, 2, 1]);
        assert!(context.contains(&format!("{first}.")) && context.contains(second), "{}", task.answer);
        assert!(second.starts_with(person) && second.ends_with(&format!("{}.", task.contains[0])), "{second}");
    }
}

#[test]
fn the_latest_value_is_the_last() {
    let mut most = 0;
    for task in (0..4).flat_map(|seed| several(Kind::Var, seed)) {
        let question = question(&task);
        let thing =
            question.strip_prefix("What is the dial of the ").unwrap().strip_suffix(" set to at the end?").unwrap();
        let named = format!("The dial of the {thing} is ");
        let settings: Vec<&str> =
            context(&task).split(&named).skip(1).map(|rest| rest.split('.').next().unwrap()).collect();
        assert_eq!(count(context(&task), thing), settings.len());
        assert!(settings[0].starts_with("set to ") && settings[1..].iter().all(|s| s.starts_with("now set to ")));
        assert_eq!(settings.last().unwrap().rsplit(' ').next(), Some(task.contains[0].as_str()));
        assert_eq!(count(context(&task), &task.contains[0]), 1);
        most = most.max(settings.len());
    }
    assert!(most > 1, "no dial was set twice");
}

#[test]
fn lists_counts_and_passages_are_of_their_key() {
    for task in (0..2).flat_map(|seed| several(Kind::Count, seed)) {
        let place = task
            .answer
            .strip_prefix("A bell rang at the ")
            .unwrap()
            .split(&format!(" {} time", task.contains[0]))
            .next()
            .unwrap();
        assert_eq!(count(context(&task), place).to_string(), task.contains[0], "{}", task.answer);
    }
    for kind in [Kind::List, Kind::Copy] {
        for task in several(kind, 0) {
            assert_eq!(count(context(&task), &task.answer), 1, "{}", task.answer);
            assert!(task.contains.iter().all(|part| task.answer.contains(part.as_str())));
            assert!(
                task.answer.contains(task.question().rsplit(' ').nth(if kind == Kind::List { 1 } else { 3 }).unwrap())
            );
        }
    }
}

/// oasis-tiny answers the embedded tasks of these kinds; it would not, were their wording another.
#[test]
fn the_embedded_model_answers_generated_tasks() {
    let asked: Vec<_> =
        [Kind::Passkey, Kind::Kv].iter().flat_map(|kind| (0..6).map(|number| (*kind, 2000, number))).collect();
    let exact = generate(0, false, &asked);
    // The same questions, whose answers are to contain the right values, or those of the next task.
    let mut values: Vec<Vec<String>> = generate(0, true, &asked).into_iter().map(|task| task.contains).collect();
    let mut containing = || {
        let tasks = exact.iter().zip(&values).map(|(task, values)| Task { contains: values.clone(), ..task.clone() });
        let tasks: Vec<Task> = tasks.collect();
        values.rotate_left(1);
        tasks
    };
    let (right, wrong) = (containing(), containing());
    let count = |tasks: &[Task]| {
        let tasks: Vec<&Task> = tasks.iter().collect();
        on_oasis_tiny(|setting| {
            let device = Device::load(setting, &[]).unwrap();
            recall::measure(&device, &[Contender::dense()], &tasks, &mut |_, _| ()).unwrap()[0].all()
        })
    };
    let counts = [count(&exact), count(&right), count(&wrong)];
    assert!(counts[0].0 >= 10 && counts[1].0 >= counts[0].0 && counts[2].0 == 0, "{counts:?}");
    assert!(counts.iter().all(|(_, all)| *all == 12));
}
