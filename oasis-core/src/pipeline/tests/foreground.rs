//! An executor without a model: keys and values are functions of their names.

use super::super::*;
use crate::geometry::KvDtype;
use crate::ids::{BlockId, KvHead};
use crate::memory::Reservation;

pub const GEOMETRY: KvGeometry =
    KvGeometry { layers: 3, q_heads: 4, kv_heads: 2, head_dim: 4, block_tokens: 4, dtype: KvDtype::F32 };

/// Key (or value) of a token, `[head_dim]`.
pub fn vector(request: RequestId, layer: LayerId, head: KvHead, token: usize, value: bool) -> Vec<f32> {
    let name = request.0 as usize * 7919 + layer.index() * 104_729 + head.index() * 1_299_709 + token * 31;
    (0..GEOMETRY.head_dim).map(|d| (((name + d * 17 + usize::from(value)) as f32) * 0.618).sin()).collect()
}

/// Entry of a block: keys, then values.
pub fn entry(request: RequestId, layer: LayerId, head: KvHead, block: BlockId) -> Vec<f32> {
    let tokens = block.index() * GEOMETRY.block_tokens..(block.index() + 1) * GEOMETRY.block_tokens;
    let rows = |value| tokens.clone().flat_map(move |token| vector(request, layer, head, token, value));
    rows(false).chain(rows(true)).collect()
}

fn heads() -> impl Iterator<Item = KvHead> {
    (0..GEOMETRY.kv_heads).map(KvHead::from)
}

fn layers() -> impl Iterator<Item = LayerId> {
    (0..GEOMETRY.layers).map(LayerId::from)
}

pub struct Request {
    pub id: RequestId,
    /// Tokens whose keys and values exist.
    pub tokens: usize,
    pub caches: Vec<Option<LayerCache>>,
}

/// What came back for one layer, without the memory, which is home again.
pub struct Back {
    pub filled: usize,
    pub admitted: usize,
    pub deferred: usize,
    pub errors: Vec<Option<StageError>>,
}

pub struct Foreground {
    pub pipeline: Pipeline,
    pub store: Arc<dyn KvStore>,
    pub requests: Vec<Request>,
    pub step: Step,
    /// Query of the last step, `[kv_heads][group][head_dim]`; the same for every request and layer.
    pub query: Vec<f32>,
    summarizer: Arc<dyn Summarizer>,
    budget: usize,
}

impl Foreground {
    pub fn new(parts: PipelineParts) -> Self {
        let (store, summarizer, budget) = (parts.store.clone(), parts.summarizer.clone(), parts.budget);
        let query = (0..GEOMETRY.q_heads * GEOMETRY.head_dim).map(|i| (i as f32).cos()).collect();
        let pipeline = Pipeline::start(parts).unwrap();
        Self { pipeline, store, requests: Vec::new(), step: Step(0), query, summarizer, budget }
    }

    /// Takes a request whose prompt has `tokens` tokens: complete blocks go to the store, the rest to the tail.
    pub fn prefill(&mut self, id: RequestId, tokens: usize) {
        let blocks = GEOMETRY.full_blocks(tokens);
        assert_eq!(self.store.reserve(id, &GEOMETRY, blocks + 16), Reservation::Granted);
        let offloads: Vec<Offload> =
            layers().map(|layer| self.pipeline.offload(offload_blocks(id, layer, blocks))).collect();
        offloads.into_iter().for_each(|offload| offload.wait().unwrap());
        let caches = layers().map(|layer| Some(self.prefilled(id, layer, tokens))).collect();
        self.requests.push(Request { id, tokens, caches });
    }

    fn prefilled(&self, id: RequestId, layer: LayerId, tokens: usize) -> LayerCache {
        let blocks = GEOMETRY.full_blocks(tokens);
        let complete = blocks * GEOMETRY.block_tokens;
        let keys: Vec<Vec<f32>> =
            heads().map(|head| (0..complete).flat_map(|t| vector(id, layer, head, t, false)).collect()).collect();
        let mut summaries = Summaries::new(&GEOMETRY, &*self.summarizer, blocks + 16);
        summaries.append(&GEOMETRY, &*self.summarizer, keys.iter().map(Vec::as_slice));
        let mut resident = Resident::new(GEOMETRY, self.budget, BlockId::from(blocks));
        (complete..tokens).for_each(|token| push_token(&mut resident, id, layer, token));
        LayerCache { summaries, resident }
    }

    /// Decodes one token: every layer appends its key and value and goes to the stages.
    pub fn hand_in_all(&mut self) {
        self.begin_step();
        for layer in layers() {
            let residents = self.hand_in_queries(layer);
            self.pipeline.select(SelectTask { layer, step: self.step, members: residents });
        }
    }

    /// First half of one layer only.
    pub fn hand_in_queries_only(&mut self, layer: LayerId) {
        self.begin_step();
        self.hand_in_queries(layer);
    }

    fn begin_step(&mut self) {
        self.step.0 += 1;
        self.requests.iter_mut().for_each(|request| request.tokens += 1);
    }

    fn hand_in_queries(&mut self, layer: LayerId) -> Vec<Resident> {
        let mut members = Vec::new();
        let mut residents = Vec::new();
        for request in &mut self.requests {
            let LayerCache { summaries, mut resident } =
                request.caches[layer.index()].take().expect("the layer is home");
            push_token(&mut resident, request.id, layer, request.tokens - 1);
            let completed_keys =
                resident.tail.is_full().then(|| heads().flat_map(|head| resident.tail.keys(head).to_vec()).collect());
            members.push(PredictMember { request: request.id, query: self.query.clone(), completed_keys, summaries });
            residents.push(resident);
        }
        self.pipeline.predict(PredictTask { layer, step: self.step, members });
        residents
    }

    pub fn take_back(&mut self, layer: LayerId) -> Back {
        let done = self.pipeline.wait(layer).expect("the layer is in flight");
        assert_eq!((done.layer, done.step), (layer, self.step));
        let mut back = Back { filled: 0, admitted: 0, deferred: 0, errors: Vec::new() };
        for (request, member) in self.requests.iter_mut().zip(done.members) {
            assert_eq!(member.request, request.id, "members come back in order");
            back.filled += member.filled;
            back.admitted += member.admitted;
            back.deferred += member.deferred;
            back.errors.push(member.error);
            request.caches[layer.index()] = Some(member.cache);
        }
        back
    }

    /// Takes back every layer that is still out; none of them may have failed.
    pub fn take_back_all(&mut self) {
        for layer in layers().filter(|&layer| self.pipeline.is_in_flight(layer)).collect::<Vec<_>>() {
            let errors = self.take_back(layer).errors;
            assert!(errors.iter().all(Option::is_none), "{errors:?}");
        }
    }

    pub fn holds_everything(&self) -> bool {
        self.requests.iter().all(|request| request.caches.iter().all(Option::is_some))
    }

    /// Ends all requests, whose slots may hold anything after a fault, and takes them anew.
    pub fn restart(&mut self) {
        let old: Vec<(RequestId, usize)> = self.requests.drain(..).map(|r| (r.id, r.tokens)).collect();
        for (id, tokens) in old {
            self.store.release(id);
            self.prefill(id, tokens);
        }
    }

    /// Ends a request between two steps.
    pub fn cancel(&mut self, id: RequestId) {
        self.requests.retain(|request| request.id != id);
        self.store.release(id);
    }

    pub fn resident(&self, id: RequestId, layer: LayerId) -> &Resident {
        let request = self.requests.iter().find(|r| r.id == id).expect("the request runs");
        &request.caches[layer.index()].as_ref().expect("the layer is home").resident
    }

    /// Every layer that is home holds in each slot exactly the entry of the block that the slot claims.
    pub fn check_slots(&self) {
        self.requests.iter().for_each(|request| self.check_slots_of(request.id));
    }

    pub fn check_slots_of(&self, id: RequestId) {
        let request = self.requests.iter().find(|r| r.id == id).expect("the request runs");
        for (layer, cache) in layers().zip(&request.caches) {
            let Some(LayerCache { resident, .. }) = cache else { continue };
            assert_eq!(resident.tail.block().index(), GEOMETRY.full_blocks(request.tokens));
            assert_eq!(resident.tail.tokens(), request.tokens % GEOMETRY.block_tokens);
            for head in heads() {
                let occupied = resident.in_block_order(head);
                assert!(occupied.len() <= self.budget, "more slots than the budget");
                assert!(occupied.windows(2).all(|pair| pair[0].0 < pair[1].0), "a block twice: {occupied:?}");
                for (block, slot) in occupied {
                    assert!(block < resident.tail.block());
                    assert_eq!(resident.slot(head, slot), entry(id, layer, head, block), "{layer} {head} {block}");
                }
            }
        }
    }

    /// Writes the first block of a request again, which the store refuses.
    pub fn offload_again(&self, id: RequestId) -> Offload {
        self.pipeline.offload(offload_blocks(id, LayerId(0), 1))
    }
}

fn offload_blocks(request: RequestId, layer: LayerId, blocks: usize) -> OffloadBlocks {
    let entries = (0..blocks).flat_map(|b| heads().flat_map(move |head| entry(request, layer, head, BlockId::from(b))));
    OffloadBlocks { request, layer, first: BlockId(0), entries: entries.collect() }
}

fn push_token(resident: &mut Resident, id: RequestId, layer: LayerId, token: usize) {
    let of = |value| heads().flat_map(|head| vector(id, layer, head, token, value)).collect::<Vec<f32>>();
    resident.tail.push(&of(false), &of(true));
}
