//! Conformance of stores.

use super::{Random, block_on, for_all};
use crate::geometry::{KvDtype, KvGeometry};
use crate::ids::{BlockId, KvHead, LayerId, RequestId};
use crate::memory::{BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError, StoreSpec};
use std::collections::HashSet;
use std::sync::Arc;

const GEOMETRY: KvGeometry =
    KvGeometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 8, block_tokens: 4, dtype: KvDtype::F32 };

/// Checks the obligations of [`KvStore`] on a store with room for at least 64 KiB: reservations never exceed the
/// capacity and may fill it; blocks are readable once written, unchanged, aligned for their element type, and not at all
/// after release, while reads in flight keep their bytes; writes that are unreserved, repeated or of a wrong length are
/// refused; several threads at once see what each of them would alone.
///
/// # Panics
/// When an obligation is broken.
pub fn conforms(spec: &dyn StoreSpec) {
    let store = spec.build().unwrap_or_else(|error| panic!("{spec:?} does not open: {error}"));
    assert_eq!((store.usage().reserved, store.usage().used, store.usage().requests), (0, 0, 0), "a new store is empty");
    fills_up_exactly(&*store);
    refuses_wrong_writes(&*store);
    released_reads_keep_their_bytes(&*store);
    for_all(10, |random| {
        let seeds: [u64; 4] = std::array::from_fn(|_| random.any());
        std::thread::scope(|scope| {
            for (thread, seed) in seeds.into_iter().enumerate() {
                let store: Arc<dyn KvStore> = store.clone();
                scope.spawn(move || Session::run(&*store, thread as u64, seed));
            }
        });
        let usage = store.usage();
        assert_eq!((usage.reserved, usage.used, usage.requests), (0, 0, 0), "everything was released");
    });
}

fn fills_up_exactly(store: &dyn KvStore) {
    let capacity = store.usage().capacity;
    // Blocks of at most an eighth of the store, so that it takes a few to fill it.
    let block_tokens = (capacity as usize / 8 / (2 * 4 * 8)).max(1);
    let large = KvGeometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 8, block_tokens, dtype: KvDtype::F32 };
    let answer = store.reserve(RequestId(1), &large, 9);
    assert!(matches!(answer, Reservation::TooLarge { .. }), "more than the whole store: {answer:?}");
    let mut granted = Vec::new();
    let full = loop {
        let request = RequestId(2 + granted.len() as u64);
        match store.reserve(request, &large, 1) {
            Reservation::Granted => granted.push(request),
            other => break other,
        }
        assert!(store.usage().reserved <= capacity, "reservations exceed the capacity: {:?}", store.usage());
        assert_eq!(store.usage().requests, granted.len());
    };
    let Reservation::Full { needed, free } = full else { panic!("a full store answers Full, not {full:?}") };
    assert!(needed > free, "{needed} bytes are needed and {free} free, yet the store is full");
    store.release(granted[0]);
    assert_eq!(store.reserve(RequestId(1), &large, 1), Reservation::Granted, "what was released is free again");
    granted.into_iter().chain([RequestId(1)]).for_each(|request| store.release(request));
    assert_eq!(store.usage().reserved, 0);
}

fn refuses_wrong_writes(store: &dyn KvStore) {
    let (request, layer) = (RequestId(10), LayerId(1));
    let bytes = pattern(request, layer, BlockId(0));
    let put = |layer, block, bytes: &[u8]| block_on(store.put(request, layer, &[BlockWrite { block, bytes }]));
    let refused = |result: Result<(), StoreError>, what: &str| {
        assert!(matches!(result, Err(StoreError::Refused { .. })), "{what}: {result:?}");
    };
    refused(put(layer, BlockId(0), &bytes), "a write without a reservation");
    assert_eq!(store.reserve(request, &GEOMETRY, 2), Reservation::Granted);
    refused(put(layer, BlockId(2), &bytes), "a write beyond the reservation");
    refused(put(LayerId(2), BlockId(0), &bytes), "a write to a layer that does not exist");
    refused(put(layer, BlockId(0), &bytes[1..]), "a write that is too short");
    put(layer, BlockId(0), &bytes).expect("a sound write");
    refused(put(layer, BlockId(0), &bytes), "a second write of a block");
    let both = [BlockId(1), BlockId(0)].map(|block| BlockWrite { block, bytes: &bytes });
    refused(block_on(store.put(request, layer, &both)), "a batch with a block that exists");
    let (sound, missing) = (key(request, layer, 0, 1), key(request, layer, 1, 0));
    assert!(block_on(store.fetch(&[sound])).is_ok());
    let result = block_on(store.fetch(&[sound, missing]));
    assert!(matches!(result, Err(StoreError::Missing(key)) if key == missing), "a block that was never written");
    assert!(block_on(store.fetch(&[])).expect("nothing is asked for").entries.is_empty());
    store.release(request);
    store.release(request);
    store.release(RequestId(99));
    refused(put(layer, BlockId(1), &bytes), "a write after release");
}

fn released_reads_keep_their_bytes(store: &dyn KvStore) {
    let (first, second, layer) = (RequestId(20), RequestId(21), LayerId(0));
    let write = |request: RequestId| {
        assert_eq!(store.reserve(request, &GEOMETRY, 4), Reservation::Granted);
        for block in (0..4).map(BlockId) {
            let bytes = pattern(request, layer, block);
            block_on(store.put(request, layer, &[BlockWrite { block, bytes: &bytes }])).expect("a sound write");
        }
    };
    let keys: Vec<EntryKey> =
        (0..4).flat_map(|block| [key(first, layer, block, 1), key(first, layer, block, 0)]).collect();
    write(first);
    let in_flight = block_on(store.fetch(&keys)).expect("all were written");
    store.release(first);
    assert!(matches!(block_on(store.fetch(&keys)), Err(StoreError::Missing(_))), "a released request is readable");
    // Another request that would reuse the memory.
    write(second);
    check_bytes(&in_flight, &keys);
    store.release(second);
}

/// One thread's requests, with a map as the oracle.
struct Session<'a> {
    store: &'a dyn KvStore,
    random: Random,
    /// Reserved requests with the number of their blocks.
    live: Vec<(RequestId, usize)>,
    written: HashSet<(RequestId, LayerId, BlockId)>,
    leases: Vec<(FetchedEntries, Vec<EntryKey>)>,
}

impl<'a> Session<'a> {
    fn run(store: &'a dyn KvStore, thread: u64, seed: u64) {
        let random = Random::new(seed);
        let mut session = Session { store, random, live: Vec::new(), written: HashSet::new(), leases: Vec::new() };
        for operation in 0..60 {
            match session.random.below(6) {
                0 => session.reserve(RequestId(1000 * (thread + 1) + operation)),
                1 | 2 => session.put(),
                3 | 4 => session.fetch(),
                _ => session.release(),
            }
        }
        while !session.live.is_empty() {
            session.release();
        }
        session.leases.iter().for_each(|(entries, keys)| check_bytes(entries, keys));
    }

    fn reserve(&mut self, request: RequestId) {
        let blocks = self.random.within(1, 5);
        match self.store.reserve(request, &GEOMETRY, blocks) {
            Reservation::Granted => self.live.push((request, blocks)),
            Reservation::Full { needed, free } => assert!(needed > free),
            Reservation::TooLarge { .. } => {}
        }
    }

    fn pick(&mut self) -> Option<(RequestId, usize)> {
        (!self.live.is_empty()).then(|| self.live[self.random.below(self.live.len())])
    }

    fn put(&mut self) {
        let Some((request, reserved)) = self.pick() else { return };
        let layer = LayerId::from(self.random.below(GEOMETRY.layers));
        // One past the end, now and then.
        let block = BlockId::from(self.random.below(reserved + 1));
        let bytes = pattern(request, layer, block);
        let result = block_on(self.store.put(request, layer, &[BlockWrite { block, bytes: &bytes }]));
        let expected = block.index() < reserved && !self.written.contains(&(request, layer, block));
        assert_eq!(result.is_ok(), expected, "request {request}, block {block} of {reserved}: {result:?}");
        if expected {
            self.written.insert((request, layer, block));
        }
    }

    fn fetch(&mut self) {
        let Some((request, reserved)) = self.pick() else { return };
        let count = self.random.within(1, 4);
        let keys: Vec<EntryKey> = (0..count)
            .map(|_| {
                let layer = LayerId::from(self.random.below(GEOMETRY.layers));
                key(request, layer, self.random.below(reserved) as u32, self.random.below(GEOMETRY.kv_heads) as u32)
            })
            .collect();
        let all_there = keys.iter().all(|k| self.written.contains(&(request, k.layer, k.block)));
        match block_on(self.store.fetch(&keys)) {
            Ok(entries) => {
                assert!(all_there, "an entry that was never written is readable: {keys:?}");
                check_bytes(&entries, &keys);
                if self.random.one_in(3) {
                    self.leases.push((entries, keys));
                }
            }
            Err(StoreError::Missing(missing)) => {
                assert!(keys.contains(&missing) && !all_there, "{missing:?} was written, yet it is missing");
            }
            Err(error) => panic!("fetch failed: {error}"),
        }
    }

    fn release(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random.below(self.live.len());
        let (request, _) = self.live.swap_remove(index);
        self.store.release(request);
        if self.random.one_in(2) {
            self.store.release(request);
        }
        let written = self.written.iter().find(|(r, ..)| *r == request).copied();
        if let Some((_, layer, block)) = written {
            let result = block_on(self.store.fetch(&[key(request, layer, block.0, 0)]));
            assert!(matches!(result, Err(StoreError::Missing(_))), "a released request is readable");
        }
        self.written.retain(|(r, ..)| *r != request);
    }
}

fn key(request: RequestId, layer: LayerId, block: u32, head: u32) -> EntryKey {
    EntryKey { request, layer, block: BlockId(block), head: KvHead(head) }
}

/// Contents of a block, different for every name: `[kv_heads][entry_bytes]`.
fn pattern(request: RequestId, layer: LayerId, block: BlockId) -> Vec<u8> {
    (0..GEOMETRY.kv_heads).flat_map(|head| entry_pattern(key(request, layer, block.0, head as u32))).collect()
}

fn entry_pattern(key: EntryKey) -> Vec<u8> {
    let name = [key.request.0, u64::from(key.layer.0), u64::from(key.block.0), u64::from(key.head.0)];
    let mut hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, n| (h ^ n).wrapping_mul(0x100_0000_01b3));
    let mut next = || {
        hash = hash.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (hash >> 56) as u8
    };
    (0..GEOMETRY.entry_bytes()).map(|_| next()).collect()
}

fn check_bytes(entries: &FetchedEntries, keys: &[EntryKey]) {
    assert_eq!(entries.entries.len(), keys.len(), "one entry a key");
    for (entry, &key) in entries.entries.iter().zip(keys) {
        assert!(entry.bytes() == entry_pattern(key), "{key:?} does not hold what was written");
        let alignment = entry.bytes().as_ptr() as usize % GEOMETRY.dtype.bytes();
        assert_eq!(alignment, 0, "{key:?} is not aligned for its element type");
    }
}
