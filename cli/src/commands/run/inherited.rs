//! Inherited descriptors, as `--vdpa fd=N` and `--vfio fd=N` name them.
//!
//! Owns the conversion from a number on the command line to a descriptor that this process owns.

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::{Errno, FdFlags};
use vmm::config::{DescriptorError, VdpaConfig, VfioConfig};

/// Standard input, output and error belong to this process.
const FIRST: RawFd = 3;

/// Takes the descriptors that devices name, each once. Must run before this process opens a
/// descriptor without close-on-exec.
pub(super) fn take(
    nics: &mut [VdpaConfig],
    functions: &mut [VfioConfig],
) -> Result<(), DescriptorError> {
    let mut taken = BTreeSet::new();
    let mut take = |number| {
        let number = RawFd::try_from(number)
            .ok()
            .filter(|number| *number >= FIRST)
            .ok_or("cannot be inherited: inherited descriptors begin at 3")?;
        if !taken.insert(number) {
            return Err("already belongs to another device".to_owned());
        }
        own(number)
    };
    for nic in nics {
        nic.take_descriptor(&mut take)?;
    }
    for function in functions {
        function.take_descriptor(&mut take)?;
    }
    Ok(())
}

/// Takes ownership of an inherited descriptor, and sets close-on-exec.
pub(in crate::commands) fn own(number: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: needed because a command line can only contain a number. The descriptor is only
    // queried and not kept, so a number that is not open causes an error only.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = match rustix::io::fcntl_getfd(borrowed) {
        Ok(flags) => flags,
        Err(Errno::BADF) => return Err("was not passed to this process".to_owned()),
        Err(error) => return Err(format!("cannot be queried: {error}")),
    };
    // Descriptors that survived the exec of this process lack this flag. All that this process
    // opens have it (the standard library and rustix set it). So without the flag no other value
    // owns the number.
    if flags.contains(FdFlags::CLOEXEC) {
        return Err("belongs to this process, which did not inherit it".to_owned());
    }
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)
        .map_err(|error| format!("cannot be taken: {error}"))?;
    // SAFETY: needed as above. The check has shown that the descriptor is open and inherited, so no
    // value of this process owns it. With close-on-exec set, the check rejects the number the next
    // time.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    use vmm::config::VmConfig;

    use super::*;

    fn config(devices: &str) -> VmConfig {
        toml::from_str(&format!("kernel = 'k'\n{devices}")).unwrap()
    }

    fn refused(devices: &str) -> String {
        let mut config = config(devices);
        let error = take(&mut config.vdpa, &mut config.vfio).unwrap_err();
        let mut text = error.to_string();
        if let Some(cause) = std::error::Error::source(&error) {
            text.push_str(&cause.to_string());
        }
        text
    }

    #[test]
    fn only_inherited_descriptors_are_taken() {
        let own = File::open("/dev/null").unwrap();
        let number = own.as_raw_fd();
        for (devices, words) in [
            ("[[vdpa]]\nfd = 7".to_owned(), "needs an id"),
            ("[[vdpa]]\nfd = 1\nid = 'a'".to_owned(), "begin at 3"),
            (
                "[[vdpa]]\nfd = 4294967295\nid = 'a'".to_owned(),
                "begin at 3",
            ),
            (
                "[[vdpa]]\nfd = 1000000\nid = 'a'".to_owned(),
                "was not passed",
            ),
            (
                format!("[[vdpa]]\nfd = {number}\nid = 'a'"),
                "belongs to this process",
            ),
            ("[[vfio]]\nfd = 1".to_owned(), "begin at 3"),
            (
                format!("[[vfio]]\nfd = {number}"),
                "belongs to this process",
            ),
        ] {
            let error = refused(&devices);
            assert!(error.contains(words), "{devices}: {error}");
        }
        // Still open, and owned by this test.
        own.metadata().unwrap();
    }

    #[test]
    fn inherited_descriptors_are_taken_once_and_closed_if_unusable() {
        let inherit = || {
            let inherited = File::open("/dev/null").unwrap();
            rustix::io::fcntl_setfd(&inherited, FdFlags::empty()).unwrap();
            inherited.into_raw_fd()
        };
        let number = inherit();
        let error = refused(&format!("[[vdpa]]\nfd = {number}\nid = 'a'"));
        assert!(error.contains("is not a vhost-vdpa device"), "{error}");
        let error = refused(&format!("[[vfio]]\nfd = {}", inherit()));
        assert!(error.contains("is not a device file of VFIO"), "{error}");
        let mut taken = BTreeSet::from([number]);
        assert!(!taken.insert(number));
    }
}
