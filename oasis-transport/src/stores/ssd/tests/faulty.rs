//! A device that fails as told.

use crate::disk::{Completion, Device, Memory, Op, PAGE, PagePool, Transfer};
use oasis_core::memory::HostBytes;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to one transfer.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    None,
    /// Only this many bytes move, and the device says so.
    Short(usize),
    /// Only this many bytes are written, and the device says that it was all.
    Torn(usize),
    /// A bit of what is read or written flips.
    Flip(usize),
    /// Nothing moves.
    Error(io::ErrorKind),
    /// It takes this long.
    Slow(Duration),
    /// It waits for [`Faulty::let_go`].
    Held,
    /// It is done at once, but nobody is told before [`Faulty::let_go`].
    Untold,
}

/// What goes on when it is let go.
type Held = Mutex<VecDeque<Box<dyn FnOnce() + Send>>>;

type Plan = Box<dyn FnMut(&Transfer, bool) -> Fault + Send>;

pub struct Faulty {
    inner: Arc<dyn Device>,
    plan: Mutex<Plan>,
    held: Arc<Held>,
    /// Files cannot be made.
    pub is_full: AtomicBool,
    /// Offset and length of each transfer.
    pub log: Mutex<Vec<(u64, usize)>>,
}

impl Faulty {
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let plan: Plan = Box::new(|_, _| Fault::None);
        Self {
            inner,
            plan: Mutex::new(plan),
            held: Arc::default(),
            is_full: AtomicBool::new(false),
            log: Mutex::default(),
        }
    }

    /// Decides from now on; `true` means a write.
    pub fn plan(&self, plan: impl FnMut(&Transfer, bool) -> Fault + Send + 'static) {
        *self.plan.lock().unwrap() = Box::new(plan);
    }

    /// Reads or writes fail so, the others do not.
    pub fn plan_for(&self, writes: bool, fault: Fault) {
        self.plan(move |_, is_write| if is_write == writes { fault } else { Fault::None });
    }

    pub fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Lets all go on that is held.
    pub fn let_go(&self) {
        while self.let_one_go() {}
    }

    /// Lets go on what was held first; `false` when nothing is.
    pub fn let_one_go(&self) -> bool {
        let first = self.held.lock().unwrap().pop_front();
        first.map(|go_on| go_on()).is_some()
    }

    fn run(&self, mut op: Op, fault: Fault) {
        let transfer = &mut op.transfer;
        let Transfer { file, offset, moved, memory } = &*transfer;
        let at = offset + *moved as u64;
        match (fault, memory) {
            (Fault::None, _) => self.inner.submit(vec![op]),
            (Fault::Short(len) | Fault::Torn(len), Memory::Write(pages)) => {
                let new = &pages.bytes()[*moved..];
                let len = len.min(new.len());
                write_front(file, at, new, len);
                let told = if matches!(fault, Fault::Torn(_)) { new.len() } else { len };
                op.completion.complete(op.transfer, Ok(told));
            }
            (Fault::Flip(bit), Memory::Write(pages)) => {
                let mut flipped = PagePool::new(0).block(pages.bytes());
                flip(flipped.bytes_mut(), bit);
                op.transfer.memory = Memory::Write(Arc::new(flipped));
                self.inner.submit(vec![op]);
            }
            (Fault::Short(_) | Fault::Torn(_) | Fault::Flip(_), Memory::Read(_)) => {
                let completion = Box::new(Spoiled { fault, inner: op.completion });
                self.inner.submit(vec![Op { completion, ..op }]);
            }
            (Fault::Error(kind), _) => op.completion.complete(op.transfer, Err(kind.into())),
            (Fault::Slow(time), _) => {
                let inner = self.inner.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(time);
                    inner.submit(vec![op]);
                });
            }
            (Fault::Held, _) => {
                let inner = self.inner.clone();
                self.held.lock().unwrap().push_back(Box::new(move || inner.submit(vec![op])));
            }
            (Fault::Untold, _) => {
                let completion = Box::new(Untold { held: self.held.clone(), inner: op.completion });
                self.inner.submit(vec![Op { completion, ..op }]);
            }
        }
    }
}

/// Writes the first `len` bytes of `new`; what stood behind stays.
fn write_front(file: &File, offset: u64, new: &[u8], len: usize) {
    let mut mixed = PagePool::new(0).take(new.len());
    file.read_exact_at(mixed.bytes_mut(), offset).unwrap();
    mixed.bytes_mut()[..len].copy_from_slice(&new[..len]);
    file.write_all_at(mixed.bytes(), offset).unwrap();
}

pub fn flip(bytes: &mut [u8], bit: usize) {
    let len = bytes.len();
    bytes[bit / 8 % len] ^= 1 << (bit % 8);
}

impl Device for Faulty {
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }

    fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let is_write = matches!(op.transfer.memory, Memory::Write(_));
            self.log.lock().unwrap().push((op.transfer.offset, op.transfer.memory.len()));
            let fault = (self.plan.lock().unwrap())(&op.transfer, is_write);
            self.run(op, fault);
        }
    }

    fn create(&self, path: &Path, len: u64) -> io::Result<File> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.create(path, len)
    }
}

/// A transfer whose end is held.
struct Untold {
    held: Arc<Held>,
    inner: Box<dyn Completion>,
}

impl Completion for Untold {
    fn is_wanted(&self) -> bool {
        self.inner.is_wanted()
    }

    fn complete(self: Box<Self>, transfer: Transfer, result: io::Result<usize>) {
        let Self { held, inner } = *self;
        held.lock().unwrap().push_back(Box::new(move || inner.complete(transfer, result)));
    }
}

/// A read of which less, or something else, arrives.
struct Spoiled {
    fault: Fault,
    inner: Box<dyn Completion>,
}

impl Completion for Spoiled {
    fn is_wanted(&self) -> bool {
        self.inner.is_wanted()
    }

    fn complete(self: Box<Self>, mut transfer: Transfer, result: io::Result<usize>) {
        let Memory::Read(pages) = &mut transfer.memory else { unreachable!("writes are spoiled before") };
        let bytes = &mut pages.bytes_mut()[transfer.moved..];
        let result = match self.fault {
            Fault::Short(len) => result.map(|moved| {
                let len = len.min(moved);
                bytes[len..].fill(0xa5);
                len
            }),
            Fault::Torn(len) => {
                let len = len.min(bytes.len() / PAGE * PAGE);
                bytes[len..].fill(0);
                result
            }
            Fault::Flip(bit) => {
                flip(bytes, bit);
                result
            }
            _ => result,
        };
        self.inner.complete(transfer, result);
    }
}
