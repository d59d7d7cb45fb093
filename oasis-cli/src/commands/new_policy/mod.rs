//! `oasis new-policy`: a crate to write a policy in.

mod workspace;

use crate::error::{CliError, CliResult};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments of `new-policy`.
#[derive(Debug, Args)]
pub struct NewPolicyArgs {
    /// What the policy decides
    #[arg(value_enum)]
    role: Template,
    /// Name of the crate and of the kind: lower-case words with hyphens, such as my-selector
    name: String,
    /// Folder to make [default: the name]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Checkout of OasisKV to build against [default: its repository, through cargo]
    #[arg(long, value_name = "FOLDER")]
    checkout: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Template {
    /// Which wanted blocks are admitted, and into which slots
    Selector,
    /// The rows that stand for a block, and a query's score with them
    Summarizer,
    /// Whose query counts, and the ranking
    Predictor,
    /// How entries reach slots
    Transport,
    /// Where the full KV lies
    Store,
}

/// Lines of the manifest inside a workspace that has no such member.
const OWN_WORKSPACE: &str = "\n# The workspace around this crate does not have it as a member.\n[workspace]\n";

macro_rules! template {
    ($file:literal) => {
        include_str!(concat!("../../../assets/new-policy/", $file, ".txt"))
    };
}

impl Template {
    /// Paths in the crate and texts.
    fn files(self) -> Vec<(&'static str, &'static str)> {
        let (library, tests) = match self {
            Self::Selector => (template!("selector.rs"), template!("selector-tests.rs")),
            Self::Summarizer => (template!("summarizer.rs"), template!("summarizer-tests.rs")),
            Self::Predictor => (template!("predictor.rs"), template!("predictor-tests.rs")),
            Self::Transport => (template!("transport.rs"), template!("transport-tests.rs")),
            Self::Store => (template!("store.rs"), template!("store-tests.rs")),
        };
        let mut files = vec![
            ("Cargo.toml", template!("Cargo.toml")),
            ("src/lib.rs", library),
            ("src/main.rs", template!("main.rs")),
            ("tests/conformance.rs", tests),
        ];
        if matches!(self, Self::Selector) {
            files.push(("src/order.cuh", template!("order.cuh")));
        }
        files
    }
}

impl Template {
    /// Lines of the manifest for crates that this role needs beyond the others'.
    fn dependencies(self) -> &'static str {
        match self {
            Self::Selector | Self::Summarizer | Self::Predictor => "",
            Self::Transport => "anyhow = \"1\"\nasync-trait = \"0.1\"\n",
            Self::Store => {
                "async-trait = \"0.1\"\nbytemuck = { version = \"1\", features = [\"extern_crate_alloc\"] }\n"
            }
        }
    }

    /// The same for tests; `cuda` says where `oasis-cuda` comes from.
    fn test_dependencies(self, cuda: &str) -> String {
        match self {
            Self::Selector => format!("oasis-cuda = {{ {cuda}, features = [\"testkit\"] }}\n"),
            Self::Summarizer | Self::Predictor | Self::Transport | Self::Store => String::new(),
        }
    }
}

/// Writes the crate.
///
/// # Errors
/// When the name is none, the folder is there, the checkout is not, or a file cannot be written.
pub fn run(args: &NewPolicyArgs, out: &mut dyn Write) -> CliResult {
    check_name(&args.name)?;
    let folder = args.folder.clone().unwrap_or_else(|| PathBuf::from(&args.name));
    if folder.exists() {
        return Err(CliError::input(
            format!("{}: expected a folder that is not there yet, found one", folder.display()),
            "--folder names another",
        ));
    }
    let dependency = |package: &str| match &args.checkout {
        None => Ok(format!("git = \"{}\"", env!("CARGO_PKG_REPOSITORY"))),
        Some(checkout) => path_dependency(&checkout.join(package)),
    };
    let [core, cli, cuda] = [dependency("oasis-core")?, dependency("oasis-cli")?, dependency("oasis-cuda")?];
    // Where it is can be told for certain only when it is there.
    std::fs::create_dir_all(&folder).map_err(|error| refused(&folder, &error))?;
    let is_stranger = folder.canonicalize().is_ok_and(|folder| workspace::is_stranger(&folder));
    let ident = args.name.replace('-', "_");
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    let replacements = [
        ("{{name}}", args.name.clone()),
        ("{{ident}}", ident),
        ("{{Type}}", args.name.split('-').map(capital).collect()),
        ("{{core}}", core),
        ("{{cli}}", cli),
        ("{{dependencies}}", args.role.dependencies().to_owned()),
        ("{{test-dependencies}}", args.role.test_dependencies(&cuda)),
        ("{{workspace}}", if is_stranger { OWN_WORKSPACE } else { "" }.to_owned()),
    ];
    for (path, text) in args.role.files() {
        let text = replacements.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
        write(&folder.join(path), &text)?;
        writeln!(out, "{}", folder.join(path).display())?;
    }
    writeln!(out, "\ncd {}", folder.display())?;
    writeln!(out, "cargo test                  # the suite of its role")?;
    writeln!(out, "cargo run --release -- list # oasis, with {}", args.name)?;
    Ok(())
}

fn write(path: &Path, text: &str) -> CliResult {
    let parent = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(parent).and_then(|()| std::fs::write(path, text)).map_err(|error| refused(path, &error))
}

fn refused(path: &Path, error: &std::io::Error) -> CliError {
    let problem = format!("{}: expected a place to write to, found: {error}", path.display());
    CliError::failure(problem, "--folder names another")
}

/// Cargo wants crate names, Rust identifiers and type names of them: `a-b2` is all three.
fn check_name(name: &str) -> CliResult {
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_lowercase())
            && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    // A kind that is there already could not be told from the new one.
    let taken = oasis_core::registry::plugins().iter().any(|plugin| plugin.kind == name);
    if name.split('-').all(is_word) && !taken && !["test", "core", "std", "oasis-core", "oasis-cli"].contains(&name) {
        return Ok(());
    }
    let found = if taken { format!("{name}, which is built in") } else { name.to_owned() };
    Err(CliError::input(
        format!("the name: expected new lower-case words with hyphens, found {found}"),
        "for example my-selector",
    ))
}

fn path_dependency(package: &Path) -> CliResult<String> {
    let manifest = package.join("Cargo.toml");
    let package = manifest.exists().then(|| package.canonicalize()).and_then(Result::ok).ok_or_else(|| {
        CliError::input(
            format!("--checkout: expected a checkout of OasisKV, found no {}", manifest.display()),
            "the folder that has oasis-core and oasis-cli",
        )
    })?;
    Ok(format!("path = {}", toml::Value::String(package.display().to_string())))
}
