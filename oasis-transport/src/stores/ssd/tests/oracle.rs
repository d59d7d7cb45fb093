//! Random interleavings against a map.

use super::faulty::Fault;
use super::*;
use oasis_core::testkit::{Random, for_all};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::time::Duration;

/// What the store should hold: of each request its reserved blocks and the seeds of what was put.
type Oracle = HashMap<u64, (KvGeometry, usize, HashMap<(usize, usize), u64>)>;

struct Case {
    spec: Ssd,
    store: SsdStore,
    device: Arc<Faulty>,
    oracle: Oracle,
    next: u64,
    random: Random,
    leases: Vec<(FetchedEntries, KvGeometry, u64, usize, usize)>,
}

impl Case {
    fn pick(&mut self) -> Option<u64> {
        let mut requests: Vec<u64> = self.oracle.keys().copied().collect();
        requests.sort_unstable();
        (!requests.is_empty()).then(|| self.random.pick(&requests))
    }

    fn step(&mut self) {
        match self.random.below(12) {
            0 | 1 => self.reserve(),
            2..=5 => self.put(),
            6..=8 => self.fetch(),
            9 => self.release(),
            10 => self.change_faults(),
            _ if self.random.one_in(4) => self.reopen(),
            _ => self.put(),
        }
        let usage = self.store.usage();
        let layout = |(geometry, blocks, _): &(KvGeometry, usize, _)| Layout { geometry: *geometry, blocks: *blocks };
        let reserved = self.oracle.values().map(|r| layout(r).file_bytes()).sum::<u64>();
        let used = self.oracle.values().map(|r| (r.2.len() * layout(r).record_bytes()) as u64).sum::<u64>();
        assert_eq!((usage.reserved, usage.used, usage.requests), (reserved, used, self.oracle.len()));
        assert!(usage.reserved <= usage.capacity);
    }

    fn reserve(&mut self) {
        let geometry = if self.random.one_in(2) { LARGE } else { SMALL };
        let blocks = self.random.within(1, 4);
        // Now and then one that exists: it starts over.
        let request = self.pick().filter(|_| self.random.one_in(6)).unwrap_or(self.next);
        self.next += 1;
        let free = self.store.usage().capacity - self.store.usage().reserved;
        self.oracle.remove(&request);
        match self.store.reserve(RequestId(request), &geometry, blocks) {
            Reservation::Granted => {
                self.oracle.insert(request, (geometry, blocks, HashMap::new()));
            }
            Reservation::Full { needed, .. } => assert!(needed > free),
            Reservation::TooLarge { .. } => panic!("the store is large enough"),
        }
    }

    fn put(&mut self) {
        let Some(request) = self.pick() else { return };
        let (geometry, blocks, written) = &self.oracle[&request];
        let (geometry, layer, seed) = (*geometry, self.random.below(geometry.layers), self.random.any::<u64>());
        let wanted: Vec<usize> = (0..*blocks + 1).filter(|_| self.random.one_in(2)).collect();
        let is_sound = wanted.iter().all(|&block| block < *blocks && !written.contains_key(&(layer, block)));
        let contents: Vec<Vec<u8>> = wanted.iter().map(|&block| bytes(&geometry, seed, layer, block)).collect();
        let writes: Vec<_> = (wanted.iter().zip(&contents))
            .map(|(&block, bytes)| BlockWrite { block: BlockId::from(block), bytes })
            .collect();
        match block_on(self.store.put(RequestId(request), LayerId::from(layer), &writes)) {
            Ok(()) => {
                assert!(is_sound, "a wrong write was taken");
                let written = &mut self.oracle.get_mut(&request).unwrap().2;
                written.extend(wanted.into_iter().map(|block| ((layer, block), seed)));
            }
            Err(StoreError::Refused { .. }) => assert!(!is_sound, "a sound write was refused"),
            Err(StoreError::Medium { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn fetch(&mut self) {
        let Some(request) = self.pick() else { return };
        let (geometry, blocks, written) = &self.oracle[&request];
        let (geometry, layer, block) = (*geometry, self.random.below(geometry.layers), self.random.below(*blocks));
        let seed = written.get(&(layer, block)).copied();
        match fetch(&self.store, &geometry, request, layer, block) {
            Ok(entries) => {
                let seed = seed.expect("a block is readable that was not put");
                check(&entries, &geometry, seed, layer, block);
                self.leases.push((entries, geometry, seed, layer, block));
            }
            Err(StoreError::Missing(_)) => assert_eq!(seed, None, "a block is lost"),
            Err(StoreError::Medium { .. }) => assert!(seed.is_some()),
            Err(error) => panic!("{error}"),
        }
    }

    fn release(&mut self) {
        let Some(request) = self.pick() else { return };
        self.store.release(RequestId(request));
        self.oracle.remove(&request);
    }

    fn change_faults(&mut self) {
        let mut random = Random::new(self.random.any());
        let is_broken = random.one_in(3);
        self.device.plan(move |_, is_write| match random.below(8) {
            0 => Fault::Short(4096),
            1 => Fault::Slow(Duration::from_micros(300)),
            2 if !is_write => Fault::Flip(random.below(8192 * 8)),
            3 => Fault::Error(ErrorKind::Interrupted),
            4 if is_broken => Fault::Error(ErrorKind::StorageFull),
            _ => Fault::None,
        });
    }

    /// Ends well; every request that was live is adopted under its own id again.
    fn reopen(&mut self) {
        self.device.plan(|_, _| Fault::None);
        let nowhere = folder();
        let (empty, _) = faulty(&spec(&nowhere));
        drop(std::mem::replace(&mut self.store, empty));
        (self.store, self.device) = faulty(&self.spec);
        for leftover in self.store.leftovers() {
            let (geometry, blocks, written) = &self.oracle[&leftover.request.0];
            assert_eq!((leftover.geometry, leftover.blocks), (*geometry, *blocks));
            let found = self.store.adopt(leftover.generation, leftover.request).unwrap();
            assert_eq!(found.len(), written.len());
        }
        self.next += 100;
    }
}

#[test]
fn the_store_is_a_map_under_random_operations_and_faults() {
    for_all(40, |random| {
        let folder = folder();
        let io = if random.one_in(3) { SsdIo::Plain } else { SsdIo::Auto };
        let spec = Ssd { io, capacity: Bytes(1 << 20), write_buffer: Bytes(128 << 10), ..spec(&folder) };
        let (store, device) = faulty(&spec);
        let random = Random::new(random.any());
        let mut case = Case { spec, store, device, oracle: Oracle::new(), next: 0, random, leases: Vec::new() };
        (0..120).for_each(|_| case.step());
        case.device.plan(|_, _| Fault::None);
        for (request, (geometry, _, written)) in &case.oracle {
            for (&(layer, block), &seed) in written {
                let entries = fetch(&case.store, geometry, *request, layer, block).unwrap();
                check(&entries, geometry, seed, layer, block);
            }
        }
        for (entries, geometry, seed, layer, block) in &case.leases {
            check(entries, geometry, *seed, *layer, *block);
        }
    });
}
