//! Faults of the disk: what was put comes back exactly or not at all.

use super::faulty::{Fault, flip};
use super::*;
use oasis_core::memory::HostBytes;
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::disk::{PAGE, PagePool};

/// Changes the file of a request behind the store's back: `change` gets a record.
fn tamper(store: &SsdStore, request: u64, record: usize, change: impl FnOnce(&mut [u8])) {
    let (file, layout) = file_of(store, request);
    let mut pages = PagePool::new(0).take(layout.record_bytes());
    file.file.read_exact_at(pages.bytes_mut(), layout.record_offset(record)).unwrap();
    change(pages.bytes_mut());
    file.file.write_all_at(pages.bytes(), layout.record_offset(record)).unwrap();
}

#[test]
fn short_reads_and_writes_go_on() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    // Everything moves by a page and a bit.
    device.plan(|_, _| Fault::Short(PAGE + 700));
    reserve(&store, &LARGE, 1, 2);
    put_all(&store, &LARGE, 1, 2);
    settle(&store);
    check_all(&store, &LARGE, 1, 2);
    device.plan(|_, _| Fault::None);
    check_all(&store, &LARGE, 1, 2);
}

#[test]
fn a_read_that_stands_still_is_an_error_of_that_read() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    reserve(&store, &LARGE, 1, 1);
    put_all(&store, &LARGE, 1, 1);
    settle(&store);
    device.plan_for(false, Fault::Short(700));
    let problem = medium(fetch(&store, &LARGE, 1, 0, 0));
    assert!(problem.contains("700 of 16384 bytes read"), "{problem}");
    device.plan_for(false, Fault::Error(ErrorKind::Other));
    assert!(medium(fetch(&store, &LARGE, 1, 0, 0)).contains("other error"));
    device.plan_for(false, Fault::None);
    check_all(&store, &LARGE, 1, 1);
}

#[test]
fn a_flipped_bit_of_an_entry_is_found_wherever_it_is() {
    for geometry in [LARGE, SMALL] {
        let folder = folder();
        let (store, device) = faulty(&spec(&folder));
        reserve(&store, &geometry, 1, 2);
        put_all(&store, &geometry, 1, 2);
        settle(&store);
        // On the way.
        let (_, layout) = file_of(&store, 1);
        let first = layout.entry_offset(0) % PAGE;
        for bit in (first * 8..(first + geometry.block_bytes()) * 8).step_by(997) {
            device.plan_for(false, Fault::Flip(bit));
            let problem = medium(fetch(&store, &geometry, 1, 1, 1));
            assert!(problem.contains("other bytes than were written"), "{problem}");
        }
        device.plan_for(false, Fault::None);
        check_all(&store, &geometry, 1, 2);
        // On the disk: the last entry only.
        let offset = layout.entry_offset(geometry.kv_heads - 1);
        tamper(&store, 1, layout.record(LayerId(0), BlockId(1)), |record| flip(&mut record[offset..], 5));
        let keys = keys(&geometry, 1, 0, 1);
        medium(block_on(store.fetch(&keys)));
        let sound = block_on(store.fetch(&keys[..geometry.kv_heads - 1])).unwrap();
        assert_eq!(sound.entries[0].bytes(), &bytes(&geometry, 1, 0, 1)[..geometry.entry_bytes()]);
    }
}

#[test]
fn a_flipped_head_of_a_record_spoils_no_entry() {
    let folder = folder();
    let (store, _) = faulty(&spec(&folder));
    reserve(&store, &SMALL, 1, 2);
    put_all(&store, &SMALL, 1, 2);
    settle(&store);
    tamper(&store, 1, 3, |record| flip(record, 100));
    check_all(&store, &SMALL, 1, 2);
}

#[test]
fn whole_blocks_in_the_wrong_place_are_found() {
    let folder = folder();
    let (store, _) = faulty(&spec(&folder));
    for request in [1, 2] {
        reserve(&store, &LARGE, request, 2);
        put_all(&store, &LARGE, request, 2);
    }
    settle(&store);
    let (file, layout) = file_of(&store, 2);
    let mut other = PagePool::new(0).take(layout.record_bytes());
    file.file.read_exact_at(other.bytes_mut(), layout.record_offset(0)).unwrap();
    // Another request's block, a sound one, where request 1 has its own of the same name.
    tamper(&store, 1, 0, |record| record.copy_from_slice(other.bytes()));
    medium(fetch(&store, &LARGE, 1, 0, 0));
    // The same request's other block.
    tamper(&store, 2, 1, |record| record.copy_from_slice(other.bytes()));
    medium(fetch(&store, &LARGE, 2, 0, 1));
    check(&fetch(&store, &LARGE, 2, 0, 0).unwrap(), &LARGE, 2, 0, 0);
}

#[test]
fn a_write_that_was_torn_or_lost_in_silence_never_returns_other_bytes() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    let (mut sound, mut found) = (0, 0);
    for (request, kept) in (0_u64..).zip((0..5 * PAGE + 1).step_by(1021)) {
        reserve(&store, &LARGE, request, 1);
        device.plan_for(true, Fault::Torn(kept));
        put(&store, &LARGE, request, 0, 0).unwrap();
        settle(&store);
        for (head, key) in keys(&LARGE, request, 0, 0).into_iter().enumerate() {
            match block_on(store.fetch(&[key])) {
                Ok(entries) => {
                    let range = head * LARGE.entry_bytes()..(head + 1) * LARGE.entry_bytes();
                    assert_eq!(entries.entries[0].bytes(), &bytes(&LARGE, request, 0, 0)[range]);
                    sound += 1;
                }
                error => {
                    medium(error);
                    found += 1;
                }
            }
        }
        store.release(RequestId(request));
    }
    assert!(sound >= 8 && found >= 8, "{sound} sound, {found} found");
}

#[test]
fn a_disk_that_takes_no_writes_loses_nothing_and_goes_on_when_it_does() {
    let folder = folder();
    let record = Layout { geometry: LARGE, blocks: 6 }.record_bytes() as u64;
    let (store, device) = faulty(&Ssd { write_buffer: Bytes(3 * record), ..spec(&folder) });
    reserve(&store, &LARGE, 1, 6);
    put(&store, &LARGE, 1, 1, 5).unwrap();
    settle(&store);
    device.plan_for(true, Fault::Error(ErrorKind::StorageFull));
    (0..3).for_each(|block| put(&store, &LARGE, 1, 0, block).unwrap());
    let problem = medium(put(&store, &LARGE, 1, 0, 3));
    assert!(problem.contains("the disk does not take") && problem.contains("no storage space"), "{problem}");
    assert!(matches!(fetch(&store, &LARGE, 1, 0, 3), Err(StoreError::Missing(_))), "a refused block is visible");
    (0..3).for_each(|block| check(&fetch(&store, &LARGE, 1, 0, block).unwrap(), &LARGE, 1, 0, block));
    check(&fetch(&store, &LARGE, 1, 1, 5).unwrap(), &LARGE, 1, 1, 5);
    device.plan_for(true, Fault::None);
    (3..6).for_each(|block| put(&store, &LARGE, 1, 0, block).unwrap());
    settle(&store);
    (0..6).for_each(|block| check(&fetch(&store, &LARGE, 1, 0, block).unwrap(), &LARGE, 1, 0, block));
}

#[test]
fn released_blocks_make_room_in_a_write_buffer_that_the_disk_does_not_empty() {
    let folder = folder();
    let record = Layout { geometry: LARGE, blocks: 2 }.record_bytes() as u64;
    let (store, device) = faulty(&Ssd { write_buffer: Bytes(2 * record), ..spec(&folder) });
    [1, 2].into_iter().for_each(|request| reserve(&store, &LARGE, request, 2));
    device.plan_for(true, Fault::Error(ErrorKind::Other));
    (0..2).for_each(|block| put(&store, &LARGE, 1, 0, block).unwrap());
    medium(put(&store, &LARGE, 2, 0, 0));
    store.release(RequestId(1));
    put(&store, &LARGE, 2, 0, 0).unwrap();
    check(&fetch(&store, &LARGE, 2, 0, 0).unwrap(), &LARGE, 2, 0, 0);
}

#[test]
fn a_full_file_system_is_an_answer() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    device.is_full.store(true, Ordering::Relaxed);
    let answer = store.reserve(RequestId(1), &LARGE, 2);
    assert!(matches!(answer, Reservation::TooLarge { .. }), "nothing that could be released: {answer:?}");
    assert_eq!((store.usage().reserved, store.usage().requests), (0, 0));
    device.is_full.store(false, Ordering::Relaxed);
    reserve(&store, &LARGE, 1, 2);
    put_all(&store, &LARGE, 1, 2);
    device.is_full.store(true, Ordering::Relaxed);
    let answer = store.reserve(RequestId(2), &LARGE, 2);
    assert!(matches!(answer, Reservation::Full { needed, free } if needed > free), "{answer:?}");
    check_all(&store, &LARGE, 1, 2);
    assert_eq!(store.usage().requests, 1);
}

#[test]
fn a_request_without_a_file_fails_alone_and_says_why() {
    let folder = folder();
    let store = spec(&folder).open().unwrap();
    reserve(&store, &LARGE, 1, 1);
    put_all(&store, &LARGE, 1, 1);
    // The name of the file to come is taken.
    let generation = store.shared.read().generation + 1;
    std::fs::create_dir(folder.path().join(format!("{:016x}-{generation:016x}.kv", 2))).unwrap();
    reserve(&store, &LARGE, 2, 1);
    let problem = medium(put(&store, &LARGE, 2, 0, 0));
    assert!(problem.contains("File exists"), "{problem}");
    store.release(RequestId(2));
    check_all(&store, &LARGE, 1, 1);
}

#[test]
fn a_disk_slower_than_the_deadline_fails_the_operation_only() {
    let folder = folder();
    let record = Layout { geometry: LARGE, blocks: 3 }.record_bytes() as u64;
    let (store, device) = faulty(&Ssd { deadline_ms: 30, write_buffer: Bytes(record), ..spec(&folder) });
    reserve(&store, &LARGE, 1, 3);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    settle(&store);
    device.plan(|_, _| Fault::Held);
    let start = Instant::now();
    let problem = medium(fetch(&store, &LARGE, 1, 0, 0));
    assert!(problem.contains("did not return 2 entries within 30ms"), "{problem}");
    put(&store, &LARGE, 1, 0, 1).unwrap();
    let problem = medium(put(&store, &LARGE, 1, 0, 2));
    assert!(problem.contains("made no room in the write buffer within 30ms"), "{problem}");
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(device.held(), 2);
    device.plan(|_, _| Fault::None);
    device.let_go();
    settle(&store);
    put(&store, &LARGE, 1, 0, 2).unwrap();
    (0..3).for_each(|block| check(&fetch(&store, &LARGE, 1, 0, block).unwrap(), &LARGE, 1, 0, block));
}

/// Polls a future once, which then is dropped.
fn begin_and_drop<T>(future: impl Future<Output = T>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let mut future = pin!(future);
    assert!(matches!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
}

#[test]
fn a_dropped_fetch_leaves_its_memory_to_the_disk() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    reserve(&store, &LARGE, 1, 2);
    put_all(&store, &LARGE, 1, 2);
    settle(&store);
    device.plan_for(false, Fault::Held);
    begin_and_drop(store.fetch(&keys(&LARGE, 1, 0, 0)));
    assert_eq!(device.held(), 1);
    store.release(RequestId(1));
    reserve(&store, &LARGE, 2, 2);
    put_all(&store, &LARGE, 2, 2);
    device.plan_for(false, Fault::None);
    // It lands, or is not begun at all; nobody else's memory is touched.
    device.let_go();
    settle(&store);
    check_all(&store, &LARGE, 2, 2);
}

#[test]
fn a_dropped_put_is_as_if_it_had_never_been() {
    let folder = folder();
    let record = Layout { geometry: LARGE, blocks: 2 }.record_bytes() as u64;
    let (store, device) = faulty(&Ssd { write_buffer: Bytes(record), ..spec(&folder) });
    reserve(&store, &LARGE, 1, 2);
    device.plan_for(true, Fault::Held);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    let block = bytes(&LARGE, 7, 0, 1);
    let write = [BlockWrite { block: BlockId(1), bytes: &block }];
    begin_and_drop(store.put(RequestId(1), LayerId(0), &write));
    device.let_go();
    settle(&store);
    assert!(matches!(fetch(&store, &LARGE, 1, 0, 1), Err(StoreError::Missing(_))));
    assert_eq!(store.usage().used, record);
    device.plan_for(true, Fault::None);
    put(&store, &LARGE, 1, 0, 1).unwrap();
    (0..2).for_each(|block| check(&fetch(&store, &LARGE, 1, 0, block).unwrap(), &LARGE, 1, 0, block));
    settle(&store);
}

#[test]
fn of_two_puts_of_one_block_at_a_time_one_is_refused() {
    let folder = folder();
    let record = Layout { geometry: LARGE, blocks: 2 }.record_bytes() as u64;
    let (store, device) = faulty(&Ssd { write_buffer: Bytes(record), ..spec(&folder) });
    reserve(&store, &LARGE, 1, 2);
    device.plan_for(true, Fault::Held);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    device.plan_for(true, Fault::None);
    // Both are sound as long as they wait for the write buffer.
    let contents = [5, 6].map(|seed| bytes(&LARGE, seed, 0, 1));
    let writes = contents.each_ref().map(|bytes| [BlockWrite { block: BlockId(1), bytes }]);
    let [first, second] = writes.each_ref().map(|write| store.put(RequestId(1), LayerId(0), write));
    let (first, second, ()) = block_on(async { tokio::join!(first, second, async { device.let_go() }) });
    first.unwrap();
    assert!(matches!(second, Err(StoreError::Refused { .. })), "{second:?}");
    check(&fetch(&store, &LARGE, 1, 0, 1).unwrap(), &LARGE, 5, 0, 1);
    settle(&store);
    check(&fetch(&store, &LARGE, 1, 0, 1).unwrap(), &LARGE, 5, 0, 1);
    assert_eq!(store.usage().used, 2 * record);
}

#[test]
fn a_write_that_outlives_its_request_meets_no_other() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    reserve(&store, &LARGE, 1, 1);
    device.plan_for(true, Fault::Held);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    store.release(RequestId(1));
    // The same id again, with other bytes.
    reserve(&store, &LARGE, 1, 1);
    let other = bytes(&LARGE, 9, 0, 0);
    let write = BlockWrite { block: BlockId(0), bytes: &other };
    block_on(store.put(RequestId(1), LayerId(0), &[write])).unwrap();
    device.plan_for(true, Fault::None);
    device.let_go();
    settle(&store);
    check(&fetch(&store, &LARGE, 1, 0, 0).unwrap(), &LARGE, 9, 0, 0);
}

#[test]
fn late_news_of_a_write_concern_its_own_request_only() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    reserve(&store, &LARGE, 1, 1);
    device.plan_for(true, Fault::Untold);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    while device.held() == 0 {
        std::thread::yield_now();
    }
    store.release(RequestId(1));
    reserve(&store, &LARGE, 1, 1);
    device.plan_for(true, Fault::Held);
    let other = bytes(&LARGE, 9, 0, 0);
    let write = BlockWrite { block: BlockId(0), bytes: &other };
    block_on(store.put(RequestId(1), LayerId(0), &[write])).unwrap();
    // The former write is done; the new one has not begun.
    assert!(device.let_one_go());
    check(&fetch(&store, &LARGE, 1, 0, 0).unwrap(), &LARGE, 9, 0, 0);
    device.let_go();
    settle(&store);
    check(&fetch(&store, &LARGE, 1, 0, 0).unwrap(), &LARGE, 9, 0, 0);
}

#[test]
fn dropping_the_store_waits_for_its_writes() {
    let folder = folder();
    let (store, device) = faulty(&spec(&folder));
    let slow = Arc::new(AtomicUsize::new(0));
    device.plan({
        let slow = slow.clone();
        move |_, _| Fault::Slow(Duration::from_millis(slow.fetch_add(7, Ordering::Relaxed) as u64))
    });
    reserve(&store, &LARGE, 1, 4);
    put_all(&store, &LARGE, 1, 4);
    drop((store, device));
    let store = spec(&folder).open().unwrap();
    let leftover = store.leftovers().remove(0);
    assert_eq!(store.adopt(leftover.generation, RequestId(1)).unwrap().len(), 8);
    check_all(&store, &LARGE, 1, 4);
}

#[test]
fn dropping_the_store_does_not_wait_for_ever() {
    let folder = folder();
    let (store, device) = faulty(&Ssd { deadline_ms: 30, ..spec(&folder) });
    reserve(&store, &LARGE, 1, 2);
    put(&store, &LARGE, 1, 0, 0).unwrap();
    settle(&store);
    device.plan_for(true, Fault::Held);
    put(&store, &LARGE, 1, 0, 1).unwrap();
    let start = Instant::now();
    drop(store);
    assert!(start.elapsed() < Duration::from_secs(20));
    // It lands after all, on a file that another store may have by now.
    let store = spec(&folder).open().unwrap();
    let generation = store.leftovers()[0].generation;
    device.let_go();
    drop(device);
    let blocks = store.adopt(generation, RequestId(5)).unwrap();
    assert!(blocks.starts_with(&[(LayerId(0), BlockId(0))]), "{blocks:?}");
    check(&fetch(&store, &LARGE, 5, 0, 0).unwrap(), &LARGE, 1, 0, 0);
}
