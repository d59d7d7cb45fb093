//! A replay is the run it was recorded from.

use crate::args::GlobalArgs;
use crate::assemble;
use crate::eval::device::Device;
use crate::eval::observed::Plan;
use crate::eval::setting::Setting;
use crate::eval::tests::turn;
use crate::eval::window::Window;
use crate::output::NewFile;
use crate::replay::link::LinkClock;
use crate::replay::recording::{Counts, Member, Request, Selection};
use crate::replay::{LinkModel, Recording, Replayed, record, replay};
use crate::settings::resolve;
use oasis_core::config::{Layer, Resolved};
use oasis_core::executor::ExecutorStats;
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::policy::{QuerySource, Selector};

/// Records 2 windows of 40 steps after 300 tokens, K = 8 or as `settings` say, on the embedded model: tail blocks complete
/// on the way.
fn live(settings: &[&str]) -> (Recording, ExecutorStats, Resolved) {
    let layers: Vec<Layer> = ["kv.budget_blocks=8", "selector.fetch_ratio=0.25"]
        .iter()
        .chain(settings)
        .map(|setting| Layer::assignment(setting, setting).unwrap())
        .collect();
    let global = GlobalArgs::default();
    let resolved = resolve(&global, layers.clone()).unwrap();
    let model = assemble::open_model(&resolved.config).unwrap();
    let setting = Setting::new(&global, &layers, &resolved, &model).unwrap();
    let text = "And he said, I will not do it, if I find thirty there; and the king went into the city by night. ";
    let windows = Window::cut(&setting.text.encode(&text.repeat(50)).unwrap(), 300, 40, 2).unwrap();
    assert_eq!(windows.len(), 2);
    let plan = Plan::new(&setting).unwrap();
    let device = Device::load(&setting, &[]).unwrap();
    let mut executor = plan.start(&device, &windows).unwrap();
    let recording = record(&mut executor, &windows, resolved.to_toml(), &mut |_, _| ()).unwrap();
    (recording, executor.stats(), resolved)
}

fn selector(resolved: &Resolved) -> Box<dyn Selector> {
    assemble::build_selector(resolved).unwrap()
}

fn counts(row: &Replayed) -> Counts {
    Counts { filled: row.filled, admitted: row.admitted, deferred: row.deferred }
}

/// Policies of which every device shows its steps.
const EVERYWHERE: [&[&str]; 7] = [
    &[],
    &["selector.kind=fetch-all"],
    &["selector.kind=static"],
    &["selector.kind=hysteresis", "selector.fetch_ratio=0.25"],
    &["selector.kind=lfu", "selector.fetch_ratio=0.5"],
    &["selector.kind=adaptive-cap", "selector.max_ratio=1.0"],
    &["predictor.kind=exact"],
];

#[test]
fn a_replay_of_the_same_policy_equals_the_run() {
    let others: [&[&str]; 2] =
        [&["predictor.kind=freekv", "selector.kind=fetch-all"], &["predictor.kind=infinigen", "kv.dense_layers=1"]];
    let mut admitted: Vec<u64> =
        EVERYWHERE.iter().chain(&others).map(|settings| equals_the_run(settings).admitted).collect();
    admitted.sort_unstable();
    admitted.dedup();
    assert!(admitted.len() >= 6, "the policies differ: {admitted:?}");
}

/// Compares a run's replay with it, selection by selection.
fn equals_the_run(settings: &[&str]) -> Replayed {
    let (recording, stats, resolved) = live(settings);
    let mut compared = 0;
    let (budget, source) = (recording.budget as usize, QuerySource::Draft);
    let row = replay(&recording, &mut *selector(&resolved), budget, source, None, |selection, index, counts| {
        let at = format!("{settings:?}, layer {} of step {}", selection.layer, selection.step);
        assert_eq!(counts, selection.members[index].live, "{at}");
        compared += 1;
    })
    .unwrap();
    let expected = (stats.filled_entries, stats.admitted_entries, stats.deferred_entries, stats.link_bytes);
    assert_eq!((row.filled, row.admitted, row.deferred, row.link_bytes), expected, "{settings:?}");
    assert!(compared > 5 * 2 * 38 && row.promoted > 0 && row.wanted > 0, "{settings:?}: {compared}, {row:?}");
    assert_eq!(row.hits + row.misses, row.wanted);
    assert_eq!(row.misses, row.admitted + row.deferred);
    let live = Replayed::live(&recording, row.cap);
    assert_eq!((counts(&live), live.hits, &live.layers), (counts(&row), row.hits, &row.layers), "{settings:?}");
    row
}

/// As on the CPU, and with a working set that the prompt does not fill, which a GPU fills all the same.
#[test]
fn a_replay_of_a_gpu_equals_the_run() {
    let Some(_turn) = turn("a_replay_of_a_gpu_equals_the_run") else { return };
    let few_blocks: &[&str] = &["kv.budget_blocks=19", "selector.kind=lfu", "selector.fetch_ratio=0.5"];
    for settings in EVERYWHERE.into_iter().chain([few_blocks]) {
        let row = equals_the_run(&[&["device.kind=cuda"], settings].concat());
        println!("{settings:?}: {row:?}");
        assert!(row.filled > 0, "{settings:?}: {row:?}");
    }
}

/// One layer and KV head, 4 blocks of 2 tokens and two slots.
fn by_hand() -> Recording {
    let geometry = KvGeometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 4, block_tokens: 2, dtype: KvDtype::F32 };
    let selection = |step: u64, completed: Option<u32>, wanted: &[u32]| Selection {
        layer: 0,
        step,
        link: None,
        members: vec![Member {
            request: 0,
            completed,
            heads: vec![wanted.iter().map(|&block| (block, 1.0 / (1.0 + block as f32))).collect()],
            live: Counts::default(),
        }],
    };
    Recording {
        config: String::new(),
        geometry,
        budget: 2,
        steps: 4,
        requests: vec![Request { prompt: 8, tokens: 12 }],
        selections: vec![
            selection(1, None, &[0, 1]),
            selection(2, None, &[0, 2]),
            selection(3, Some(4), &[2, 4]),
            selection(4, None, &[1, 3]),
        ],
    }
}

fn with(kind: &str) -> Box<dyn Selector> {
    let layer = Layer::assignment("test", &format!("selector.kind={kind}")).unwrap();
    selector(&Resolved::new(&[layer]).unwrap())
}

#[test]
fn the_figures_are_those_that_a_hand_counts() {
    let replay = |kind: &str, budget: usize| {
        replay(&by_hand(), &mut *with(kind), budget, QuerySource::Draft, None, |_, _, _| ()).unwrap()
    };
    // Filled with 0 and 1. Step 2: 0 hits, 2 enters for 1. Step 3: block 4 is promoted for 0, both hit. Step 4: two misses.
    let all = replay("fetch-all", 2);
    assert_eq!((all.filled, all.wanted, all.hits, all.admitted, all.deferred), (2, 6, 3, 3, 0));
    assert_eq!((all.promoted, all.link_bytes, all.layers[0]), (1, 3 * 2 * 2 * 4 * 4, 0.5));
    // Step 2: 2 stays outside. Step 3: 4 takes the place of 1, and 2 is missing still. Step 4: both are.
    let none = replay("static", 2);
    assert_eq!((none.filled, none.hits, none.admitted, none.deferred), (2, 2, 0, 4));
    // The best block alone. 0 is filled and hits; block 4 is promoted for it, and 2 enters for that; then 1.
    let one = replay("fetch-all", 1);
    assert_eq!((one.filled, one.wanted, one.hits, one.admitted), (1, 3, 1, 2));
}

/// A GPU fills a working set even where it has a slot for every block of the prompt.
#[test]
fn a_short_prompt_is_filled_where_the_run_filled_it() {
    let mut recording = Recording { budget: 4, ..by_hand() };
    recording.selections.truncate(2);
    recording.selections[0].members[0].heads[0] = (0..4).map(|block| (block, 1.0 - block as f32)).collect();
    let filled = |recording: &Recording| {
        let row = replay(recording, &mut *with("fetch-all"), 4, QuerySource::Draft, None, |_, _, _| ()).unwrap();
        (row.filled, row.wanted, row.hits)
    };
    // All are there from the start, or once they have been brought.
    assert_eq!(filled(&recording), (0, 6, 6));
    recording.selections[0].members[0].live.filled = 4;
    assert_eq!(filled(&recording), (4, 2, 2));
}

#[test]
fn a_late_link_is_waited_for() {
    let recording = by_hand();
    // 64 bytes an entry at 64 bytes a second: a second each, a second of latency, 2 seconds of work a layer.
    let model = LinkModel { bandwidth: 64.0, latency: 1.0, layer: 2.0 };
    let clock = |source| LinkClock::new(model, source, &recording);
    // Two entries take 3 seconds from second 0, and are waited for at second 2, then one takes 2 from second 3.
    let mut ahead = clock(QuerySource::Draft);
    [2, 1, 0].into_iter().for_each(|entries| ahead.layer(0, entries));
    assert_eq!((ahead.busy, ahead.waited), (5.0, 1.0));
    let mut exact = clock(QuerySource::Exact);
    [2, 1, 0].into_iter().for_each(|entries| exact.layer(0, entries));
    assert_eq!((exact.busy, exact.waited), (5.0, 5.0));
    // Begun when the layer before began: from second 0, then from second 3.
    let mut layer_ahead = clock(QuerySource::PreviousLayer);
    [2, 1, 0].into_iter().for_each(|entries| layer_ahead.layer(0, entries));
    assert_eq!((layer_ahead.busy, layer_ahead.waited), (5.0, 3.0));
}

#[test]
fn a_file_gives_back_what_was_written_and_damage_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.selections");
    let recording = by_hand();
    let bytes = recording.write(NewFile::create("--output", &path).unwrap()).unwrap();
    assert_eq!(Recording::read(&path).unwrap(), recording);
    let whole = std::fs::read(&path).unwrap();
    assert_eq!(whole.len() as u64, bytes);

    let refused = |bytes: &[u8], message: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = Recording::read(&path).unwrap_err();
        assert!(error.text().unwrap().contains(message), "{:?}", error.text());
    };
    refused(b"{}", "found another format or version");
    refused(&whole[..whole.len() - 4], "found damage");
    // Whatever is flipped, it is read as something that can be replayed or refused.
    for place in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[place] ^= 0x15;
        std::fs::write(&path, flipped).unwrap();
        if let Ok(read) = Recording::read(&path) {
            let budget = read.budget as usize;
            drop(replay(&read, &mut *with("fetch-all"), budget, QuerySource::Draft, None, |_, _, _| ()));
        }
    }
    let broken = |change: &dyn Fn(&mut Recording), message: &str| {
        let mut recording = by_hand();
        change(&mut recording);
        recording.write(NewFile::create("--output", &path).unwrap()).unwrap();
        let error = Recording::read(&path).unwrap_err();
        assert!(error.text().unwrap().contains(message), "{:?}", error.text());
    };
    broken(&|r| r.selections[1].layer = 1, "layer 1 of step 2, of 1 layers");
    broken(&|r| r.selections[0].members[0].request = 1, "request 1 of 1 in layer 0 of step 1");
    broken(&|r| r.selections[0].members[0].heads[0][1].0 = 0, "block 0, wanted twice");
    broken(&|r| r.selections[3].members[0].heads[0][1].0 = 6, "block 6, wanted twice or not among 6");
    broken(&|r| r.budget = 1, "2 wanted blocks, more than K = 1");
    broken(&|r| r.geometry.kv_heads = 0, "an impossible shape");
    broken(&|r| r.selections[2].members[0].heads.clear(), "0 KV heads, not 1");
}
