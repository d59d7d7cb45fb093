use super::*;
use crate::stores::Dram;
use oasis_core::geometry::KvDtype;
use oasis_core::testkit::faulty::{Faults, FaultyStore};
use oasis_core::testkit::{block_on, for_all};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const GEOMETRY: KvGeometry =
    KvGeometry { layers: 2, q_heads: 2, kv_heads: 2, head_dim: 16, block_tokens: 16, dtype: KvDtype::F32 };
/// 2 KiB.
const ENTRY: usize = 2 * 16 * 16 * 4;

/// A store that counts what is asked of it and holds fetches up.
struct Watched {
    inner: Arc<dyn KvStore>,
    fetched: Mutex<Vec<EntryKey>>,
    /// Bytes of fetches in flight, now and at most.
    in_flight: AtomicUsize,
    most: AtomicUsize,
}

#[async_trait]
impl KvStore for Watched {
    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn reserve(&self, request: RequestId, geometry: &KvGeometry, blocks: usize) -> Reservation {
        self.inner.reserve(request, geometry, blocks)
    }

    async fn put(&self, request: RequestId, layer: LayerId, blocks: &[BlockWrite<'_>]) -> Result<(), StoreError> {
        self.inner.put(request, layer, blocks).await
    }

    async fn fetch(&self, keys: &[EntryKey]) -> Result<FetchedEntries, StoreError> {
        self.fetched.lock().unwrap().extend_from_slice(keys);
        let now = self.in_flight.fetch_add(keys.len() * ENTRY, Ordering::Relaxed) + keys.len() * ENTRY;
        self.most.fetch_max(now, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.in_flight.fetch_sub(keys.len() * ENTRY, Ordering::Relaxed);
        self.inner.fetch(keys).await
    }

    fn release(&self, request: RequestId) {
        self.inner.release(request);
    }
}

fn dram() -> Arc<dyn KvStore> {
    Dram { capacity: Bytes(64 << 20) }.build().unwrap()
}

fn tiered(cache: usize, staging: usize) -> (TieredStore, Arc<Watched>) {
    let (in_flight, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let backing = Arc::new(Watched { inner: dram(), fetched: Mutex::default(), in_flight, most });
    (TieredStore::new(cache as u64, staging as u64, backing.clone()), backing)
}

fn key(request: u64, block: usize, head: usize) -> EntryKey {
    let (block, head) = (BlockId::from(block), KvHead::from(head));
    EntryKey { request: RequestId(request), layer: LayerId(1), block, head }
}

/// The bytes of a block: each entry is full of one number.
fn bytes(seed: u64, block: usize) -> Vec<u8> {
    (0..GEOMETRY.kv_heads).flat_map(|head| vec![(seed * 64 + 2 * block as u64 + head as u64) as u8; ENTRY]).collect()
}

fn write(store: &TieredStore, request: u64, seed: u64, blocks: usize) {
    assert_eq!(store.reserve(RequestId(request), &GEOMETRY, blocks), Reservation::Granted);
    for block in 0..blocks {
        let bytes = bytes(seed, block);
        let write = BlockWrite { block: BlockId::from(block), bytes: &bytes };
        block_on(store.put(RequestId(request), LayerId(1), &[write])).unwrap();
    }
}

fn read(store: &TieredStore, seed: u64, keys: &[EntryKey]) {
    check(&block_on(store.fetch(keys)).unwrap(), seed, keys);
}

fn check(entries: &FetchedEntries, seed: u64, keys: &[EntryKey]) {
    assert_eq!(entries.entries.len(), keys.len());
    for (entry, key) in entries.entries.iter().zip(keys) {
        let range = key.head.index() * ENTRY..(key.head.index() + 1) * ENTRY;
        assert!(entry.bytes() == &bytes(seed, key.block.index())[range], "{key:?}");
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let backing = || Box::new(Dram::default());
    let error = |spec: Tiered| spec.build().err().expect("it is wrong").to_string();
    let wrong = Tiered { staging: Bytes(0), backing: backing(), ..Tiered::default() };
    assert!(error(wrong).starts_with("staging: expected a size above 0"));
    let wrong = Tiered { dram: Bytes(1 << 20), staging: Bytes(1 << 20), backing: backing() };
    assert!(error(wrong).starts_with("dram: expected more than the staging of 1.0 MiB, found 1.0 MiB"));
    let wrong = Tiered { backing: Box::new(Dram { capacity: Bytes(0) }), ..Tiered::default() };
    assert!(error(wrong).starts_with("backing: expected capacity: a size above 0, found 0"));
}

#[test]
fn the_backing_store_is_read_from_a_configuration() {
    let text =
        "kind = \"tiered\"\ndram = \"2MiB\"\nstaging = \"1MiB\"\nbacking = { kind = \"dram\", capacity = \"3MiB\" }";
    let spec: Box<dyn StoreSpec> = text.parse::<toml::Table>().unwrap().try_into().unwrap();
    assert_eq!(spec.build().unwrap().usage().capacity, 3 << 20);
}

#[test]
fn what_is_in_memory_is_a_hit_and_the_rest_is_counted_with_its_stall() {
    let (store, backing) = tiered(8 << 20, 64 << 10);
    write(&store, 1, 1, 4);
    let keys: Vec<EntryKey> = (0..4).flat_map(|block| [key(1, block, 1), key(1, block, 0)]).collect();
    read(&store, 1, &keys);
    assert_eq!(store.metrics(), StoreMetrics { hits: 8, misses: 0, stall: Duration::ZERO });
    assert!(backing.fetched.lock().unwrap().is_empty(), "what was just written is in memory");
    // Entries that the cache never saw.
    store.cache.clear();
    let again = [keys[3], keys[0], keys[3]];
    read(&store, 1, &again);
    let metrics = store.metrics();
    assert_eq!((metrics.hits, metrics.misses), (8, 3));
    assert!(metrics.stall >= Duration::from_millis(1), "{metrics:?}");
    read(&store, 1, &keys);
    assert_eq!((store.metrics().hits, store.metrics().misses), (10, 9), "the two came to memory");
    assert_eq!(backing.fetched.lock().unwrap().len(), 9);
}

#[test]
fn a_request_of_the_same_id_meets_no_entry_of_the_former() {
    let (store, _) = tiered(8 << 20, 64 << 10);
    write(&store, 1, 1, 2);
    let keys = [key(1, 0, 0), key(1, 1, 1)];
    let lent = block_on(store.fetch(&keys)).unwrap();
    store.release(RequestId(1));
    assert!(matches!(block_on(store.fetch(&keys)), Err(StoreError::Missing(missing)) if missing == keys[0]));
    write(&store, 1, 2, 1);
    read(&store, 2, &keys[..1]);
    assert!(matches!(block_on(store.fetch(&keys)), Err(StoreError::Missing(missing)) if missing == keys[1]));
    check(&lent, 1, &keys);
}

#[test]
fn a_long_prompt_pushes_nothing_out_that_is_used_again() {
    let entries = 128;
    let (store, backing) = tiered(entries * ENTRY, 64 << 10);
    write(&store, 1, 1, 16);
    let used: Vec<EntryKey> = (0..16).flat_map(|block| [key(1, block, 0), key(1, block, 1)]).collect();
    (0..3).for_each(|_| read(&store, 1, &used));
    backing.fetched.lock().unwrap().clear();
    // Four times the cache, written and read once.
    write(&store, 2, 2, 256);
    (0..256).for_each(|block| read(&store, 2, &[key(2, block, 0), key(2, block, 1)]));
    assert!(store.cache.weight() <= (entries * ENTRY) as u64);
    backing.fetched.lock().unwrap().clear();
    read(&store, 1, &used);
    assert_eq!(backing.fetched.lock().unwrap().len(), 0, "of {} entries", used.len());
}

#[test]
fn reads_in_flight_stay_within_the_staging_and_all_come_through() {
    // Room for eight entries.
    let (store, backing) = tiered(64 * ENTRY, 16 << 10);
    write(&store, 1, 1, 64);
    store.cache.clear();
    let keys: Vec<EntryKey> = (0..64).flat_map(|block| [key(1, block, 0), key(1, block, 1)]).collect();
    let store = Arc::new(store);
    block_on(async {
        let fetches = keys.chunks(16).map(|keys| {
            let (store, keys) = (store.clone(), keys.to_vec());
            tokio::spawn(async move { (store.fetch(&keys).await.unwrap(), keys) })
        });
        for fetch in fetches.collect::<Vec<_>>() {
            let (entries, keys) = fetch.await.unwrap();
            check(&entries, 1, &keys);
        }
    });
    assert_eq!(store.metrics().misses, 128);
    let most = backing.most.load(Ordering::Relaxed);
    assert!((8 * ENTRY..=16 << 10).contains(&most), "{most} bytes at a time");
    assert_eq!(store.staging.available_permits(), store.staging_units as usize);
}

#[test]
fn an_entry_larger_than_the_staging_passes_alone() {
    let (store, _) = tiered(64 * ENTRY, 1);
    write(&store, 1, 1, 2);
    store.cache.clear();
    read(&store, 1, &[key(1, 0, 0), key(1, 1, 1)]);
}

/// Random operations over a small cache and a backing store that fails at times, against what was put.
#[test]
fn the_store_is_a_map_while_its_backing_fails() {
    let (mut hits, mut misses, mut failed) = (0, 0, 0);
    for_all(30, |random| {
        let backing = FaultyStore {
            inner: dram(),
            puts: Faults::seeded(random.any(), 5, 400),
            fetches: Faults::seeded(random.any(), 4, 400),
        };
        let store = TieredStore::new(random.within(1, 40) as u64 * 1024, 8192, Arc::new(backing));
        let mut oracle: HashMap<u64, (u64, Vec<bool>)> = HashMap::new();
        let mut asked = 0;
        for seed in 0..300 {
            let request = random.below(4) as u64;
            let live = oracle.get_mut(&request);
            match (random.below(20), live) {
                (0, _) => {
                    assert_eq!(store.reserve(RequestId(request), &GEOMETRY, 8), Reservation::Granted);
                    oracle.insert(request, (seed % 3, vec![false; 8]));
                }
                (1, _) => {
                    store.release(RequestId(request));
                    oracle.remove(&request);
                }
                (2..=9, Some((seed, written))) => {
                    let block = random.below(8);
                    let bytes = bytes(*seed, block);
                    let write = BlockWrite { block: BlockId::from(block), bytes: &bytes };
                    match block_on(store.put(RequestId(request), LayerId(1), &[write])) {
                        Ok(()) => assert!(!std::mem::replace(&mut written[block], true)),
                        Err(StoreError::Refused { .. }) => assert!(written[block]),
                        Err(error) => assert!(error.to_string().contains("injected"), "{error}"),
                    }
                }
                (_, live) => {
                    let written: Vec<usize> = live.iter().flat_map(|(_, w)| (0..8).filter(|&block| w[block])).collect();
                    // Now and then one that is not there.
                    let mut block = || match written.is_empty() || random.one_in(20) {
                        true => random.below(8),
                        false => random.pick(&written),
                    };
                    let blocks = [block(), block(), block()];
                    let keys: Vec<EntryKey> =
                        (0..random.within(1, 6)).map(|i| key(request, blocks[i % 3], random.below(2))).collect();
                    let all_there = live.as_ref().is_some_and(|(_, w)| keys.iter().all(|key| w[key.block.index()]));
                    match block_on(store.fetch(&keys)) {
                        Ok(entries) => {
                            assert!(all_there);
                            check(&entries, live.unwrap().0, &keys);
                            asked += keys.len() as u64;
                        }
                        Err(StoreError::Missing(_)) => assert!(!all_there),
                        Err(error) => {
                            assert!(error.to_string().contains("injected"), "{error}");
                            failed += 1;
                        }
                    }
                }
            }
        }
        let metrics = store.metrics();
        assert_eq!(metrics.hits + metrics.misses, asked);
        hits += metrics.hits;
        misses += metrics.misses;
    });
    assert!(hits > 300 && misses > 300 && failed > 100, "{hits} hits, {misses} misses, {failed} failed");
}
