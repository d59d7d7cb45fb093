//! The thread that owns UCX's worker.

mod endpoint;
mod operation;

use crate::descriptor::Descriptor;
use crate::error::{ReadError, Unavailable};
use crate::memory::Region;
use crate::settings::{Access, Settings, Wire};
use crate::sys::{self, Status, Ucp, Zeroed};
use crate::wait::{self, Ear, Sleeper};
use endpoint::Endpoint;
pub use operation::Operation;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Longest time that the end of an engine waits for what is in flight.
const FAREWELL: Duration = Duration::from_secs(2);

/// What the engine is asked for.
pub enum Command {
    Register { region: Arc<Region>, access: Access, reply: Sender<Result<Descriptor, Unavailable>> },
    Connect { descriptor: Descriptor, reply: oneshot::Sender<Result<u64, ReadError>> },
    Read(Operation),
    Close { peer: u64, reply: oneshot::Sender<()> },
    Stop,
}

/// UCX's words for a status.
fn words(ucp: &Ucp, status: Status) -> String {
    // SAFETY: UCX gives a static text for every number.
    let text = unsafe { CStr::from_ptr((ucp.ucs_status_string)(status)) };
    format!("{} ({status})", text.to_string_lossy())
}

/// Runs an engine until it is told to stop, or its last handle is gone.
pub fn run(
    ucp: Ucp,
    version: [u32; 3],
    settings: &Settings,
    ear: Ear,
    queue: &Receiver<Command>,
    started: &Sender<Result<(), Unavailable>>,
) {
    match Worker::new(ucp, version, settings) {
        Ok(mut worker) => {
            let mut sleeper = Sleeper::new(ear, worker.events);
            // Whoever started it waits for this.
            let _ = started.send(Ok(()));
            worker.serve(queue, &mut sleeper);
            worker.finish();
        }
        Err(error) => drop(started.send(Err(error))),
    }
}

struct Registered {
    memh: sys::ucp_mem_h,
    /// Held until it is taken off the network.
    region: Arc<Region>,
}

struct Worker {
    ucp: Ucp,
    version: (u32, u32),
    context: sys::ucp_context_h,
    worker: sys::ucp_worker_h,
    /// Where peers reach it.
    address: Vec<u8>,
    /// File descriptor that becomes readable when there is something to do.
    events: i32,
    registered: Vec<Registered>,
    endpoints: HashMap<u64, Endpoint>,
    operations: Vec<Operation>,
    next_peer: u64,
}

impl Worker {
    fn new(ucp: Ucp, version: [u32; 3], settings: &Settings) -> Result<Self, Unavailable> {
        let context = context(&ucp, settings)?;
        let unavailable = |status| Unavailable {
            what: "UCX".to_owned(),
            expected: "a worker".to_owned(),
            found: words(&ucp, status),
            hint: "UCX_LOG_LEVEL=info prints what UCX tries".to_owned(),
        };
        let (mut worker, mut events) = (null_mut(), -1);
        let mut params = sys::ucp_worker_params::zeroed();
        (params.field_mask, params.thread_mode) = (sys::WORKER_PARAM_THREAD_MODE, sys::THREAD_MODE_SINGLE);
        // SAFETY: the context is open; mode SINGLE means this thread, where the worker stays.
        let mut status = unsafe { (ucp.ucp_worker_create)(context, &params, &mut worker) };
        if status != sys::OK {
            let error = unavailable(status);
            // SAFETY: the context has no worker.
            unsafe { (ucp.ucp_cleanup)(context) };
            return Err(error);
        }
        let mut attr = sys::ucp_worker_attr::zeroed();
        attr.field_mask = sys::WORKER_ATTR_ADDRESS;
        let mut address = Vec::new();
        // SAFETY: the worker is open; the address is UCX's until it is released, and as long as it says.
        unsafe {
            status = (ucp.ucp_worker_query)(worker, &mut attr);
            if status == sys::OK {
                address = std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length).to_vec();
                (ucp.ucp_worker_release_address)(worker, attr.address);
                status = (ucp.ucp_worker_get_efd)(worker, &mut events);
            }
        }
        let error = (status != sys::OK).then(|| unavailable(status));
        let (registered, endpoints, operations) = (Vec::new(), HashMap::new(), Vec::new());
        let version = (version[0], version[1]);
        let next_peer = 1;
        let this =
            Self { ucp, version, context, worker, address, events, registered, endpoints, operations, next_peer };
        match error {
            None => Ok(this),
            Some(error) => {
                this.finish();
                Err(error)
            }
        }
    }

    fn serve(&mut self, queue: &Receiver<Command>, sleeper: &mut Sleeper) {
        let mut last_busy = Instant::now();
        loop {
            let mut busy = false;
            loop {
                match queue.try_recv() {
                    Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.obey(command),
                    Err(TryRecvError::Empty) => break,
                }
                busy = true;
            }
            // SAFETY: the worker is open and this is its thread.
            busy |= unsafe { (self.ucp.ucp_worker_progress)(self.worker) } != 0;
            busy |= self.advance();
            if busy {
                last_busy = Instant::now();
            } else if last_busy.elapsed() < wait::SPIN {
                std::hint::spin_loop();
            // SAFETY: as above. BUSY means that something has come since, and that nothing would wake us for it.
            } else if unsafe { (self.ucp.ucp_worker_arm)(self.worker) } != sys::ERR_BUSY {
                let in_flight = !self.operations.is_empty() || self.endpoints.values().any(Endpoint::is_closing);
                sleeper.sleep(if in_flight { wait::IN_FLIGHT } else { wait::IDLE });
            }
        }
    }

    fn obey(&mut self, command: Command) {
        // Who has gone without its answer has given the matter up.
        match command {
            Command::Register { region, access, reply } => drop(reply.send(self.register(region, access))),
            Command::Connect { descriptor, reply } => drop(reply.send(self.connect(&descriptor))),
            Command::Read(operation) => self.begin(operation),
            Command::Close { peer, reply } => match self.endpoints.get_mut(&peer) {
                Some(endpoint) => {
                    endpoint.when_closed.push(reply);
                    endpoint.close(&self.ucp, ReadError::Closed);
                }
                None => drop(reply.send(())),
            },
            // Seen by the loop.
            Command::Stop => {}
        }
    }

    fn register(&mut self, region: Arc<Region>, access: Access) -> Result<Descriptor, Unavailable> {
        let mut params = sys::ucp_mem_map_params::zeroed();
        params.field_mask = sys::MEM_MAP_ADDRESS | sys::MEM_MAP_LENGTH | sys::MEM_MAP_PROT;
        params.address = region.base().cast();
        params.length = region.len();
        params.prot = sys::PROT_LOCAL_READ | sys::PROT_LOCAL_WRITE;
        if access == Access::Lent {
            params.prot |= sys::PROT_REMOTE_READ;
        }
        let unavailable = |status| Unavailable {
            what: "UCX".to_owned(),
            expected: format!("{} MiB of memory to be registered", region.len() >> 20),
            found: words(&self.ucp, status),
            hint: "adapters need pinned memory: raise the limit (ulimit -l unlimited), or lower store.capacity"
                .to_owned(),
        };
        let mut memh = null_mut();
        // SAFETY: the region's memory stays until `finish` has unmapped it, since `registered` holds it.
        let status = unsafe { (self.ucp.ucp_mem_map)(self.context, &params, &mut memh) };
        if status != sys::OK {
            return Err(unavailable(status));
        }
        let (mut key, mut key_len) = (null_mut(), 0);
        // SAFETY: the memory was mapped in this context; the key is UCX's until it is released, and as long as it says.
        let remote_key = unsafe {
            let status = (self.ucp.ucp_rkey_pack)(self.context, memh, &mut key, &mut key_len);
            if status != sys::OK {
                (self.ucp.ucp_mem_unmap)(self.context, memh);
                return Err(unavailable(status));
            }
            let bytes = std::slice::from_raw_parts(key.cast::<u8>(), key_len).to_vec();
            (self.ucp.ucp_rkey_buffer_release)(key);
            bytes
        };
        let (base, len) = (region.base() as u64, region.len() as u64);
        self.registered.push(Registered { memh, region });
        Ok(Descriptor { version: self.version, worker_address: self.address.clone(), remote_key, base, len })
    }

    fn connect(&mut self, descriptor: &Descriptor) -> Result<u64, ReadError> {
        let endpoint = Endpoint::open(&self.ucp, self.worker, descriptor)?;
        let peer = self.next_peer;
        self.next_peer += 1;
        self.endpoints.insert(peer, endpoint);
        Ok(peer)
    }

    fn begin(&mut self, mut operation: Operation) {
        let refused = match self.endpoints.get(&operation.peer()) {
            None => Some(ReadError::Closed),
            Some(endpoint) => endpoint.refusal(&self.ucp),
        };
        let registered = self.registered.iter().find(|r| Arc::ptr_eq(&r.region, operation.region()));
        match (refused, registered) {
            (Some(error), _) => operation.answer(Err(error)),
            (None, None) => operation.answer(Err(ReadError::ForeignBuffer)),
            (None, Some(Registered { memh, .. })) => {
                operation.start(*memh);
                self.operations.push(operation);
            }
        }
    }

    /// Posts what may be posted, and ends what has ended; tells whether anything has changed.
    fn advance(&mut self) -> bool {
        let Self { ucp, endpoints, operations, .. } = self;
        let mut changed = false;
        for endpoint in endpoints.values_mut() {
            changed |= endpoint.advance(ucp);
        }
        operations.retain_mut(|operation| {
            let endpoint = endpoints.get_mut(&operation.peer());
            let (has_changed, stays) = operation.advance(ucp, endpoint);
            changed |= has_changed;
            stays
        });
        endpoints.retain(|_, endpoint| !endpoint.is_forgotten());
        changed
    }

    /// Closes everything. What is not back by then is written by nobody any more once the worker is gone.
    fn finish(mut self) {
        for endpoint in self.endpoints.values_mut() {
            endpoint.close(&self.ucp, ReadError::Stopped);
        }
        let start = Instant::now();
        let is_open = |this: &Self| !this.operations.is_empty() || this.endpoints.values().any(Endpoint::is_closing);
        while is_open(&self) && start.elapsed() < FAREWELL {
            // SAFETY: the worker is open and this is its thread.
            unsafe { (self.ucp.ucp_worker_progress)(self.worker) };
            self.advance();
        }
        // SAFETY: the order that UCX asks for; each is destroyed once. Regions are dropped after this, with `self`.
        unsafe {
            (self.ucp.ucp_worker_destroy)(self.worker);
            for Registered { memh, .. } in &self.registered {
                (self.ucp.ucp_mem_unmap)(self.context, *memh);
            }
            (self.ucp.ucp_cleanup)(self.context);
        }
    }
}

/// Opens UCX with the settings' transports; the environment wins over them.
fn context(ucp: &Ucp, settings: &Settings) -> Result<sys::ucp_context_h, Unavailable> {
    let (transports, device) = match settings.wire {
        Wire::Rdma => ("rc", settings.device.as_deref()),
        // The owner's CPU serves reads without checks of its own: not beyond this machine unless told.
        Wire::Tcp => ("tcp", settings.device.as_deref().or(Some("lo"))),
    };
    let unavailable = |found: String| Unavailable {
        what: "UCX".to_owned(),
        expected: format!("its transports `{transports}` on {}", device.unwrap_or("any adapter")),
        found,
        hint: "UCX_LOG_LEVEL=info prints what UCX tries; nodes.ucx_device names the adapter; containers need \
               /dev/infiniband"
            .to_owned(),
    };
    let mut config = null_mut();
    // SAFETY: no prefix and no file; the configuration is written.
    let status = unsafe { (ucp.ucp_config_read)(null(), null(), &mut config) };
    if status != sys::OK {
        return Err(unavailable(words(ucp, status)));
    }
    let mut problem = None;
    for (name, value) in [("TLS", Some(transports)), ("NET_DEVICES", device)] {
        let Some(value) = value.filter(|_| std::env::var_os(format!("UCX_{name}")).is_none()) else { continue };
        let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else {
            problem = Some("a name with a zero byte".to_owned());
            continue;
        };
        // SAFETY: the configuration is open, and UCX copies both texts.
        let status = unsafe { (ucp.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
        if status != sys::OK {
            problem = Some(words(ucp, status));
        }
    }
    let mut params = sys::ucp_params::zeroed();
    (params.field_mask, params.features) = (sys::PARAM_FEATURES, sys::FEATURE_RMA | sys::FEATURE_WAKEUP);
    let mut context = null_mut();
    // SAFETY: the version is that of these declarations, which UCX checks; the configuration is released once.
    let status = unsafe {
        let status = match problem {
            None => (ucp.ucp_init_version)(sys::API_MAJOR, sys::API_MINOR, &params, config, &mut context),
            Some(_) => sys::OK,
        };
        (ucp.ucp_config_release)(config);
        status
    };
    match problem {
        Some(problem) => Err(unavailable(problem)),
        None if status != sys::OK => Err(unavailable(words(ucp, status))),
        None => Ok(context),
    }
}
