use super::*;
use crate::geometry::HeadShape;
use crate::memory::{KvStore, Transport};
use crate::policy::{Predictor, Selector, SpecError, Summarizer};
use crate::testkit::doubles::{ByScore, FirstKey, MapStore, copy_transport, lru_selector};
use crate::testkit::{Random, for_all, fuzz_cases};
use std::sync::Arc;

/// Stand-ins under the names of the default kinds, and second kinds to switch to.
macro_rules! stand_in {
    ($kind:literal, $role:ident, $spec:ident { $($field:ident: $type:ty = $default:expr),* },
     ($($arg:ident: $arg_type:ty)?) -> $built:ty { $build:expr }) => {
        #[derive(Debug, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        struct $spec { $($field: $type),* }

        impl Default for $spec {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }

        oasis_core::register! {
            kind: $kind, about: "A stand-in", device_code: false,
            impl $role for $spec {
                fn build(&self $(, $arg: $arg_type)?) -> Result<$built, SpecError> {
                    Ok($build)
                }
            }
        }
    };
}

stand_in!("quest", SummarizerSpec, Quest {}, (_shape: HeadShape) -> Box<dyn Summarizer> { Box::new(FirstKey) });
stand_in!("draft-query", PredictorSpec, DraftQuery {}, () -> Box<dyn Predictor> { Box::new(ByScore::default()) });
stand_in!(
    "capped-lru",
    SelectorSpec,
    CappedLru { fetch_ratio: f64 = 0.05, sinks: usize = 0 },
    () -> Box<dyn Selector> { lru_selector(1) }
);
stand_in!("fetch-all", SelectorSpec, FetchAll { eager: bool = false }, () -> Box<dyn Selector> { lru_selector(9) });
stand_in!("memcpy", TransportSpec, Memcpy {}, () -> Box<dyn Transport> { copy_transport() });
stand_in!("dram", StoreSpec, Dram { capacity: Bytes = Bytes(8 << 30) }, () -> Arc<dyn KvStore> {
    Arc::new(MapStore::default())
});

stand_in!(
    "two-level",
    StoreSpec,
    TwoLevel { size: usize = 1, backing: Box<dyn StoreSpec> = Box::new(Dram::default()) },
    () -> Arc<dyn KvStore> { Arc::new(MapStore::default()) }
);

fn file(text: &str) -> Layer {
    Layer::file("run.toml", text).unwrap()
}

fn set(assignment: &str) -> Layer {
    Layer::assignment(&format!("--set {assignment}"), assignment).unwrap()
}

fn env(variables: &[(&str, &str)]) -> Vec<Layer> {
    Layer::env(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

/// Value and origin of a key, as `oasis explain` shows them.
fn explain(resolved: &Resolved, key: &str) -> String {
    let (_, value, origin) = resolved.values.iter().find(|(k, ..)| k == key).expect(key);
    format!("{value} ({origin})")
}

fn error(layers: &[Layer]) -> ConfigError {
    Resolved::new(layers).expect_err("the configuration is wrong")
}

#[test]
fn later_layers_win_and_every_value_knows_its_origin() {
    let mut layers = vec![file("[kv]\nblock_tokens = 8\nbudget_blocks = 9\n[selector]\nfetch_ratio = 1\nsinks = 3")];
    layers.extend(env(&[("OASIS_SELECTOR__FETCH_RATIO", "0.5"), ("OASIS_KV__BUDGET_BLOCKS", "10")]));
    layers.push(set("selector.fetch_ratio=0.25"));
    let resolved = Resolved::new(&layers).unwrap();
    assert_eq!(explain(&resolved, "kv.block_tokens"), "8 (run.toml)");
    assert_eq!(explain(&resolved, "kv.budget_blocks"), "10 (environment OASIS_KV__BUDGET_BLOCKS)");
    assert_eq!(explain(&resolved, "selector.fetch_ratio"), "0.25 (argument --set selector.fetch_ratio=0.25)");
    assert_eq!(explain(&resolved, "selector.sinks"), "3 (run.toml)");
    assert_eq!(explain(&resolved, "selector.kind"), "\"capped-lru\" (default)");
    assert_eq!(explain(&resolved, "engine.max_batch"), "8 (default)");
    assert_eq!(
        resolved.config.kv,
        KvConfig { block_tokens: 8, budget_blocks: Budget::Blocks(10), ..KvConfig::default() }
    );
}

#[test]
fn an_unknown_section_key_or_kind_suggests_the_nearest() {
    let section = error(&[file("[selektor]\nkind = \"capped-lru\"")]);
    assert_eq!((section.key.as_str(), section.hint.as_deref()), ("selektor", Some("did you mean `selector`?")));

    let key = error(&[set("selector.fetch_ration=1")]).to_string();
    assert_eq!(
        key,
        "selector.fetch_ration: expected one of the keys fetch_ratio, kind, sinks, found `fetch_ration` (from argument \
         --set selector.fetch_ration=1)\n  hint: did you mean `fetch_ratio`?"
    );

    let kind = error(&[file("[selector]\nkind = \"caped-lru\"")]).to_string();
    assert_eq!(
        kind,
        "selector.kind: expected one of capped-lru, fetch-all, found `caped-lru` (from run.toml)\n  hint: did you mean \
         `capped-lru`?"
    );

    let foreign = error(&[set("selector.kind=my-plugin")]);
    assert!(foreign.hint.is_some_and(|hint| hint.contains("links its crate")));
    assert_eq!(error(&[set("selector.kind=3")]).to_string().lines().next().unwrap().matches("found 3").count(), 1);
}

#[test]
fn a_value_of_the_wrong_type_is_named_with_its_origin() {
    let (whole, size) = ("a whole number of at least 0", "a size such as \"8GiB\"");
    let blocks = "a number of blocks or \"all\"";
    for (assignment, key, expected, found) in [
        ("kv.block_tokens=-3", "kv.block_tokens", whole, "-3"),
        ("kv.block_tokens=many", "kv.block_tokens", whole, "\"many\""),
        ("selector.fetch_ratio=all", "selector.fetch_ratio", "a number", "\"all\""),
        ("selector.sinks=true", "selector.sinks", whole, "true"),
        ("store.capacity=huge", "store.capacity", size, "\"huge\""),
        ("store.capacity=-1", "store.capacity", "a size such as \"8GiB\" or a number of bytes", "-1"),
        ("device.kind=tpu", "device.kind", "`cpu` or `cuda`", "\"tpu\""),
        (
            "device.prefill_multiprocessors=99999999999",
            "device.prefill_multiprocessors",
            "a whole number from 0 to 4,294,967,295",
            "99999999999",
        ),
        ("sampling.temperature=[1]", "sampling.temperature", "a number", "an array"),
        ("model.path=3", "model.path", "a text", "3"),
        ("kv.budget_blocks=some", "kv.budget_blocks", blocks, "\"some\""),
        ("kv.budget_blocks=-1", "kv.budget_blocks", blocks, "-1"),
    ] {
        // A sound value of another key, which must not be blamed.
        let error = error(&[file("[engine]\nmax_batch = 3\n[selector]\nsinks = 1"), set(assignment)]);
        assert_eq!((error.key.as_str(), error.found.as_str()), (key, found), "{error}");
        assert_eq!(error.origin, Some(Origin::Argument(format!("--set {assignment}"))), "{error}");
        assert_eq!(error.expected, expected, "{error}");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.starts_with("the default is ")), "{error}");
    }
    let section = error(&[file("kv = 3")]);
    assert_eq!((section.key.as_str(), section.found.as_str()), ("kv", "3"));
    let role = error(&[file("selector = 3")]);
    assert_eq!((role.key.as_str(), role.found.as_str()), ("selector", "3"));
}

#[test]
fn impossible_numbers_are_named_with_their_origin() {
    for (assignment, key) in [
        ("kv.block_tokens=0", "kv.block_tokens"),
        ("kv.budget_blocks=0", "kv.budget_blocks"),
        ("kv.draft_blocks=0", "kv.draft_blocks"),
        ("engine.max_batch=0", "engine.max_batch"),
        ("sampling.temperature=nan", "sampling.temperature"),
        ("sampling.temperature=-1", "sampling.temperature"),
        ("sampling.top_p=0", "sampling.top_p"),
        ("sampling.top_p=1.5", "sampling.top_p"),
    ] {
        let error = error(&[set(assignment)]);
        assert_eq!(error.key, key);
        assert_eq!(error.origin, Some(Origin::Argument(format!("--set {assignment}"))));
    }
}

#[test]
fn a_layer_that_switches_the_kind_drops_the_other_kinds_fields() {
    let lru = file("[selector]\nkind = \"capped-lru\"\nfetch_ratio = 0.5");
    let resolved = Resolved::new(&[lru.clone(), set("selector.kind=fetch-all")]).unwrap();
    let selector: Vec<&str> =
        resolved.values.iter().map(|(k, ..)| k.as_str()).filter(|k| k.starts_with("selector.")).collect();
    assert_eq!(selector, ["selector.kind", "selector.eager"]);
    // A field of the new kind counts when its layer comes after the switch, and is unknown before it.
    assert!(Resolved::new(&[lru.clone(), set("selector.kind=fetch-all"), set("selector.eager=true")]).is_ok());
    let back = Resolved::new(&[lru.clone(), set("selector.kind=fetch-all"), set("selector.kind=capped-lru")]).unwrap();
    assert_eq!(explain(&back, "selector.fetch_ratio"), "0.5 (run.toml)");
    assert_eq!(error(&[lru, set("selector.kind=fetch-all"), set("selector.sinks=1")]).key, "selector.sinks");
}

#[test]
fn fields_of_a_part_within_a_section_are_set_one_by_one() {
    let kind = set("store.kind=two-level");
    let backing = |layers: &[Layer]| explain(&Resolved::new(layers).unwrap(), "store.backing");
    assert!(backing(std::slice::from_ref(&kind)).starts_with("{ capacity = \"8.0 GiB\", kind = \"dram\" }"));
    let small = set("store.backing.capacity=1MiB");
    assert!(backing(&[kind.clone(), small.clone()]).starts_with("{ capacity = \"1MiB\", kind = \"dram\" }"));
    let other = set("store.backing.kind=two-level");
    assert!(backing(&[kind.clone(), small, other.clone()]).starts_with("{ kind = \"two-level\" }"));
    let inner = set("store.backing.backing.kind=dram");
    assert!(backing(&[kind.clone(), other, inner]).contains("backing = { kind = \"dram\" }"));
    let wrong = error(&[kind, set("store.backing.capacity=much")]);
    assert_eq!(wrong.key, "store.backing");
    assert_eq!(wrong.origin.unwrap().to_string(), "argument --set store.backing.capacity=much");
}

#[test]
fn a_budget_is_a_number_or_all() {
    let budget = |layer| Resolved::new(&[layer]).unwrap().config.kv.budget_blocks;
    assert_eq!(budget(set("kv.budget_blocks=all")), Budget::All);
    assert_eq!(budget(file("[kv]\nbudget_blocks = \"all\"")), Budget::All);
    assert_eq!(budget(set("kv.budget_blocks=7")), Budget::Blocks(7));
    assert_eq!([Budget::All, Budget::Blocks(3)].map(|b| b.to_string()), ["all", "3"]);
    let zero = error(&[set("kv.budget_blocks=0")]);
    assert!(zero.hint.is_some() && zero.expected.contains("\"all\""));
}

#[test]
fn sizes_are_written_as_people_write_them() {
    let read = |text: &str| {
        let table = toml::from_str::<toml::Table>(&format!("v = {text}")).unwrap();
        table["v"].clone().try_into::<Bytes>().map(|b| b.0)
    };
    assert_eq!(read("\"8GiB\""), Ok(8 << 30));
    assert_eq!(read("\"512 MB\""), Ok(512_000_000));
    assert_eq!(read("4096"), Ok(4096));
    assert_eq!(read("\"17\""), Ok(17));
    for wrong in ["-1", "1.5", "\"\"", "\"8 potatoes\"", "true"] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
    for_all(100, |random| {
        let bytes = Bytes(random.any::<u64>() >> random.below(64) & (i64::MAX as u64));
        let written = toml::Value::try_from(bytes).unwrap();
        assert_eq!(written.clone().try_into::<Bytes>().unwrap(), bytes, "{written}");
    });
}

#[test]
fn environment_variables_without_a_section_are_other_settings() {
    let layers = env(&[
        ("OASIS_LOG", "debug"),
        ("HOME", "/"),
        ("OASIS___KIND", "1"),
        ("OASIS_KV__BLOCK_TOKENS", "4"),
        ("oasis_kv__x", "1"),
    ]);
    assert_eq!(layers.len(), 1);
    assert_eq!(Resolved::new(&layers).unwrap().config.kv.block_tokens, 4);
    let text = env(&[("OASIS_MODEL__PATH", "/models/a b"), ("OASIS_STORE__CAPACITY", "2GiB")]);
    let resolved = Resolved::new(&text).unwrap();
    assert_eq!(resolved.config.model.path, "/models/a b");
    assert_eq!(explain(&resolved, "store.capacity"), "\"2GiB\" (environment OASIS_STORE__CAPACITY)");
    assert_eq!(error(&env(&[("OASIS_KV__BLOCKS", "1")])).origin, Some(Origin::Env("OASIS_KV__BLOCKS".to_owned())));
}

#[test]
fn an_assignment_needs_a_key_and_a_value() {
    for wrong in ["", "selector.kind", "=3", " = 3", ".kind=3", "selector.=3", "selector..kind=3"] {
        let error = Layer::assignment("--set", wrong).unwrap_err();
        assert_eq!((error.key.as_str(), error.found), ("--set", format!("`{wrong}`")));
    }
    assert_eq!(Resolved::new(&[set("model.path=a=b")]).unwrap().config.model.path, "a=b");
}

#[test]
fn a_file_that_is_no_toml_is_named_with_the_line() {
    let error = Layer::file("run.toml", "[kv]\nblock_tokens = = 3").unwrap_err();
    assert_eq!(error.key, "run.toml");
    assert!(error.found.contains("line 2"), "{error}");
}

#[test]
fn the_written_document_reads_back_the_same() {
    let layers = [file("[kv]\nbudget_blocks = \"all\"\n[store]\ncapacity = 12345"), set("selector.kind=fetch-all")];
    let first = Resolved::new(&layers).unwrap();
    let second = Resolved::new(&[file(&first.to_toml())]).unwrap();
    let values = |r: &Resolved| r.values.iter().map(|(k, v, _)| (k.clone(), v.clone())).collect::<Vec<_>>();
    assert_eq!(values(&first), values(&second));
    assert_eq!(first.to_toml(), second.to_toml());
    assert_eq!(format!("{:?}", first.config), format!("{:?}", second.config));
}

#[test]
fn no_input_makes_the_configuration_panic() {
    for_all(fuzz_cases(300), |random| {
        let _ = Layer::file("garbage", &random.any::<String>()).map(|layer| Resolved::new(&[layer]));
        let text: Vec<String> = (0..random.within(0, 6)).map(|_| line(random)).collect();
        if let Ok(layer) = Layer::file("garbled", &text.join("\n")) {
            let assignment = Layer::assignment("--set", &format!("{}={}", key(random), value(random)));
            let variable = (format!("OASIS_{}", key(random).replace('.', "__").to_uppercase()), value(random));
            let layers: Vec<Layer> = [layer].into_iter().chain(Layer::env([variable])).chain(assignment).collect();
            match Resolved::new(&layers) {
                Ok(resolved) => drop(Resolved::new(&[file(&resolved.to_toml())]).expect("what was written reads back")),
                Err(error) => assert!(!error.expected.is_empty() && !error.found.is_empty(), "{error}"),
            }
        }
    });
}

fn key(random: &mut Random) -> String {
    let section = random.pick(&["kv", "selector", "store", "model", "sampling", "engine", "", "nothing"]);
    let field = random.pick(&["kind", "block_tokens", "budget_blocks", "fetch_ratio", "capacity", "path", "top_p", ""]);
    format!("{section}.{field}")
}

fn value(random: &mut Random) -> String {
    match random.below(4) {
        0 => random.any::<String>(),
        1 => random.any::<i64>().to_string(),
        2 => random.any::<f64>().to_string(),
        _ => random.pick(&["all", "\"all\"", "fetch-all", "8GiB", "[]", "{}", "nan", "1979-05-27", "true"]).to_owned(),
    }
}

fn line(random: &mut Random) -> String {
    match random.below(3) {
        0 => format!("[{}]", random.pick(&["kv", "selector", "store", "model", "a.b", "]"])),
        _ => format!("{} = {}", key(random).rsplit('.').next().unwrap_or_default(), value(random)),
    }
}
