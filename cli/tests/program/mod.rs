//! The program under test.

use std::path::PathBuf;

/// The lab's build, optimized as for users; outside of the lab, the one that cargo built for the
/// test.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("BELLHOP").map_or_else(|| env!("CARGO_BIN_EXE_bellhop").into(), PathBuf::from)
}
