//! The one error type of checkpoint reading: what, expected, found, hint.

use std::fmt;

/// Shorthand for results of this module.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// The four parts of every message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The thing at fault: a file, a key of one, a tensor of one.
    pub what: String,
    /// What would have been right.
    pub expected: String,
    /// What was there instead.
    pub found: String,
    /// What the user can do about it.
    pub hint: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, expected, found, hint } = self;
        write!(f, "{what}: expected {expected}, found {found} (hint: {hint})")
    }
}

/// Why a checkpoint, a tokenizer, a template or a draft head could not be used.
///
/// Every variant carries a [`Problem`], so each message names what was wrong, what was expected, what was found and
/// a hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// Nothing at that path, and no embedded model of that name.
    #[error("{0}")]
    NotFound(Box<Problem>),
    /// The operating system refused a read.
    #[error("{0}")]
    Io(Box<Problem>),
    /// Bytes that do not follow the file's format.
    #[error("{0}")]
    Malformed(Box<Problem>),
    /// A file shorter than its own header says.
    #[error("{0}")]
    Truncated(Box<Problem>),
    /// A value of config.json or of the GGUF metadata that is missing or impossible.
    #[error("{0}")]
    InvalidConfig(Box<Problem>),
    /// A well-formed checkpoint that needs arithmetic which is not implemented.
    #[error("{0}")]
    Unsupported(Box<Problem>),
    /// A tensor that the configuration calls for is absent.
    #[error("{0}")]
    MissingTensor(Box<Problem>),
    /// A tensor that the configuration does not account for.
    #[error("{0}")]
    UnexpectedTensor(Box<Problem>),
    /// A tensor of the wrong shape.
    #[error("{0}")]
    WrongShape(Box<Problem>),
    /// A tensor of an element type that cannot serve there.
    #[error("{0}")]
    WrongDtype(Box<Problem>),
    /// A draft head that does not belong to the target model.
    #[error("{0}")]
    HeadMismatch(Box<Problem>),
    /// The tokenizer is missing or cannot be built.
    #[error("{0}")]
    Tokenizer(Box<Problem>),
    /// The chat template cannot be compiled or rendered.
    #[error("{0}")]
    Template(Box<Problem>),
}

macro_rules! constructors {
    ($($name:ident => $variant:ident),* $(,)?) => {
        impl CheckpointError {
            $(pub(crate) fn $name(
                what: impl Into<String>,
                expected: impl Into<String>,
                found: impl Into<String>,
                hint: impl Into<String>,
            ) -> Self {
                Self::$variant(Box::new(Problem {
                    what: what.into(),
                    expected: expected.into(),
                    found: found.into(),
                    hint: hint.into(),
                }))
            })*

            /// The four parts of the message.
            pub fn problem(&self) -> &Problem {
                match self {
                    $(Self::$variant(problem) => problem,)*
                }
            }
        }
    };
}

constructors! {
    not_found => NotFound,
    io => Io,
    malformed => Malformed,
    truncated => Truncated,
    invalid_config => InvalidConfig,
    unsupported => Unsupported,
    missing_tensor => MissingTensor,
    unexpected_tensor => UnexpectedTensor,
    wrong_shape => WrongShape,
    wrong_dtype => WrongDtype,
    head_mismatch => HeadMismatch,
    tokenizer => Tokenizer,
    template => Template,
}
