//! Whether cargo would take a new crate for a part of a workspace around it.

use std::path::{Component, Path};
use toml::{Table, Value};

/// Whether a folder above `folder`, which is absolute, is a workspace that does not have it as a member. Cargo refuses a
/// crate there unless it is a workspace of its own.
pub fn is_stranger(folder: &Path) -> bool {
    let workspace = |above: &Path| -> Option<bool> {
        let manifest: Table = std::fs::read_to_string(above.join("Cargo.toml")).ok()?.parse().ok()?;
        let members = manifest.get("workspace")?.get("members").and_then(Value::as_array).cloned().unwrap_or_default();
        let path = folder.strip_prefix(above).ok()?;
        Some(!members.iter().filter_map(Value::as_str).any(|member| is_member(member, path)))
    };
    folder.ancestors().skip(1).find_map(workspace).unwrap_or(false)
}

/// Whether a path is what an entry of `members` names, with `*` for any part of a component.
fn is_member(member: &str, path: &Path) -> bool {
    let parts = |path: &Path| -> Vec<String> {
        let named = path.components().filter(|part| *part != Component::CurDir);
        named.map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
    };
    let (patterns, names) = (parts(Path::new(member)), parts(path));
    patterns.len() == names.len() && patterns.iter().zip(&names).all(|(pattern, name)| fits(pattern, name))
}

fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name.strip_prefix(head).is_some_and(|name| {
            name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| fits(rest, &name[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_named_with_stars_within_a_component() {
        for (member, path, expected) in [
            ("policies/*", "policies/mine", true),
            ("./policies/my-*", "policies/my-selector", true),
            ("p*-*r", "policies/mine", false),
            ("*-*r", "my-own-selector", true),
            ("policies/*", "policies", false),
            ("policies/*", "policies/a/b", false),
            ("mine", "mine", true),
            ("mine", "mine2", false),
        ] {
            assert_eq!(is_member(member, Path::new(path)), expected, "{member} {path}");
        }
    }
}
