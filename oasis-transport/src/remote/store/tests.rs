use super::*;
use crate::remote::ReadResult;
use crate::stores::Dram;
use oasis_core::geometry::KvDtype;
use oasis_core::ids::KvHead;
use oasis_core::memory::HostEntry;
use oasis_core::memory::StoreSpec;
use oasis_core::testkit;

const GEOMETRY: KvGeometry =
    KvGeometry { layers: 2, q_heads: 2, kv_heads: 2, head_dim: 4, block_tokens: 2, dtype: KvDtype::F32 };

/// A prefill node that has every block, and remembers what it was asked.
#[derive(Default)]
struct Blocks {
    reads: Mutex<Vec<Vec<BlockRead>>>,
    released: Mutex<Vec<RequestId>>,
    /// Requests whose reads fail.
    refused: Vec<u64>,
    /// Bytes that are left out of every part.
    short: usize,
}

fn block_bytes(part: &BlockRead, block: BlockId) -> Vec<u8> {
    vec![(part.request as u32 * 50 + part.layer.0 * 20 + block.0) as u8; GEOMETRY.block_bytes()]
}

#[async_trait]
impl BlockReader for Blocks {
    async fn read(&self, parts: Vec<BlockRead>) -> Vec<ReadResult> {
        self.reads.lock().unwrap().push(parts.clone());
        let answer = |part: &BlockRead| {
            if self.refused.contains(&part.request) {
                return Err("its lease has ended".to_owned());
            }
            let mut bytes: Vec<u8> = part.blocks.iter().flat_map(|&block| block_bytes(part, block)).collect();
            bytes.truncate(bytes.len() - self.short);
            Ok(HostEntry::from(bytes))
        };
        parts.iter().map(answer).collect()
    }

    fn release(&self, request: RequestId) {
        self.released.lock().unwrap().push(request);
    }
}

fn store(blocks: Blocks) -> (Arc<RemoteStore>, Arc<Blocks>) {
    let blocks = Arc::new(blocks);
    (Arc::new(RemoteStore::new(Dram::default().build().unwrap(), blocks.clone())), blocks)
}

fn key(request: u64, layer: u32, block: u32, head: u32) -> EntryKey {
    EntryKey { request: RequestId(request), layer: LayerId(layer), block: BlockId(block), head: KvHead(head) }
}

fn granted(blocks: Blocks, requests: &[u64]) -> (Arc<RemoteStore>, Arc<Blocks>) {
    let (store, blocks) = store(blocks);
    for &request in requests {
        assert_eq!(store.reserve(RequestId(request), &GEOMETRY, 8), Reservation::Granted);
        store.grant(RequestId(request), vec![6; 2]);
    }
    (store, blocks)
}

fn asked(parts: &[BlockRead]) -> Vec<(u64, u32, Vec<u32>)> {
    parts.iter().map(|p| (p.request, p.layer.0, p.blocks.iter().map(|b| b.0).collect())).collect()
}

#[test]
fn every_block_crosses_once_and_a_fetch_is_one_read() {
    let (store, blocks) = granted(Blocks::default(), &[1, 2]);
    let admitted = vec![(LayerId(0), vec![BlockId(1), BlockId(4)])];
    testkit::block_on(store.admit(RequestId(1), admitted)).unwrap();
    let keys = [key(1, 0, 1, 0), key(1, 0, 5, 1), key(2, 0, 3, 0), key(1, 0, 5, 0), key(2, 0, 0, 1), key(1, 0, 4, 1)];
    for _ in 0..3 {
        let fetched = testkit::block_on(store.fetch(&keys)).unwrap();
        for (key, entry) in keys.iter().zip(&fetched.entries) {
            let part = BlockRead { request: key.request.0, layer: key.layer, blocks: Vec::new() };
            assert_eq!(entry.bytes(), &block_bytes(&part, key.block)[..GEOMETRY.entry_bytes()], "{key:?}");
        }
    }
    let reads = blocks.reads.lock().unwrap();
    let reads: Vec<_> = reads.iter().map(|parts| asked(parts)).collect();
    assert_eq!(reads, [vec![(1, 0, vec![1, 4])], vec![(1, 0, vec![5]), (2, 0, vec![0, 3])]]);
    let bytes = GEOMETRY.block_bytes() as u64;
    let traffic = RequestTraffic {
        admission_bytes: 2 * bytes,
        miss_bytes: bytes,
        blocks: 3,
        misses: 1,
        prompt_blocks: 12,
        block_bytes: bytes,
        resident_bytes: 3 * bytes,
    };
    assert_eq!(store.traffic(RequestId(1)), Some(traffic));
    assert_eq!((store.usage().used, store.peak_bytes()), (5 * bytes, 5 * bytes));
}

#[test]
fn blocks_decoded_here_are_not_asked_for() {
    let (store, blocks) = granted(Blocks::default(), &[1]);
    let bytes = vec![9; GEOMETRY.block_bytes()];
    testkit::block_on(store.put(RequestId(1), LayerId(1), &[BlockWrite { block: BlockId(6), bytes: &bytes }])).unwrap();
    testkit::block_on(store.fetch(&[key(1, 1, 6, 0)])).unwrap();
    let missing = testkit::block_on(store.fetch(&[key(1, 1, 7, 0)])).err().unwrap();
    assert!(matches!(missing, StoreError::Missing(k) if k == key(1, 1, 7, 0)), "{missing}");
    for unknown in [key(1, 2, 0, 0), key(1, 0, 0, 2), key(3, 0, 0, 0)] {
        assert!(matches!(testkit::block_on(store.fetch(&[unknown])), Err(StoreError::Missing(k)) if k == unknown));
    }
    assert!(blocks.reads.lock().unwrap().is_empty());
}

#[test]
fn one_requests_failure_keeps_what_came_for_the_others() {
    let (store, blocks) = granted(Blocks { refused: vec![1], ..Blocks::default() }, &[1, 2]);
    let error = testkit::block_on(store.fetch(&[key(1, 0, 0, 0), key(2, 0, 0, 0)])).err().unwrap();
    assert_eq!(error.to_string(), "fetch from the prefill node: its lease has ended");
    testkit::block_on(store.fetch(&[key(2, 0, 0, 0)])).unwrap();
    assert_eq!(blocks.reads.lock().unwrap().len(), 1);
    testkit::block_on(store.fetch(&[key(1, 0, 0, 0)])).err().unwrap();
    assert_eq!(store.traffic(RequestId(1)).unwrap().blocks, 0);
}

#[test]
fn an_answer_of_another_length_is_refused() {
    let (store, _) = granted(Blocks { short: 1, ..Blocks::default() }, &[1]);
    let error = testkit::block_on(store.fetch(&[key(1, 0, 0, 0)])).err().unwrap();
    assert!(error.to_string().contains("expected 128 bytes of blocks, found 127"), "{error}");
    assert_eq!(store.usage().used, 0);
}

#[test]
fn large_fetches_are_cut_into_reads_of_bounded_size() {
    let large = KvGeometry { head_dim: 64, block_tokens: 2048, ..GEOMETRY };
    let (store, _) = store(Blocks::default());
    assert_eq!(store.reserve(RequestId(1), &large, 16), Reservation::Granted);
    store.grant(RequestId(1), vec![16; 2]);
    let blocks = (0..9).map(BlockId).collect();
    let wanted = BTreeMap::from([
        ((RequestId(1), LayerId(0)), blocks),
        ((RequestId(1), LayerId(1)), BTreeSet::from([BlockId(3)])),
    ]);
    assert_eq!(large.block_bytes(), MAX_READ_BYTES / 4);
    let batches: Vec<_> = store.batches(wanted).iter().map(|batch| asked(batch)).collect();
    let expected =
        [vec![(1, 0, vec![0, 1, 2, 3])], vec![(1, 0, vec![4, 5, 6, 7])], vec![(1, 0, vec![8]), (1, 1, vec![3])]];
    assert_eq!(batches, expected);
}

#[test]
fn a_release_tells_the_peer_once_and_leaves_nothing() {
    let (store, blocks) = granted(Blocks::default(), &[1]);
    testkit::block_on(store.fetch(&[key(1, 0, 0, 0)])).unwrap();
    store.release(RequestId(1));
    store.release(RequestId(1));
    assert_eq!(*blocks.released.lock().unwrap(), [RequestId(1)]);
    assert_eq!((store.usage().used, store.usage().reserved, store.traffic(RequestId(1))), (0, 0, None));
    assert!(matches!(testkit::block_on(store.fetch(&[key(1, 0, 0, 0)])), Err(StoreError::Missing(_))));
}

/// Without a peer it is a store like any other.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Alone;

#[typetag::serde(name = "remote-alone")]
impl StoreSpec for Alone {
    fn build(&self) -> Result<Arc<dyn KvStore>, oasis_core::policy::SpecError> {
        let inner = Dram { capacity: oasis_core::config::Bytes(100_000) }.build()?;
        Ok(Arc::new(RemoteStore::new(inner, Arc::<Blocks>::default())))
    }
}

#[test]
fn a_remote_store_conforms() {
    testkit::store::conforms(&Alone);
}
