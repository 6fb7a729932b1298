//! Errors of the saved states of platform devices.
//!
//! The states themselves are next to their devices. Each comes from a file or from a peer and is
//! trusted no more than a guest. A device accepts only a state that a guest could have reached
//! through its registers, and otherwise changes nothing.

use std::io;

use crate::Error;

/// Fails unless a guest can have reached the state.
pub(crate) fn ensure(possible: bool, device: &str, what: &str) -> Result<(), Error> {
    if possible {
        return Ok(());
    }
    Err(Error::other(format!(
        "the saved {device} is impossible: {what}"
    )))
}

/// The error for a restored state whose interrupt cannot be set.
pub(crate) fn interrupt_failed(device: &str, source: io::Error) -> Error {
    Error::other(format!("cannot set the interrupt of the {device}")).because(source)
}

/// Encodes and decodes a state like a snapshot; for tests.
#[cfg(test)]
pub(crate) fn through_a_file<T>(state: &T) -> T
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    let bytes = postcard::to_stdvec(state).unwrap();
    for length in 0..bytes.len() {
        assert!(postcard::from_bytes::<T>(&bytes[..length]).is_err());
    }
    postcard::from_bytes(&bytes).unwrap()
}
