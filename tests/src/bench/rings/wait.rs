//! Waiting for eventfds.

use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};

use crate::error::{Error, Result};

/// Waits at most `limit` until a descriptor is ready; `false` if none is.
///
/// # Errors
/// The kernel refuses.
pub(super) fn until(descriptors: &mut [PollFd<'_>], limit: Option<Duration>) -> Result<bool> {
    let limit = limit
        .map(Timespec::try_from)
        .transpose()
        .map_err(|_| Error::invalid("a time limit", "it is out of range"))?;
    match poll(descriptors, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(Error::system("wait for eventfds")(error)),
    }
}
