//! The one constructor of eventfds, and their descriptors.
//!
//! A program that this process executes must not inherit any. `EventFd::new` takes flags, and a
//! call without EFD_CLOEXEC looks right, so `clippy.toml` forbids it everywhere else.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Creates an eventfd with a counter of 0. Reads do not block, and no executed program inherits it.
///
/// # Errors
/// The limit of open files is reached, or the kernel has no memory.
#[expect(clippy::disallowed_methods, reason = "the flags are complete here")]
pub fn new() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
}

/// The descriptor of an eventfd, to wait for it.
#[must_use]
pub fn descriptor(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: needed because `EventFd` has no `AsFd`. The descriptor is open for as long as `event`
    // is borrowed, and so is the result.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn no_program_inherits_it() {
        let event = super::new().unwrap();
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", event.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
        let wanted = libc::O_CLOEXEC | libc::O_NONBLOCK;
        assert_eq!(flags & wanted, wanted, "{info}");
    }
}
