//! The compiler's shared library, opened at run time.

use super::{CompileError, Unit};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// Environment variable that names a folder with `lib/` of NVIDIA's NVRTC wheel; the system's is not looked for then.
pub const NVRTC_DIR: &str = "OASIS_NVRTC_DIR";

/// Names of the library, newest first; those of its built-ins lie beside it.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// Folder of a CUDA toolkit that the loader may not search by itself.
const TOOLKIT: &str = "/usr/local/cuda/lib64";

type Program = *mut c_void;
/// 0 is success. A number, not an enumeration: newer libraries have more codes.
type Status = c_int;

/// The functions that are used, copied out of the library, which stays loaded as long as they do.
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    _library: Library,
}

/// The compiler.
pub struct Nvrtc {
    api: Api,
    version: String,
}

impl Nvrtc {
    /// Opens the library of [`NVRTC_DIR`], or the system's where that is not set.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] with what was searched.
    pub fn open() -> Result<Self, CompileError> {
        match std::env::var_os(NVRTC_DIR).filter(|dir| !dir.is_empty()) {
            Some(dir) => Self::open_in(Path::new(&dir)),
            None => {
                let toolkit = NAMES.iter().map(|name| Path::new(TOOLKIT).join(name));
                let library = NAMES.iter().map(PathBuf::from).chain(toolkit).find_map(|name| load(&name));
                Self::of(library, || format!("the system's library folders and {TOOLKIT} ({NVRTC_DIR} is not set)"))
            }
        }
    }

    /// Opens the library in `dir`, which holds `lib/`.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`].
    pub fn open_in(dir: &Path) -> Result<Self, CompileError> {
        let folder = dir.join("lib");
        // The compiler asks for its built-ins by name alone: have them loaded already.
        for file in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
                std::mem::forget(load(&file.path()));
            }
        }
        let library = NAMES.iter().find_map(|name| load(&folder.join(name)));
        Self::of(library, || folder.display().to_string())
    }

    fn of(library: Option<Library>, searched: impl Fn() -> String) -> Result<Self, CompileError> {
        let library = library.ok_or_else(|| CompileError::NoCompiler { searched: searched() })?;
        let api = Api::of(library)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let status = unsafe { (api.version)(&raw mut major, &raw mut minor) };
        api.check("nvrtcVersion", status)?;
        Ok(Self { api, version: format!("{major}.{minor}") })
    }

    /// Version, such as `13.0`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Compiles to a CUBIN; gives the image and the log.
    pub(super) fn compile(&self, unit: &Unit, options: &[String]) -> Result<(Vec<u8>, String), CompileError> {
        let source = c_string(unit.source.text)?;
        let name = c_string(&unit.source.name)?;
        let texts = unit.headers.iter().map(|file| c_string(file.text)).collect::<Result<Vec<_>, _>>()?;
        let names = unit.headers.iter().map(|file| c_string(&file.name)).collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (text_pointers, name_pointers) = (pointers(&texts), pointers(&names));

        let mut program = std::ptr::null_mut();
        // SAFETY: all strings and arrays outlive the call, which copies them; the arrays have `headers` elements each.
        let status = unsafe {
            (self.api.create)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                texts.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        self.api.check("nvrtcCreateProgram", status)?;
        let program = Guard { api: &self.api, program };
        let option_pointers = pointers(&options);
        // SAFETY: the program lives, and the options outlive the call.
        let status = unsafe { (self.api.compile)(program.program, options.len() as c_int, option_pointers.as_ptr()) };
        let log = program.log()?;
        if status != 0 {
            return Err(CompileError::Rejected { file: unit.source.name.clone(), log });
        }
        Ok((program.cubin()?, log))
    }
}

/// A program that is destroyed at the end of its scope.
struct Guard<'a> {
    api: &'a Api,
    program: Program,
}

impl Guard<'_> {
    fn log(&self) -> Result<String, CompileError> {
        let bytes = self.read("nvrtcGetProgramLog", self.api.log_size, self.api.log)?;
        let text =
            CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::from_utf8_lossy(&bytes), CStr::to_string_lossy);
        Ok(text.trim_end().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CompileError> {
        self.read("nvrtcGetCUBIN", self.api.cubin_size, self.api.cubin)
    }

    fn read(
        &self,
        operation: &'static str,
        size_of: unsafe extern "C" fn(Program, *mut usize) -> Status,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, CompileError> {
        let mut size = 0;
        // SAFETY: the program lives; the pointer is to a live integer.
        self.api.check(operation, unsafe { size_of(self.program, &raw mut size) })?;
        let mut bytes = vec![0_u8; size];
        // SAFETY: the library writes `size` bytes, which is what the buffer has.
        self.api.check(operation, unsafe { read(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created and is destroyed once.
        unsafe { (self.api.destroy)(&raw mut self.program) };
    }
}

impl Api {
    fn of(library: Library) -> Result<Self, CompileError> {
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.1.
                *unsafe { library.get($name) }.map_err(|error| CompileError::Failed {
                    operation: "loading libnvrtc",
                    problem: error.to_string(),
                })?
            };
        }
        Ok(Self {
            version: function!(b"nvrtcVersion\0"),
            error_string: function!(b"nvrtcGetErrorString\0"),
            create: function!(b"nvrtcCreateProgram\0"),
            destroy: function!(b"nvrtcDestroyProgram\0"),
            compile: function!(b"nvrtcCompileProgram\0"),
            log_size: function!(b"nvrtcGetProgramLogSize\0"),
            log: function!(b"nvrtcGetProgramLog\0"),
            cubin_size: function!(b"nvrtcGetCUBINSize\0"),
            cubin: function!(b"nvrtcGetCUBIN\0"),
            _library: library,
        })
    }

    fn check(&self, operation: &'static str, status: Status) -> Result<(), CompileError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library gives a static string for every number.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(CompileError::Failed { operation, problem: text.to_string_lossy().into_owned() })
    }
}

fn load(path: &Path) -> Option<Library> {
    // SAFETY: NVIDIA's library runs nothing but its own initialisers.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.ok()
}

fn c_string(text: &str) -> Result<CString, CompileError> {
    CString::new(text).map_err(|error| CompileError::Failed {
        operation: "nvrtcCreateProgram",
        problem: format!("the source holds a zero byte at {}", error.nul_position()),
    })
}
