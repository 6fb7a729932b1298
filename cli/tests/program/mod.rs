//! The program that is tried.

use std::path::PathBuf;

/// The lab's, optimized as it is for its users; outside of the lab the one that cargo has built for the test.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("BELLHOP").map_or_else(|| env!("CARGO_BIN_EXE_bellhop").into(), PathBuf::from)
}
