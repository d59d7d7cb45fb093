//! The part of UCP's C interface that this crate calls, after the headers of UCX 1.13.1 (`ucp/api/ucp.h`,
//! `ucp/api/ucp_def.h`, `ucs/type/status.h`). Structures grow at their end only, and `field_mask` says what is filled in,
//! so the same declarations serve later releases of the major version.
#![allow(non_camel_case_types)]

use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Version of the interface that is asked for; the library checks that it still offers it.
pub const API_MAJOR: c_uint = 1;
pub const API_MINOR: c_uint = 13;

/// `ucs_status_t`, an enumeration packed into one byte.
pub type Status = i8;
pub const OK: Status = 0;
pub const IN_PROGRESS: Status = 1;
pub const ERR_BUSY: Status = -15;
const ERR_LAST: isize = -100;

/// `ucs_status_ptr_t`: null when done, a small negative number for an error, else a request.
pub type StatusPtr = *mut c_void;

/// What a call that may go on has answered.
pub enum Posted {
    Done,
    Pending,
    Failed(Status),
}

/// Reads a [`StatusPtr`].
pub fn posted(answer: StatusPtr) -> Posted {
    match answer as isize {
        0 => Posted::Done,
        // The range of errors fits a byte.
        error @ ERR_LAST..0 => Posted::Failed(error as Status),
        _ => Posted::Pending,
    }
}

macro_rules! handles {
    ($($name:ident)*) => { $(pub type $name = *mut c_void;)* };
}
handles! { ucp_config_h ucp_context_h ucp_worker_h ucp_ep_h ucp_mem_h ucp_rkey_h }

pub const PARAM_FEATURES: u64 = 1;
pub const FEATURE_RMA: u64 = 2;
pub const FEATURE_WAKEUP: u64 = 16;
pub const WORKER_PARAM_THREAD_MODE: u64 = 1;
pub const THREAD_MODE_SINGLE: c_uint = 0;
pub const WORKER_ATTR_ADDRESS: u64 = 2;
pub const MEM_MAP_ADDRESS: u64 = 1;
pub const MEM_MAP_LENGTH: u64 = 2;
pub const MEM_MAP_PROT: u64 = 8;
pub const PROT_LOCAL_READ: c_uint = 1;
pub const PROT_LOCAL_WRITE: c_uint = 2;
pub const PROT_REMOTE_READ: c_uint = 256;
pub const EP_REMOTE_ADDRESS: u64 = 1;
pub const EP_ERR_HANDLING_MODE: u64 = 2;
pub const EP_ERR_HANDLER: u64 = 4;
pub const ERR_HANDLING_MODE_PEER: c_uint = 1;
pub const EP_CLOSE_FORCE: u32 = 1;
pub const OP_CALLBACK: u32 = 2;
pub const OP_USER_DATA: u32 = 4;
pub const OP_FLAGS: u32 = 16;
pub const OP_MEMH: u32 = 256;
pub const OP_MULTI_SEND: u32 = 1 << 19;

/// `ucp_send_nbx_callback_t`: request, status, user data.
pub type SendCallback = unsafe extern "C" fn(*mut c_void, Status, *mut c_void);
/// `ucp_err_handler_cb_t`: argument, endpoint, status.
pub type ErrorCallback = unsafe extern "C" fn(*mut c_void, ucp_ep_h, Status);

#[repr(C)]
pub struct ucp_params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

#[repr(C)]
pub struct ucp_worker_params {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; 16],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

#[repr(C)]
pub struct ucp_worker_attr {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub address_flags: u32,
    pub address: *mut c_void,
    pub address_length: usize,
    pub max_am_header: usize,
    pub name: [c_char; 32],
    pub max_debug_string: usize,
}

#[repr(C)]
pub struct ucp_mem_map_params {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
}

#[repr(C)]
pub struct ucs_sock_addr {
    pub addr: *const c_void,
    pub addrlen: u32,
}

#[repr(C)]
pub struct ucp_err_handler {
    pub cb: Option<ErrorCallback>,
    pub arg: *mut c_void,
}

#[repr(C)]
pub struct ucp_ep_params {
    pub field_mask: u64,
    pub address: *const c_void,
    pub err_mode: c_uint,
    pub err_handler: ucp_err_handler,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr,
}

#[repr(C)]
pub struct ucp_request_param {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    /// A union of function pointers in C.
    pub cb: Option<SendCallback>,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    /// A union of pointers in C.
    pub recv_info: *mut c_void,
    pub memh: ucp_mem_h,
}

/// Structures of which all bytes may be zero.
///
/// # Safety
/// Every field is a number, an array of numbers, a pointer that may be null, or an optional function.
pub unsafe trait Zeroed: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementer's promise.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! layout {
    ($($name:ident: $size:literal { $($field:ident @ $offset:literal),* })*) => { $(
        // SAFETY: see the fields above.
        unsafe impl Zeroed for $name {}
        const _: () = {
            assert!(size_of::<$name>() == $size);
            assert!(align_of::<$name>() == 8);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    )* };
}

// Sizes and offsets that a C compiler gives on 64-bit machines.
#[cfg(target_pointer_width = "64")]
layout! {
    ucp_params: 80 {
        field_mask @ 0, features @ 8, request_size @ 16, request_init @ 24, request_cleanup @ 32, tag_sender_mask @ 40,
        mt_workers_shared @ 48, estimated_num_eps @ 56, estimated_num_ppn @ 64, name @ 72
    }
    ucp_worker_params: 200 {
        field_mask @ 0, thread_mode @ 8, cpu_mask @ 16, events @ 144, user_data @ 152, event_fd @ 160, flags @ 168,
        name @ 176, am_alignment @ 184, client_id @ 192
    }
    ucp_worker_attr: 80 {
        field_mask @ 0, thread_mode @ 8, address_flags @ 12, address @ 16, address_length @ 24, max_am_header @ 32,
        name @ 40, max_debug_string @ 72
    }
    ucp_mem_map_params: 40 {
        field_mask @ 0, address @ 8, length @ 16, flags @ 24, prot @ 28, memory_type @ 32
    }
    ucp_ep_params: 104 {
        field_mask @ 0, address @ 8, err_mode @ 16, err_handler @ 24, user_data @ 40, flags @ 48, sockaddr @ 56,
        conn_request @ 72, name @ 80, local_sockaddr @ 88
    }
    ucp_request_param: 72 {
        op_attr_mask @ 0, flags @ 4, request @ 8, cb @ 16, datatype @ 24, user_data @ 32, reply_buffer @ 40,
        memory_type @ 48, recv_info @ 56, memh @ 64
    }
}

macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $answer:ty)?;)*) => {
        /// Functions of an opened library.
        pub struct Ucp {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $answer)?,)*
            // The functions are its.
            _library: Library,
        }

        impl Ucp {
            /// Finds every function in `library`.
            ///
            /// # Safety
            /// The library is UCX's libucp.
            ///
            /// # Errors
            /// Names the first function that is not there.
            pub unsafe fn new(library: Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the caller says whose functions these are; their types are those of its headers.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    ucs_status_string(Status) -> *const c_char;
    ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
    ucp_config_read(*const c_char, *const c_char, *mut ucp_config_h) -> Status;
    ucp_config_modify(ucp_config_h, *const c_char, *const c_char) -> Status;
    ucp_config_release(ucp_config_h);
    ucp_init_version(c_uint, c_uint, *const ucp_params, ucp_config_h, *mut ucp_context_h) -> Status;
    ucp_cleanup(ucp_context_h);
    ucp_worker_create(ucp_context_h, *const ucp_worker_params, *mut ucp_worker_h) -> Status;
    ucp_worker_destroy(ucp_worker_h);
    ucp_worker_query(ucp_worker_h, *mut ucp_worker_attr) -> Status;
    ucp_worker_release_address(ucp_worker_h, *mut c_void);
    ucp_worker_get_efd(ucp_worker_h, *mut c_int) -> Status;
    ucp_worker_arm(ucp_worker_h) -> Status;
    ucp_worker_progress(ucp_worker_h) -> c_uint;
    ucp_mem_map(ucp_context_h, *const ucp_mem_map_params, *mut ucp_mem_h) -> Status;
    ucp_mem_unmap(ucp_context_h, ucp_mem_h) -> Status;
    ucp_rkey_pack(ucp_context_h, ucp_mem_h, *mut *mut c_void, *mut usize) -> Status;
    ucp_rkey_buffer_release(*mut c_void);
    ucp_ep_create(ucp_worker_h, *const ucp_ep_params, *mut ucp_ep_h) -> Status;
    ucp_ep_close_nbx(ucp_ep_h, *const ucp_request_param) -> StatusPtr;
    ucp_ep_rkey_unpack(ucp_ep_h, *const c_void, *mut ucp_rkey_h) -> Status;
    ucp_rkey_destroy(ucp_rkey_h);
    ucp_get_nbx(ucp_ep_h, *mut c_void, usize, u64, ucp_rkey_h, *const ucp_request_param) -> StatusPtr;
    ucp_request_check_status(*mut c_void) -> Status;
    ucp_request_free(*mut c_void);
}
