//! What a killed store leaves behind.

use super::super::record::{Owner, decode_file, encode_file};
use super::faulty::flip;
use super::*;
use crate::disk::PAGE;
use oasis_core::testkit::for_all;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const OWNER: Owner = Owner { request: 3, generation: 77 };

/// Blocks 0 and 1 of both layers are written, the rest of three is not.
fn left_behind(folder: &TempDir) -> PathBuf {
    let store = spec(folder).open().unwrap();
    reserve(&store, &SMALL, 3, 3);
    put_all(&store, &SMALL, 3, 2);
    let (file, _) = file_of(&store, 3);
    drop(store);
    file.path.clone()
}

fn adopt_only(store: &SsdStore, request: u64) -> Vec<(usize, usize)> {
    let leftover = store.leftovers().remove(0);
    let blocks = store.adopt(leftover.generation, RequestId(request)).unwrap();
    blocks.into_iter().map(|(layer, block)| (layer.index(), block.index())).collect()
}

#[test]
fn leftovers_are_no_requests_until_they_are_adopted() {
    let folder = folder();
    left_behind(&folder);
    let store = spec(&folder).open().unwrap();
    assert_eq!((store.usage().reserved, store.usage().used, store.usage().requests), (0, 0, 0));
    assert!(matches!(fetch(&store, &SMALL, 3, 0, 0), Err(StoreError::Missing(_))), "ids mean nothing in a later run");
    let leftover = store.leftovers().remove(0);
    assert_eq!((leftover.request, leftover.geometry, leftover.blocks), (RequestId(3), SMALL, 3));

    // A live request of the old id is another one.
    reserve(&store, &SMALL, 3, 1);
    assert!(medium(store.adopt(leftover.generation, RequestId(3))).contains("reservation already"));
    assert!(medium(store.adopt(1, RequestId(4))).contains("no leftover"));
    assert_eq!(adopt_only(&store, 4), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    assert!(store.leftovers().is_empty());
    let check = |layer, block| check(&fetch(&store, &SMALL, 4, layer, block).unwrap(), &SMALL, 3, layer, block);
    [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().for_each(|(layer, block)| check(layer, block));
    assert!(matches!(fetch(&store, &SMALL, 4, 0, 2), Err(StoreError::Missing(_))));
    assert!(matches!(put(&store, &SMALL, 4, 1, 1), Err(StoreError::Refused { .. })), "blocks never change");
    put(&store, &SMALL, 4, 0, 2).unwrap();
    settle(&store);
    fetch(&store, &SMALL, 4, 0, 2).unwrap();
    let record = Layout { geometry: SMALL, blocks: 3 }.record_bytes() as u64;
    assert_eq!(store.usage().used, 5 * record);
    [3, 4].into_iter().for_each(|request| store.release(RequestId(request)));
    assert_eq!((store.usage().reserved, store.usage().used, store.usage().requests), (0, 0, 0));
}

/// The last record as a write left it that was cut at every byte, over zeros and over an older block.
#[test]
fn a_record_torn_at_any_byte_is_whole_or_absent() {
    let layout = Layout { geometry: SMALL, blocks: 2 };
    let len = layout.record_bytes();
    let [mut new, mut old] = [vec![0; len], vec![0; len]];
    let checksums = layout.encode(OWNER, 3, &bytes(&SMALL, 3, 1, 1), &mut new);
    layout.encode(Owner { generation: 76, ..OWNER }, 3, &bytes(&SMALL, 2, 1, 1), &mut old);
    for before in [vec![0; len], old] {
        let mut whole = 0;
        for cut in 0..=len {
            let torn = [&new[..cut], &before[cut..]].concat();
            let expected = (torn == new).then(|| checksums.clone());
            assert_eq!(layout.decode(OWNER, 3, &torn), expected, "cut at byte {cut}");
            // The end of the write may come first, too.
            let torn = [&before[..cut], &new[cut..]].concat();
            let expected = (torn == new).then(|| checksums.clone());
            assert_eq!(layout.decode(OWNER, 3, &torn), expected, "begun at byte {cut}");
            whole += usize::from(torn == new);
        }
        assert!(whole >= 1);
    }
}

/// The same on files, at each byte that a sector or a structure ends at and around.
#[test]
fn the_scan_drops_a_torn_last_record_and_keeps_the_others() {
    let folder = folder();
    let path = left_behind(&folder);
    let layout = Layout { geometry: SMALL, blocks: 3 };
    let sound = std::fs::read(&path).unwrap();
    let last = layout.record_offset(layout.record(LayerId(1), BlockId(1))) as usize;
    let payload = layout.entry_offset(0);
    let ends = [0, 8, 16, 56, 64, 80, 512, PAGE, payload + 96, payload + 192, payload + 288, layout.record_bytes()];
    for cut in ends.into_iter().flat_map(|end| [end.saturating_sub(1), end, end + 1]) {
        let cut = cut.min(layout.record_bytes());
        let mut torn = sound.clone();
        torn[last + cut..last + layout.record_bytes()].fill(0);
        let is_whole = torn == sound;
        std::fs::write(&path, torn).unwrap();
        let store = spec(&folder).open().unwrap();
        let blocks = adopt_only(&store, 1);
        assert_eq!(&blocks[..3], [(0, 0), (0, 1), (1, 0)], "cut at {cut}");
        assert_eq!(blocks.len() == 4, is_whole, "cut at {cut}");
        for (layer, block) in blocks {
            check(&fetch(&store, &SMALL, 1, layer, block).unwrap(), &SMALL, 3, layer, block);
        }
        drop(store);
    }
}

#[test]
fn a_record_with_a_flipped_bit_is_absent() {
    let layout = Layout { geometry: SMALL, blocks: 2 };
    let mut record = vec![0; layout.record_bytes()];
    layout.encode(OWNER, 1, &bytes(&SMALL, 3, 0, 1), &mut record);
    let payload = layout.entry_offset(0);
    // Padding is nobody's.
    for byte in (0..56 + 3 * 8).chain(payload..payload + SMALL.block_bytes()) {
        let mut flipped = record.clone();
        flip(&mut flipped, byte * 8 + byte % 8);
        assert_eq!(layout.decode(OWNER, 1, &flipped), None, "byte {byte}");
    }
    assert!(layout.decode(OWNER, 1, &record).is_some());
    for (owner, number) in [(OWNER, 0), (Owner { request: 4, ..OWNER }, 1), (Owner { generation: 78, ..OWNER }, 1)] {
        assert_eq!(layout.decode(owner, number, &record), None, "a record of another name");
    }
}

#[test]
fn a_head_of_a_file_with_a_flipped_bit_or_a_file_cut_short_is_refused() {
    let layout = Layout { geometry: LARGE, blocks: 2 };
    let mut page = vec![0; PAGE];
    encode_file(OWNER, &layout, &mut page);
    let len = layout.file_bytes();
    assert_eq!(decode_file(&page, len), Some((OWNER, layout)));
    assert_eq!(decode_file(&page, len - 1), None);
    for cut in 0..64 {
        assert_eq!(decode_file(&page[..cut], len), None);
    }
    for byte in 0..68 {
        let mut flipped = page.clone();
        flip(&mut flipped, byte * 8 + byte % 8);
        assert_eq!(decode_file(&flipped, len), None, "byte {byte}");
    }
}

#[test]
fn files_without_a_sound_head_go_and_files_of_others_stay() {
    let folder = folder();
    let path = left_behind(&folder);
    let copy = |name: &str| std::fs::copy(&path, folder.path().join(name)).unwrap();
    copy("notes.txt");
    // Under a name that is not its own.
    copy("0000000000000009-0000000000000009.kv");
    std::fs::write(folder.path().join("0000000000000001-0000000000000001.kv"), b"short").unwrap();
    let store = spec(&folder).open().unwrap();
    assert_eq!(store.leftovers().len(), 1);
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [path.file_name().unwrap().to_str().unwrap(), "lock", "notes.txt"]);
}

/// Leaves `requests` behind, the first one the oldest.
fn several(folder: &TempDir, requests: u64) {
    let store = spec(folder).open().unwrap();
    for request in 0..requests {
        reserve(&store, &LARGE, request, 2);
        put_all(&store, &LARGE, request, 2);
        let (file, _) = file_of(&store, request);
        settle(&store);
        let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000 + request);
        let file = OpenOptions::new().write(true).open(&file.path).unwrap();
        file.set_modified(old).unwrap();
    }
}

fn ids(store: &SsdStore) -> Vec<u64> {
    store.leftovers().iter().map(|leftover| leftover.request.0).collect()
}

#[test]
fn the_longest_unused_leftovers_make_room_and_live_requests_never() {
    let folder = folder();
    several(&folder, 4);
    let file = Layout { geometry: LARGE, blocks: 2 }.file_bytes();
    let store = Ssd { capacity: Bytes(5 * file), ..spec(&folder) }.open().unwrap();
    assert_eq!(ids(&store), [0, 1, 2, 3]);
    reserve(&store, &LARGE, 10, 2);
    assert_eq!(ids(&store), [0, 1, 2, 3], "there was room");
    put_all(&store, &LARGE, 10, 2);
    reserve(&store, &LARGE, 11, 2);
    assert_eq!(ids(&store), [1, 2, 3]);
    put_all(&store, &LARGE, 11, 2);
    let kept = store.leftovers()[1].generation;
    assert_eq!(store.adopt(kept, RequestId(12)).unwrap().len(), 4);
    (13..15).for_each(|request| reserve(&store, &LARGE, request, 2));
    assert!(ids(&store).is_empty());
    assert!(matches!(store.reserve(RequestId(15), &LARGE, 2), Reservation::Full { needed, free: 0 } if needed == file));
    [10, 11].into_iter().for_each(|request| check_all(&store, &LARGE, request, 2));
    check(&fetch(&store, &LARGE, 12, 1, 1).unwrap(), &LARGE, 2, 1, 1);
    store.folder.tidy();
    let files = std::fs::read_dir(folder.path()).unwrap().filter(|e| e.as_ref().unwrap().path().extension().is_some());
    assert_eq!(files.count(), 5, "what was evicted is gone from the disk");
}

#[test]
fn a_smaller_capacity_keeps_the_youngest() {
    let folder = folder();
    several(&folder, 4);
    let file = Layout { geometry: LARGE, blocks: 2 }.file_bytes();
    let store = Ssd { capacity: Bytes(3 * file - 1), ..spec(&folder) }.open().unwrap();
    assert_eq!(ids(&store), [2, 3]);
}

#[test]
fn leftovers_go_before_a_full_file_system_refuses() {
    let folder = folder();
    several(&folder, 2);
    let (store, device) = faulty(&spec(&folder));
    device.is_full.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(store.reserve(RequestId(9), &LARGE, 1), Reservation::TooLarge { .. }));
    assert!(ids(&store).is_empty());
}

/// Bytes at random places of a file change; what the scan takes is what was written.
#[test]
fn damaged_files_return_nothing_that_was_not_written() {
    let folder = folder();
    let path = left_behind(&folder);
    let sound = std::fs::read(&path).unwrap();
    let mut adopted = 0;
    for_all(oasis_core::testkit::fuzz_cases(60), |random| {
        std::fs::write(&path, &sound).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for _ in 0..random.within(1, 3) {
            let offset = random.below(sound.len());
            let noise: Vec<u8> = (0..random.within(1, 600)).map(|_| random.any()).collect();
            let len = noise.len().min(sound.len() - offset);
            file.write_all_at(&noise[..len], offset as u64).unwrap();
        }
        let store = spec(&folder).open().unwrap();
        if store.leftovers().is_empty() {
            return;
        }
        for (layer, block) in adopt_only(&store, 1) {
            check(&fetch(&store, &SMALL, 1, layer, block).unwrap(), &SMALL, 3, layer, block);
            adopted += 1;
        }
    });
    assert!(adopted > 0);
}
