//! Shares the Unix socket with a group.
//!
//! Owns the change from "this user only" to "and this group".

use std::fs;
use std::io;
use std::path::Path;

use bellhop_common::groups::{self, PATH as GROUPS};
use rustix::fs::{AtFlags, CWD, Gid, Mode};

use crate::error::Error;

/// The mode of a socket that a group shares.
const MODE: Mode = Mode::from_raw_mode(0o660);

/// Gives the socket at `path` to `group`, a name or a number: mode 0660.
///
/// # Errors
/// The group does not exist, or the socket cannot be given to it.
pub(crate) fn share_with(path: &Path, group: &str) -> Result<(), Error> {
    let number = match group.parse::<u32>() {
        Ok(number) => Some(number),
        Err(_) => {
            let text = fs::read_to_string(GROUPS)
                .map_err(Error::context(format!("cannot read {GROUPS}")))?;
            let found = groups::parse(&text).find(|(name, _)| *name == group);
            found.map(|(_, number)| number)
        }
    };
    // To the kernel, all bits set means "no change".
    let number = number.filter(|&number| number != u32::MAX);
    let number = number.ok_or_else(|| {
        Error::failed(format!(
            "no group {group} in {GROUPS}: create it with `groupadd --system {group}`, or give its \
             number"
        ))
    })?;
    let failed = |error: rustix::io::Errno| {
        let message = format!("cannot give {} to the group {group}", path.display());
        Error::failed(message).because(io::Error::from(error))
    };
    // In this order the former group never gets access.
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
        assert!(all_ones.to_string().contains("groupadd"), "{all_ones}");
    }
}
