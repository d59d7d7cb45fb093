//! Every environment variable that `oasis` reads.

use std::ffi::OsString;
use std::path::PathBuf;

/// Configuration file, where `--config` names none.
pub const OASIS_CONFIG: &str = "OASIS_CONFIG";
/// Log filter, such as `debug` or `oasis_core=trace`.
pub const OASIS_LOG: &str = "OASIS_LOG";
/// Address of the Hugging Face hub or a mirror of it.
pub const HF_ENDPOINT: &str = "HF_ENDPOINT";
/// Folder of downloaded models, in the layout of the Hugging Face hub.
pub const HF_HUB_CACHE: &str = "HF_HUB_CACHE";
/// Folder that holds the downloads in `hub` and the access token in `token`.
pub const HF_HOME: &str = "HF_HOME";
/// Access token of the Hugging Face hub.
pub const HF_TOKEN: &str = "HF_TOKEN";

/// What the variables are for, for `--help` and `doctor`. Variables of the form `OASIS_SECTION__KEY` set values.
pub const ALL: [(&str, &str); 7] = [
    (OASIS_CONFIG, "configuration file, where --config names none"),
    ("OASIS_<SECTION>__<KEY>", "a value, such as OASIS_SELECTOR__FETCH_RATIO=0.1"),
    (OASIS_LOG, "log filter, such as debug or oasis_core=trace"),
    (HF_ENDPOINT, "address of the Hugging Face hub or a mirror"),
    (HF_HUB_CACHE, "folder of downloaded models"),
    (HF_HOME, "folder with hub/ (downloads) and token"),
    (HF_TOKEN, "access token of the hub"),
];

/// A variable that is set and not empty.
fn var(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn text(name: &str) -> Option<String> {
    var(name).map(|value| value.to_string_lossy().into_owned())
}

/// [`OASIS_CONFIG`].
pub fn config_file() -> Option<PathBuf> {
    var(OASIS_CONFIG).map(PathBuf::from)
}

/// [`OASIS_LOG`].
pub fn log_filter() -> Option<String> {
    text(OASIS_LOG)
}

/// [`HF_ENDPOINT`].
pub fn hub_endpoint() -> Option<String> {
    text(HF_ENDPOINT)
}

/// [`HF_TOKEN`].
pub fn hub_token() -> Option<String> {
    text(HF_TOKEN)
}

/// The folder of downloaded models: [`HF_HUB_CACHE`], else `hub` in [`HF_HOME`], else `~/.cache/huggingface/hub`;
/// `None` where there is no home folder either.
pub fn hub_cache() -> Option<PathBuf> {
    var(HF_HUB_CACHE)
        .map(PathBuf::from)
        .or_else(|| var(HF_HOME).map(|home| PathBuf::from(home).join("hub")))
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/huggingface/hub")))
}

/// The file with the hub's access token: `token` in [`HF_HOME`] or in `~/.cache/huggingface`.
pub fn hub_token_file() -> Option<PathBuf> {
    var(HF_HOME)
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/huggingface")))
        .map(|folder| folder.join("token"))
}

/// All variables, for the configuration; those that are no Unicode cannot be ours.
pub fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Whether `doctor` shows a variable.
pub fn is_ours(name: &str) -> bool {
    name.starts_with("OASIS_") || ALL.iter().any(|(known, _)| *known == name)
}
