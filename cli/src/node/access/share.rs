//! The Unix socket for a group.
//!
//! Owns the step from "this user only" to "and this group".

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, Mode};

use crate::groups::{self, PATH as GROUPS};

/// Mode of a socket that a group shares.
const MODE: Mode = Mode::from_raw_mode(0o660);

/// Why a group cannot use the socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShareError {
    /// No such group.
    #[error(
        "there is no group {0} in {GROUPS}; make it with `groupadd --system {0}`, or give its number"
    )]
    NoGroup(String),
    /// The list of groups cannot be read.
    #[error("cannot read {GROUPS}")]
    Groups(#[source] io::Error),
    /// The socket cannot be given to it.
    #[error("cannot give {path} to the group {group}")]
    Change {
        /// The socket.
        path: PathBuf,
        /// The group as it was given.
        group: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// Gives the socket at `path` to `group`, a name or a number: mode 0660.
///
/// # Errors
/// See [`ShareError`].
pub(crate) fn share_with(path: &Path, group: &str) -> Result<(), ShareError> {
    let number = match group.parse::<u32>() {
        Ok(number) => Some(number),
        Err(_) => {
            let text = fs::read_to_string(GROUPS).map_err(ShareError::Groups)?;
            let found = groups::parse(&text).find(|(name, _)| *name == group);
            found.map(|(_, number)| number)
        }
    };
    // All bits set means "leave it" to the kernel.
    let number = number.filter(|&number| number != u32::MAX);
    let number = number.ok_or_else(|| ShareError::NoGroup(group.to_owned()))?;
    let failed = |error: rustix::io::Errno| ShareError::Change {
        path: path.to_owned(),
        group: group.to_owned(),
        source: error.into(),
    };
    // In this order the group that had it before never gets the right.
    let gid = Some(Gid::from_raw(number));
    rustix::fs::chownat(CWD, path, None, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    rustix::fs::chmod(path, MODE).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_is_not_there_is_refused() {
        let missing = share_with(Path::new("/none"), "no such group").unwrap_err();
        assert!(missing.to_string().contains("groupadd"), "{missing}");
        let all_ones = share_with(Path::new("/none"), "4294967295").unwrap_err();
        assert!(matches!(all_ones, ShareError::NoGroup(_)), "{all_ones}");
    }
}
