use super::*;
use crate::remote::{BlockRead, BlockReader, Lent, PeerOptions, PrefillPeer, Secret, Terms, Tls};
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::ids::{BlockId, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, KvStore, Reservation, StoreSpec};
use oasis_core::policy::SpecError;
use oasis_core::testkit::{self, Random, for_all};
use oasis_ucx::Segment;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

const GEOMETRY: KvGeometry =
    KvGeometry { layers: 2, q_heads: 2, kv_heads: 2, head_dim: 16, block_tokens: 4, dtype: KvDtype::F32 };
const BLOCKS: usize = 9;
const LIMIT: Duration = Duration::from_secs(20);

/// UCX over TCP; `None`, said aloud, where it is missing. A variable makes that a failure.
fn engine() -> Option<Engine> {
    let config = NodesConfig { transport: NodeTransport::UcxTcp, ..NodesConfig::default() };
    match open_ucx(&config) {
        Ok(engine) => engine,
        Err(error) => {
            assert!(std::env::var_os("OASIS_REQUIRE_UCX").is_none(), "{error}");
            eprintln!("SKIPPED, UCX is missing: {error}");
            None
        }
    }
}

fn part(request: u64, layer: usize, blocks: &[usize]) -> BlockRead {
    let blocks = blocks.iter().map(|&block| BlockId::from(block)).collect();
    BlockRead { request, layer: LayerId::from(layer), blocks }
}

#[test]
fn neighbours_are_one_read_and_every_byte_goes_where_it_belongs() {
    for_all(300, |random: &mut Random| {
        let block = 1 + random.below(3);
        // Few places, so that neighbours are common.
        let place = |random: &mut Random| (random.below(12) * block) as u64;
        let layers: Vec<Vec<u64>> = (0..2).map(|_| (0..BLOCKS).map(|_| place(random)).collect()).collect();
        let places = Places { epoch: 1, epoch_at: 0, layers };
        let (mut segments, mut local, mut expected) = (Vec::new(), 0, Vec::new());
        for _ in 0..1 + random.below(3) {
            let blocks: Vec<usize> = (0..random.below(6)).map(|_| random.below(BLOCKS)).collect();
            let part = part(1, random.below(2), &blocks);
            places.plan(&part, block, local, &mut segments).unwrap();
            local += blocks.len() * block;
            let first = |&b: &usize| places.layers[part.layer.index()][b];
            expected.extend(blocks.iter().map(first).flat_map(|first| first..first + block as u64));
        }
        let mut found = vec![u64::MAX; local];
        for &Segment { local, remote, len } in &segments {
            (0..len).for_each(|at| found[local + at] = remote + at as u64);
        }
        assert_eq!(found, expected);
        let joins = |pair: &[Segment]| pair[0].remote + pair[0].len as u64 == pair[1].remote;
        assert!(!segments.windows(2).any(joins), "{segments:?}");
    });
}

#[test]
fn a_block_that_was_not_granted_is_not_planned() {
    let places = Places { epoch: 1, epoch_at: 0, layers: vec![vec![0, 64]] };
    for (part, expected) in [
        (part(1, 1, &[0]), "expected a layer below 1, found 1"),
        (part(1, 0, &[1, 2]), "expected a block of the 2 that were granted, found 2"),
    ] {
        let mut segments = Vec::new();
        assert_eq!(places.plan(&part, 64, 0, &mut segments), Err(expected.to_owned()));
        assert!(segments.is_empty());
    }
}

/// A store in registered memory, as the conformance suite wants it.
#[derive(Debug, Serialize, Deserialize)]
struct Registered {
    capacity: u64,
}

#[typetag::serde(name = "registered")]
impl StoreSpec for Registered {
    fn build(&self) -> Result<Arc<dyn KvStore>, SpecError> {
        let engine = engine().expect("looked for before");
        let staging = StagingPool::start(engine, self.capacity).expect("room");
        Ok(staging.store())
    }
}

#[test]
fn a_store_in_registered_memory_conforms() {
    if engine().is_some() {
        testkit::store::conforms(&Registered { capacity: 1 << 20 });
    }
}

/// A prefill node's memory and a decode node's reader of it, in one process.
struct Nodes {
    runtime: tokio::runtime::Runtime,
    staging: Arc<StagingPool>,
    store: Arc<dyn KvStore>,
    reader: OneSidedReader,
}

fn bytes_of(request: u64, layer: usize, block: usize) -> Vec<u8> {
    (0..GEOMETRY.block_bytes()).map(|i| (request as usize * 91 + layer * 37 + block * 5 + i) as u8).collect()
}

impl Nodes {
    fn start() -> Option<Self> {
        let staging = StagingPool::start(engine()?, 1 << 20).unwrap();
        let store = staging.store();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let terms = Terms { secret: Secret::default(), facts: Vec::new(), timeout: LIMIT, tls: Tls::default() };
        // Nobody listens there, so the session knows of no request.
        let options = PeerOptions { address: "127.0.0.1:1".to_owned(), terms, layers: GEOMETRY.layers };
        let session = PrefillPeer::start(runtime.handle(), options, true);
        let reader = OneSidedReader::new(session, "127.0.0.1:1".to_owned(), engine()?, LIMIT).unwrap();
        Some(Self { runtime, staging, store, reader })
    }

    /// Fills a request's blocks and lends them.
    fn lend(&self, request: u64) -> Lending {
        self.runtime.block_on(async {
            let id = RequestId(request);
            assert_eq!(self.store.reserve(id, &GEOMETRY, BLOCKS), Reservation::Granted);
            for layer in 0..GEOMETRY.layers {
                let bytes: Vec<Vec<u8>> = (0..BLOCKS).map(|block| bytes_of(request, layer, block)).collect();
                let writes = bytes.iter().enumerate();
                let writes: Vec<_> =
                    writes.map(|(block, bytes)| BlockWrite { block: BlockId::from(block), bytes }).collect();
                self.store.put(id, LayerId::from(layer), &writes).await.unwrap();
            }
            self.staging.lend(&*self.store, id, &GEOMETRY, &[BLOCKS; GEOMETRY.layers]).await.unwrap()
        })
    }

    fn grant(&self, request: u64, places: &Places) -> Result<(), String> {
        let lent = Lent { pool: self.staging.descriptor().into(), places: places.clone() };
        self.runtime.block_on(self.reader.granted(RequestId(request), GEOMETRY.block_bytes(), Some(&lent)))
    }

    fn read(&self, parts: &[BlockRead]) -> Vec<Result<Vec<u8>, String>> {
        let answers = self.runtime.block_on(self.reader.read(parts.to_vec()));
        answers.into_iter().map(|answer| answer.map(|entry| entry.bytes().to_vec())).collect()
    }
}

fn expected(part: &BlockRead) -> Result<Vec<u8>, String> {
    let layer = part.layer.index();
    Ok(part.blocks.iter().flat_map(|block| bytes_of(part.request, layer, block.index())).collect())
}

#[test]
fn granted_blocks_are_read_and_only_as_long_as_they_are_lent() {
    let Some(nodes) = Nodes::start() else { return };
    let lendings = [nodes.lend(1), nodes.lend(2)];
    for (request, lending) in (1..).zip(&lendings) {
        nodes.grant(request, lending.places()).unwrap();
    }
    let parts = [part(1, 0, &[0, 1, 2, 8]), part(2, 1, &[5, 3, 4]), part(1, 1, &[]), part(2, 0, &[7])];
    let all: Vec<_> = parts.iter().map(expected).collect();
    assert_eq!(nodes.read(&parts), all);

    // What the epoch says decides, even while the blocks still lie there.
    let [first, second] = lendings;
    drop(first);
    let answers = nodes.read(&parts);
    let refused = answers[0].as_ref().unwrap_err();
    assert_eq!(refused, "the prefill node has granted no blocks of this request", "the session's reason");
    assert_eq!((&answers[1], &answers[3]), (&all[1], &all[3]));
    assert!(answers[2].is_err());
    nodes.reader.release(RequestId(1));
    assert!(nodes.read(&parts)[0].as_ref().unwrap_err().contains("has granted no blocks"));

    // Released by the store, but still lent: the blocks stay where they are, whoever comes next.
    nodes.store.release(RequestId(2));
    let third = nodes.lend(3);
    assert_eq!(nodes.read(&parts[1..2]), all[1..2]);
    drop((second, third));
    nodes.store.release(RequestId(1));
    nodes.store.release(RequestId(3));
    assert_eq!(nodes.staging.used(), 0);
}

#[test]
fn what_a_peer_says_is_checked() {
    let Some(nodes) = Nodes::start() else { return };
    let lending = nodes.lend(1);
    let mut outside = lending.places().clone();
    outside.layers[0][1] = u64::MAX - 8;
    outside.layers[1][0] = 64 << 20;
    nodes.grant(1, &outside).unwrap();
    for read in [part(1, 0, &[1]), part(1, 1, &[0, 1])] {
        let error = nodes.read(&[read])[0].clone().unwrap_err();
        assert!(error.contains("prefill node 127.0.0.1:1: expected a part of "), "{error}");
    }
    for read in [part(1, 2, &[0]), part(1, 0, &[BLOCKS])] {
        nodes.read(&[read])[0].clone().expect_err("what was not granted");
    }
    // The connection goes on.
    assert_eq!(nodes.read(&[part(1, 0, &[0])]), [expected(&part(1, 0, &[0]))]);

    let garbage = Lent { pool: vec![7; 200].into(), places: lending.places().clone() };
    for lent in [Some(&garbage), None] {
        let granted = nodes.reader.granted(RequestId(9), GEOMETRY.block_bytes(), lent);
        let error = nodes.runtime.block_on(granted).unwrap_err();
        assert!(error.contains("expected "), "{error}");
    }
    nodes.reader.release(RequestId(1));
    nodes.store.release(RequestId(1));
    drop(lending);
    assert_eq!(nodes.staging.used(), 0);
}

#[test]
fn a_missing_library_is_an_error_and_no_other_transport_is_taken() {
    let config =
        |transport| NodesConfig { transport, ucx_library: "/nowhere/libucp.so.0".to_owned(), ..NodesConfig::default() };
    assert!(open_ucx(&config(NodeTransport::Tcp)).unwrap().is_none());
    let error = open_ucx(&config(NodeTransport::UcxTcp)).unwrap_err().to_string();
    assert!(error.contains("expected UCX's library /nowhere/libucp.so.0, found "), "{error}");
    if oasis_ucx::probe::ports().is_empty() {
        let error = open_ucx(&config(NodeTransport::Roce)).unwrap_err().to_string();
        assert!(error.contains("expected an RDMA adapter that is up, found none in /sys/class/infiniband"), "{error}");
    }
}
