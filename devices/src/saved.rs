//! What can be wrong with the saved state of a platform device.
//!
//! The states themselves are next to their devices. Each comes from a file or from a peer and
//! is trusted no more than a guest: a device takes only what a guest could have brought about with its
//! registers, and changes nothing otherwise.

use std::io;

/// Why a device refused a saved state.
#[derive(Debug, thiserror::Error)]
pub enum DeviceStateError {
    /// No guest can have brought it about.
    #[error("the saved {device} is impossible: {what}")]
    Impossible {
        /// Which device.
        device: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// It was taken, but the device's interrupt does not follow.
    #[error("the interrupt of the {device} cannot be set")]
    Interrupt {
        /// Which device.
        device: &'static str,
        /// What the hypervisor said.
        #[source]
        source: io::Error,
    },
}

impl DeviceStateError {
    /// [`DeviceStateError::Impossible`] unless `possible`.
    pub(crate) fn unless(
        possible: bool,
        device: &'static str,
        what: &'static str,
    ) -> Result<(), Self> {
        if possible {
            Ok(())
        } else {
            Err(Self::Impossible { device, what })
        }
    }
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
