//! Requests that go from one executor to the next, without nodes between them.

use crate::gpu::step_all;
use async_trait::async_trait;
use oasis_core::executor::{Admission, PrefillProgress, Sequence};
use oasis_core::geometry::KvGeometry;
use oasis_core::hand_over::HandsOver;
use oasis_core::ids::{KvHead, RequestId, TokenId};
use oasis_core::memory::{EntryKey, KvStore};
use oasis_transport::remote::{BlockRead, BlockReader, ReadResult, RemoteStore};
use std::sync::Arc;

/// Reads blocks from the store of the executor before.
struct Before(Option<(Arc<RemoteStore>, KvGeometry)>);

#[async_trait]
impl BlockReader for Before {
    async fn read(&self, parts: Vec<BlockRead>) -> Vec<ReadResult> {
        let (store, geometry) = self.0.as_ref().expect("the first executor has every block");
        let mut answers = Vec::with_capacity(parts.len());
        for BlockRead { request, layer, blocks } in parts {
            let key = |block, head| EntryKey { request: RequestId(request), layer, block, head: KvHead::from(head) };
            let keys: Vec<EntryKey> =
                blocks.into_iter().flat_map(|block| (0..geometry.kv_heads).map(move |head| key(block, head))).collect();
            let bytes = |entries: &[oasis_core::memory::HostEntry]| {
                entries.iter().flat_map(|entry| entry.bytes()).copied().collect::<Vec<u8>>()
            };
            let fetched = store.fetch(&keys).await;
            answers.push(fetched.map(|fetched| bytes(&fetched.entries).into()).map_err(|error| error.to_string()));
        }
        answers
    }

    fn release(&self, request: RequestId) {
        if let Some((store, _)) = &self.0 {
            store.release(request);
        }
    }
}

/// Executors of which each takes over the requests of the one before, and fetches blocks from its store.
pub struct Chain<E> {
    stops: Vec<(E, Arc<RemoteStore>)>,
}

impl<E: HandsOver> Chain<E> {
    /// A chain of `length` executors, each over a store of its own.
    pub fn new(length: usize, store: impl Fn() -> Arc<dyn KvStore>, start: impl Fn(Arc<dyn KvStore>) -> E) -> Self {
        let mut stops: Vec<(E, Arc<RemoteStore>)> = Vec::new();
        for _ in 0..length {
            let before = stops.last().map(|(executor, store)| (store.clone(), executor.info().geometry));
            let store = Arc::new(RemoteStore::new(store(), Arc::new(Before(before))));
            stops.push((start(store.clone()), store));
        }
        Self { stops }
    }

    /// The executors.
    pub fn executors(&mut self) -> impl Iterator<Item = &mut E> {
        self.stops.iter_mut().map(|(executor, _)| executor)
    }

    /// Hands a request of the executor `from` to the next one.
    ///
    /// # Panics
    /// When it is not taken.
    pub fn hand_on(&mut self, from: usize, sequence: &Sequence) {
        let [(before, _), (next, store)] = &mut self.stops[from..from + 2] else { panic!("expected a next executor") };
        assert_eq!(next.expect(sequence.clone()).unwrap(), Admission::Admitted);
        let state = before.hand_over(sequence.request).unwrap();
        store.grant(sequence.request, state.stored_blocks(&next.info().geometry));
        next.take_over(sequence.request, &state).unwrap();
    }

    /// What requests say that run together: `tokens` each, handed on to the next executor after so many of them.
    ///
    /// # Panics
    /// When one of them fails.
    pub fn say(&mut self, sequences: &[Sequence], tokens: usize, moves: &[usize]) -> Vec<Vec<TokenId>> {
        let mut rows: Vec<_> =
            sequences.iter().map(|sequence| (sequence.request, vec![self.begin(sequence)])).collect();
        let mut at = 0;
        for said in 1..tokens {
            if moves.get(at) == Some(&said) {
                sequences.iter().for_each(|sequence| self.hand_on(at, sequence));
                at += 1;
            }
            step_all(&mut self.stops[at].0, &mut rows);
        }
        assert_eq!(at, moves.len(), "every move was made");
        rows.iter().for_each(|(request, _)| self.stops[at].0.release(*request));
        rows.into_iter().map(|(_, said)| said).collect()
    }

    /// Reads a prompt at the first executor; gives the first token.
    ///
    /// # Panics
    /// When the request is not taken.
    pub fn begin(&mut self, sequence: &Sequence) -> TokenId {
        let executor = &mut self.stops[0].0;
        assert_eq!(executor.admit(sequence.clone()).unwrap(), Admission::Admitted);
        loop {
            if let PrefillProgress::Done(token) = executor.prefill(sequence.request).unwrap() {
                return token;
            }
        }
    }
}
