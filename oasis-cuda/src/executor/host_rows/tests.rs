//! What an observer is shown, beside what the positions, keys and queries of steps say by themselves.

use super::*;
use oasis_core::geometry::KvDtype;
use oasis_core::observer::{LayerView, SelectionMember};
use oasis_core::policy::{PredictBatch, PredictorSpec, SelectorSpec, SummarizerSpec, split_mix64};
use oasis_policies::predictors::{DraftQuery, Exact, LastQuery};
use oasis_policies::selectors::CappedLru;
use oasis_policies::summarizers::Quest;
use std::borrow::Cow;
use std::sync::{Arc, Mutex};

const BLOCK: usize = 4;
const BUDGET: usize = 5;
const ROW: usize = 1;
const LAYERS: usize = 2;
const GEOMETRY: KvGeometry =
    KvGeometry { layers: LAYERS, q_heads: 4, kv_heads: 2, head_dim: 8, block_tokens: BLOCK, dtype: KvDtype::Bf16 };
const WIDTH: usize = GEOMETRY.q_heads * GEOMETRY.head_dim;

/// Numbers between -1 and 1 that follow from their place.
fn number(place: [usize; 4]) -> f32 {
    let mixed = place.iter().fold(17, |mixed, part| split_mix64(&mut (mixed ^ *part as u64)));
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A key of every token, whether or not it is there yet.
struct Keys;

impl Keys {
    fn block(layer: LayerId, head: KvHead, block: usize) -> Vec<f32> {
        let tokens = block * BLOCK..(block + 1) * BLOCK;
        let place = layer.index() * 2 + head.index();
        tokens.flat_map(|token| (0..GEOMETRY.head_dim).map(move |d| number([1, place, token, d]))).collect()
    }
}

impl BlockKeys for Keys {
    fn append(&self, of: &KeysOf<'_>, head: KvHead, block: BlockId, keys: &mut Vec<f32>) {
        assert_eq!((of.index, of.member.row, of.row.request), (0, ROW, RequestId(7)));
        keys.extend(Self::block(of.layer, head, block.index()));
    }
}

/// Summaries of the first blocks of a layer, made at once.
fn summaries(layer: LayerId, summarizer: &dyn Summarizer, blocks: usize) -> Summaries {
    let mut summaries = Summaries::new(&GEOMETRY, summarizer, 100);
    let heads: Vec<Vec<f32>> = (0..GEOMETRY.kv_heads)
        .map(|head| (0..blocks).flat_map(|block| Keys::block(layer, KvHead::from(head), block)).collect())
        .collect();
    if blocks > 0 {
        summaries.append(&GEOMETRY, summarizer, heads.iter().map(Vec::as_slice));
    }
    summaries
}

#[derive(Debug, Clone, PartialEq)]
enum Event {
    Layer {
        place: (LayerId, Step, RequestId, usize),
        queries: Vec<f32>,
        has_draft: bool,
        blocks: usize,
        words: Vec<u32>,
        set: WorkingSet,
        keys: Vec<Vec<f32>>,
    },
    Selected {
        place: (LayerId, Step),
        ranking: Ranking,
        members: Vec<SelectionMember>,
    },
    Release(RequestId),
}

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Event>>>);

impl Notes {
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl StepObserver for Notes {
    fn layer(&mut self, view: &LayerView<'_>) {
        assert!(view.resident.is_none());
        let heads = (0..GEOMETRY.kv_heads).map(KvHead::from);
        self.0.lock().unwrap().push(Event::Layer {
            place: (view.layer, view.step, view.request, view.position),
            queries: view.queries.to_vec(),
            has_draft: view.has_draft,
            blocks: view.summaries.blocks(),
            words: view.summaries.words(GEOMETRY.kv_heads),
            set: view.set.clone(),
            keys: heads.flat_map(|head| view.keys.of_head(head)).map(Cow::into_owned).collect(),
        });
    }

    fn selected(&mut self, view: &SelectionView<'_>) {
        let place = (view.layer, view.step);
        self.0.lock().unwrap().push(Event::Selected {
            place,
            ranking: view.ranking.clone(),
            members: view.members.to_vec(),
        });
    }

    fn release(&mut self, request: RequestId) {
        self.0.lock().unwrap().push(Event::Release(request));
    }
}

fn start(predictor: Box<dyn Predictor>, queries: usize) -> (HostRows, Notes) {
    let policies = HostPolicies {
        summarizer: Quest {}.build(GEOMETRY.head_shape()).unwrap(),
        predictor,
        selector: CappedLru { fetch_ratio: 0.4 }.build().unwrap(),
    };
    let extent = Extent { blocks: 100, tiles: 7, slots: BUDGET, queries, draft_blocks: 100 };
    let mut rows = HostRows::new(policies, Bridge::Prediction, (2, Kept::default()), (GEOMETRY, extent, 3));
    let notes = Notes::default();
    rows.set_observer(Some(Box::new(notes.clone())));
    rows.admit(ROW, RequestId(7), Address::NONE, 0);
    (rows, notes)
}

/// Blocks of a KV head that `after` has and `before` has not.
fn entered(before: &WorkingSet, after: &WorkingSet, head: KvHead) -> Vec<BlockId> {
    let had = before.head(head).residents();
    after.head(head).blocks.iter().flatten().copied().filter(|block| !had.contains(*block)).collect()
}

/// Steps after prompts that are shorter and longer than the working set, and end in and at the end of a block.
#[test]
fn an_observer_sees_what_the_steps_say() {
    let predictors: [(&dyn PredictorSpec, usize); 3] =
        [(&DraftQuery::default(), 2), (&LastQuery::default(), 1), (&Exact::default(), 1)];
    let (mut filled, mut admitted, mut deferred, mut promoted) = (0, 0, 0, 0);
    for (predictor, queries) in predictors {
        for prompt in [2, 3, 9, 16, 50, 51, 52] {
            let (mut rows, notes) = start(predictor.build().unwrap(), queries);
            let exact = rows.exact;
            for step in 0..30 {
                let position = prompt + step;
                rows.begin(step == 0, [(ROW, position)]);
                for layer in (0..LAYERS).map(LayerId::from) {
                    let set = |rows: &HostRows| rows.row(ROW).unwrap().sets[layer.index()].clone();
                    let summarizer = Quest {}.build(GEOMETRY.head_shape()).unwrap();
                    let facts: Vec<f32> =
                        (0..queries * WIDTH).map(|index| number([2, layer.index(), step, index])).collect();
                    let before = set(&rows);
                    rows.decide(layer, &Facts::Queries { queries: &facts, keys: &Keys }, None).unwrap();
                    let (after, now) = (set(&rows), Step(step as u64 + 1));

                    // What attention finds has just been chosen where a step chooses first.
                    let chooses_first = exact && step > 0;
                    let complete = position / BLOCK;
                    let shown = summaries(layer, &*summarizer, complete);
                    let keys = (0..GEOMETRY.kv_heads).map(KvHead::from).flat_map(|head| {
                        let mut keys: Vec<Vec<f32>> =
                            (0..=complete).map(|block| Keys::block(layer, head, block)).collect();
                        keys[complete].truncate(position % BLOCK * GEOMETRY.head_dim);
                        keys
                    });
                    let view = Event::Layer {
                        place: (layer, now, RequestId(7), position),
                        queries: facts.clone(),
                        has_draft: queries == 2,
                        blocks: complete,
                        words: shown.words(GEOMETRY.kv_heads),
                        set: if chooses_first { after.clone() } else { before.clone() },
                        keys: keys.collect(),
                    };

                    let tokens = if exact { position } else { position + 1 };
                    let completed = (tokens % BLOCK == 0).then(|| BlockId::from(tokens / BLOCK - 1));
                    let mut ranked = summaries(layer, &*summarizer, tokens / BLOCK);
                    let mut member = RankMember {
                        query: &facts[(queries - 1) * WIDTH..],
                        completed_keys: None,
                        summaries: &mut ranked,
                    };
                    let member = std::slice::from_mut(&mut member);
                    let ranking =
                        rank(&GEOMETRY, BUDGET, layer, &*summarizer, &mut *predictor.build().unwrap(), member).unwrap();
                    let (mut crossed, mut missing) = (0, 0);
                    for head in (0..GEOMETRY.kv_heads).map(KvHead::from) {
                        let new = entered(&before, &after, head);
                        promoted += new.iter().filter(|block| Some(**block) == completed).count();
                        crossed += new.iter().filter(|block| Some(**block) != completed).count();
                        let residents = after.head(head).residents();
                        missing += ranking.head(0, head).iter().filter(|w| !residents.contains(w.block)).count();
                    }
                    let is_fill = before.is_empty();
                    let counts = SelectionMember {
                        request: RequestId(7),
                        blocks: tokens / BLOCK,
                        filled: if is_fill { crossed } else { 0 },
                        admitted: if is_fill { 0 } else { crossed },
                        deferred: missing,
                        completed,
                        failed: false,
                    };
                    let selected = Event::Selected { place: (layer, now), ranking, members: vec![counts] };
                    let expected = if chooses_first { [selected, view] } else { [view, selected] };
                    let case = format!("{queries} queries, exact {exact}, prompt {prompt}, step {step}, {layer:?}");
                    assert!(notes.take() == expected, "{case}");
                    filled += counts.filled;
                    admitted += counts.admitted;
                    deferred += counts.deferred;
                }
            }
            rows.release(ROW);
            assert_eq!(notes.take(), [Event::Release(RequestId(7))]);
        }
    }
    assert!(filled > 0 && admitted > 0 && deferred > 0 && promoted > 0, "{filled} {admitted} {deferred} {promoted}");
}

struct Panics;

impl Predictor for Panics {
    fn query_source(&self) -> QuerySource {
        QuerySource::Current
    }

    fn predict(&mut self, _: &PredictBatch<'_>, _: &mut Ranking) {
        panic!("no opinion");
    }
}

#[test]
fn an_observer_hears_of_no_selection_where_a_policy_fails() {
    let (mut rows, notes) = start(Box::new(Panics), 1);
    rows.begin(true, [(ROW, 30)]);
    let queries = [0.5; WIDTH];
    assert_eq!(rows.decide(LayerId(0), &Facts::Queries { queries: &queries, keys: &Keys }, None), None);
    assert!(matches!(notes.take()[..], [Event::Layer { blocks: 7, .. }]));
    let failures = rows.take_failures();
    assert!(failures[&ROW].contains("no opinion"), "{failures:?}");
}

#[test]
fn a_block_is_ranked_from_its_last_token_on_and_completed_by_it() {
    let member = |position, lag| {
        let Member { row: 3, before, blocks, completed, .. } = Member::new(3, position, lag, 16) else { panic!() };
        (before, blocks, completed)
    };
    assert_eq!(member(0, 1), (0, 0, None));
    assert_eq!(member(14, 0), (0, 0, None));
    assert_eq!(member(15, 1), (0, 0, None));
    assert_eq!(member(15, 0), (0, 1, Some(BlockId(0))));
    assert_eq!(member(16, 1), (1, 1, Some(BlockId(0))));
    assert_eq!(member(16, 0), (1, 1, None));
    assert_eq!(member(31, 0), (1, 2, Some(BlockId(1))));
}
