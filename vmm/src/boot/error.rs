//! Errors about files that cannot be booted, for users who chose the wrong one.

use crate::Error;
use crate::byte_count::ByteCount;

/// Headers that contradict each other or the file.
pub(super) fn damaged(problem: &str) -> Error {
    Error::unusable(format!("it is damaged: {problem}"))
}

/// A segment overlaps the boot structures.
pub(super) fn too_low(at: u64, start: u64) -> Error {
    Error::unusable(format!(
        "its load address {at:#x} is below {start:#x}, where kernels may begin"
    ))
}

/// More than the guest's memory holds.
pub(super) fn no_room(needed: u64, at: u64, available: u64) -> Error {
    Error::unusable(format!(
        "it does not fit: it needs {} at {at:#x}, but the guest's memory has {} there; give the \
         guest more memory",
        ByteCount(needed),
        ByteCount(available)
    ))
}

/// The file ended before the size that it had when it was opened, or before the end that its
/// headers state.
pub(super) fn truncated(needed: u64, len: u64) -> Error {
    Error::unusable(format!(
        "it is truncated: {needed} bytes are needed, but the file has {len}"
    ))
}

/// Reading failed.
pub(super) fn unreadable(source: std::io::Error) -> Error {
    Error::unusable("cannot read it").because(source)
}
