//! Waiting for eventfds.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

use crate::error::{Error, Result};

/// An eventfd's descriptor.
pub(super) fn descriptor(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: needed because EventFd has no `AsFd`. The descriptor is open for as
    // long as `event` is borrowed, and so is the result.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

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
