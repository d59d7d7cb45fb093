//! Tests of the store on real files, with faults between it and the disk.

mod faults;
mod faulty;
mod oracle;
mod recovery;

use super::folder::{Folder, RequestFile};
use super::record::Layout;
use super::{Ssd, SsdIo, SsdStore, direct};
use crate::disk::{self, Device, Threads};
use faulty::{Fault, Faulty};
use oasis_core::config::Bytes;
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId};
use oasis_core::memory::{BlockWrite, EntryKey, FetchedEntries, KvStore, Reservation, StoreError};
use oasis_core::testkit::block_on;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// Entries of 8 KiB: one is read by its own pages.
const LARGE: KvGeometry =
    KvGeometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 128, block_tokens: 16, dtype: KvDtype::Bf16 };

/// Entries of 96 bytes, which share pages.
const SMALL: KvGeometry =
    KvGeometry { layers: 2, q_heads: 6, kv_heads: 3, head_dim: 4, block_tokens: 3, dtype: KvDtype::F32 };

fn spec(folder: &TempDir) -> Ssd {
    Ssd { directory: folder.path().to_owned(), capacity: Bytes(8 << 20), deadline_ms: 60_000, ..Ssd::default() }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder for files")
}

/// A store with faults between it and its disk.
fn faulty(spec: &Ssd) -> (SsdStore, Arc<Faulty>) {
    let folder = Folder::open(&spec.directory).unwrap();
    let device = Arc::new(Faulty::new(spec.device(|| direct(spec.queue_depth, &folder)).unwrap()));
    let store = spec.open_on(folder, device.clone() as Arc<dyn Device>).unwrap();
    (store, device)
}

/// Contents of a block, different for every name and `seed`.
fn bytes(geometry: &KvGeometry, seed: u64, layer: usize, block: usize) -> Vec<u8> {
    let name = [seed, layer as u64, block as u64];
    let mut hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, n| (h ^ n).wrapping_mul(0x100_0000_01b3));
    let mut next = || {
        hash = hash.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (hash >> 56) as u8
    };
    (0..geometry.block_bytes()).map(|_| next()).collect()
}

fn reserve(store: &SsdStore, geometry: &KvGeometry, request: u64, blocks: usize) {
    assert_eq!(store.reserve(RequestId(request), geometry, blocks), Reservation::Granted);
}

fn put(store: &SsdStore, geometry: &KvGeometry, request: u64, layer: usize, block: usize) -> Result<(), StoreError> {
    let bytes = bytes(geometry, request, layer, block);
    let write = BlockWrite { block: BlockId::from(block), bytes: &bytes };
    block_on(store.put(RequestId(request), LayerId::from(layer), &[write]))
}

fn put_all(store: &SsdStore, geometry: &KvGeometry, request: u64, blocks: usize) {
    for layer in 0..geometry.layers {
        (0..blocks).for_each(|block| put(store, geometry, request, layer, block).unwrap());
    }
}

fn keys(geometry: &KvGeometry, request: u64, layer: usize, block: usize) -> Vec<EntryKey> {
    let (request, layer, block) = (RequestId(request), LayerId::from(layer), BlockId::from(block));
    (0..geometry.kv_heads).map(|head| EntryKey { request, layer, block, head: KvHead::from(head) }).collect()
}

fn fetch(
    store: &SsdStore,
    geometry: &KvGeometry,
    request: u64,
    layer: usize,
    block: usize,
) -> Result<FetchedEntries, StoreError> {
    block_on(store.fetch(&keys(geometry, request, layer, block)))
}

/// Reads every block of a request and compares.
fn check_all(store: &SsdStore, geometry: &KvGeometry, request: u64, blocks: usize) {
    for (layer, block) in (0..geometry.layers).flat_map(|layer| (0..blocks).map(move |block| (layer, block))) {
        let entries = fetch(store, geometry, request, layer, block).unwrap();
        check(&entries, geometry, request, layer, block);
    }
}

fn check(entries: &FetchedEntries, geometry: &KvGeometry, seed: u64, layer: usize, block: usize) {
    let found: Vec<u8> = entries.entries.iter().flat_map(|entry| entry.bytes().to_vec()).collect();
    assert!(found == bytes(geometry, seed, layer, block), "layer {layer}, block {block} holds something else");
}

/// Waits until everything is on the disk and the write buffer is empty.
fn settle(store: &SsdStore) {
    while store.shared.read().requests.values().any(|live| !live.dirty.is_empty())
        || store.buffer.available_permits() < store.buffer_pages
    {
        std::thread::yield_now();
    }
}

/// The file of a request.
fn file_of(store: &SsdStore, request: u64) -> (Arc<RequestFile>, Layout) {
    let state = store.shared.read();
    let live = &state.requests[&RequestId(request)];
    (live.file.as_ref().unwrap().clone(), live.layout)
}

fn medium(result: Result<impl Sized, StoreError>) -> String {
    match result {
        Err(StoreError::Medium { problem, .. }) => problem,
        Err(other) => panic!("expected an error of the disk, found {other}"),
        Ok(_) => panic!("expected an error of the disk, found none"),
    }
}

#[test]
fn impossible_values_are_refused() {
    let folder = folder();
    let spec = || spec(&folder);
    for (wrong, field) in [
        (Ssd { capacity: Bytes(0), ..spec() }, "capacity"),
        (Ssd { write_buffer: Bytes(4095), ..spec() }, "write_buffer"),
        (Ssd { queue_depth: 1, ..spec() }, "queue_depth"),
        (Ssd { deadline_ms: 0, ..spec() }, "deadline_ms"),
        (Ssd { directory: "/dev/null/kv".into(), ..spec() }, "directory"),
    ] {
        assert_eq!(wrong.open().err().expect(field).field, field);
    }
}

#[test]
fn one_store_at_a_time_has_a_folder() {
    let folder = folder();
    let first = spec(&folder).open().unwrap();
    let error = spec(&folder).open().err().expect("the folder is taken");
    assert!(error.to_string().contains("no other store has open"), "{error}");
    drop(first);
    spec(&folder).open().unwrap();
}

#[test]
fn a_folder_that_the_store_made_goes_when_it_is_empty() {
    let folder = folder();
    let spec = Ssd { directory: folder.path().join("kv"), ..spec(&folder) };
    let store = spec.open().unwrap();
    reserve(&store, &SMALL, 1, 1);
    drop(store);
    assert!(spec.directory.exists(), "the file of request 1 is left");
    let store = spec.open().unwrap();
    drop(store);
    assert!(spec.directory.exists(), "this store did not make the folder");
}

#[test]
fn both_ways_of_reading_return_what_was_written() {
    for io in [SsdIo::Auto, SsdIo::Plain] {
        for geometry in [LARGE, SMALL] {
            let folder = folder();
            let store = Ssd { io, ..spec(&folder) }.open().unwrap();
            reserve(&store, &geometry, 1, 5);
            put_all(&store, &geometry, 1, 5);
            check_all(&store, &geometry, 1, 5);
            settle(&store);
            check_all(&store, &geometry, 1, 5);
            let metrics = store.metrics();
            assert_eq!(metrics.hits + metrics.misses, 2 * (2 * 5 * geometry.kv_heads) as u64);
            assert!(metrics.misses >= (2 * 5 * geometry.kv_heads) as u64, "{metrics:?}");
        }
    }
}

/// A silent fall-back would pass every other test.
#[test]
#[cfg(target_os = "linux")]
fn auto_is_direct_where_the_kernel_allows_it() {
    let folder = folder();
    let store = spec(&folder).open().unwrap();
    match crate::disk::Uring::new(2) {
        Ok(_) => assert!(store.device.is_direct() || is_tmpfs(folder.path())),
        Err(error) => eprintln!("skipped: this kernel has no io_uring ({error})"),
    }
}

/// Older kernels have no direct I/O there.
#[cfg(target_os = "linux")]
fn is_tmpfs(path: &std::path::Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|status| status.f_type == 0x0102_1994)
}

/// Counts warnings.
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn without_direct_io_the_store_warns_once_and_reads_plainly() {
    let missing = || Err(io::ErrorKind::Unsupported.into());
    let warnings = Arc::new(AtomicUsize::new(0));
    let folder = folder();
    tracing::subscriber::with_default(Warnings(warnings.clone()), || {
        let spec = spec(&folder);
        let device = spec.device(missing).unwrap();
        assert!(!device.is_direct());
        let store = spec.open_on(Folder::open(&spec.directory).unwrap(), device).unwrap();
        reserve(&store, &LARGE, 1, 2);
        put_all(&store, &LARGE, 1, 2);
        settle(&store);
        check_all(&store, &LARGE, 1, 2);
        assert_eq!(warnings.load(Ordering::Relaxed), 1);
        assert!(!Ssd { io: SsdIo::Plain, ..spec.clone() }.device(missing).unwrap().is_direct());
        assert_eq!(warnings.load(Ordering::Relaxed), 1, "what was asked for is no surprise");
        let error = Ssd { io: SsdIo::Direct, ..spec }.device(missing).err().expect("there is none");
        assert_eq!(error.field, "io");
    });
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_does_not_return_the_probe_is_not_used() {
    let folder = folder();
    let device = Arc::new(Faulty::new(Arc::new(Threads::new(4).unwrap())));
    let probe = || disk::probe(&(device.clone() as Arc<dyn Device>), folder.path()).map_err(|error| error.kind());
    assert_eq!(probe(), Ok(()));
    for (writes, fault, error) in [
        (true, Fault::Error(io::ErrorKind::InvalidInput), io::ErrorKind::InvalidInput),
        (false, Fault::Flip(77), io::ErrorKind::InvalidData),
        (true, Fault::Torn(4000), io::ErrorKind::InvalidData),
    ] {
        device.plan_for(writes, fault);
        assert_eq!(probe(), Err(error));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the probe is gone");
}

#[test]
fn a_read_of_one_entry_moves_its_own_pages_only() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    reserve(&store, &LARGE, 1, 3);
    put_all(&store, &LARGE, 1, 3);
    settle(&store);
    device.log.lock().unwrap().clear();
    let one = keys(&LARGE, 1, 1, 2)[1];
    block_on(store.fetch(&[one, one])).unwrap();
    // Both heads of one block touch, blocks do not.
    let block = keys(&LARGE, 1, 0, 0);
    block_on(store.fetch(&[block[1], one, block[0]])).unwrap();
    let reads: Vec<usize> = device.log.lock().unwrap().iter().map(|(_, len)| *len).collect();
    assert_eq!(reads, [8192, 16384, 8192]);
}
