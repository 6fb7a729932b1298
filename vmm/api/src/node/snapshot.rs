//! Snapshots in the node daemon's store.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The longest name of a snapshot, in bytes.
const SNAPSHOT_NAME_MAX: usize = 64;

name! {
    /// The name of a snapshot: 1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first.
    /// So it is the name of a file and no path.
    SnapshotName, BadSnapshotName, |text| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let begins = text.starts_with(|first: char| first.is_ascii_alphanumeric());
        begins && text.len() <= SNAPSHOT_NAME_MAX && text.bytes().all(known)
    }
}

/// A text that is not a snapshot's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a snapshot's name has 1 to {SNAPSHOT_NAME_MAX} letters, digits, dots, underscores or hyphens, \
     and begins with a letter or digit"
)]
pub struct BadSnapshotName;

/// Where to write a snapshot: exactly one of `name` and `path`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSnapshotRequest {
    /// Its name in the daemon's store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub name: Option<SnapshotName>,
    /// A new directory elsewhere, as an absolute path. The daemon neither lists nor restores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
}

/// A snapshot in the daemon's store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Its name.
    #[schema(value_type = String)]
    pub name: SnapshotName,
    /// The virtual machine in the snapshot; null if its description is damaged.
    #[schema(required)]
    pub vm: Option<String>,
    /// When it began, in milliseconds since 1970; null if its description is damaged.
    #[schema(required)]
    pub created_ms: Option<u64>,
    /// Its size on the disk, in bytes.
    pub bytes: u64,
    /// The version of its format; null while it is written, or if it is damaged.
    #[schema(required)]
    pub format: Option<u32>,
    /// The directory with its files, for `bellhop run --restore`.
    #[schema(value_type = String)]
    pub path: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_path() {
        let longest = "a".repeat(SNAPSHOT_NAME_MAX);
        for good in ["a", "7", "web-2026.11_26", &longest] {
            assert_eq!(good.parse::<SnapshotName>().unwrap().as_str(), good);
        }
        let long = format!("{longest}a");
        for bad in [
            "", ".", "..", ".web", "-web", "a/b", "../web", "/etc", "a\0", "a b", "\u{e4}", &long,
        ] {
            assert_eq!(bad.parse::<SnapshotName>(), Err(BadSnapshotName), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<SnapshotName>(&json).is_err());
        }
    }
}
