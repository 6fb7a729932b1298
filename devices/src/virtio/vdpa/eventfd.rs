//! Eventfds of a vhost-vdpa device: new ones, and signals.

use vmm_sys_util::eventfd::EventFd;

use crate::Error;

pub(super) const EVENTFD: &str =
    "cannot create or use an eventfd; the limit of open files (ulimit -n) may be too low";

pub(super) fn new_eventfd() -> Result<EventFd, Error> {
    vdpa::eventfd::new().map_err(Error::context(EVENTFD))
}

/// Signals an eventfd. The only possible failure is a counter at its maximum, which is readable
/// too.
pub(super) fn signal(event: &EventFd) {
    let _ = event.write(1);
}
