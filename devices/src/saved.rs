//! What can be wrong with the saved state of a platform device.
//!
//! The states themselves are next to their devices. Each comes from a file or from a peer and
//! is trusted no more than a guest: a device takes only what a guest could have brought about with its
//! registers, and changes nothing otherwise.

use std::io;

use crate::Error;

/// An error unless a guest can have brought the state about.
pub(crate) fn ensure(possible: bool, device: &str, what: &str) -> Result<(), Error> {
    if possible {
        return Ok(());
    }
    Err(Error::other(format!(
        "the saved {device} is impossible: {what}"
    )))
}

/// The state was taken, but the device's interrupt does not follow.
pub(crate) fn interrupt_failed(device: &str, source: io::Error) -> Error {
    Error::other(format!("the interrupt of the {device} cannot be set")).because(source)
}

/// Encodes and decodes a state as a snapshot does; for tests.
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
