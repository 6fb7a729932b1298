//! This process's resources by the kernel's count, and use of a device without its owner's
//! knowledge.

use std::os::fd::RawFd;

use lab::sim::SimDevice;
use vdpa::uapi::Plain;

/// Open file descriptors.
pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The open files that a program executed by this process would inherit.
pub(crate) fn inheritable() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = entries.map_while(Result::ok).filter_map(|entry| {
        let fd = entry.file_name().into_string().unwrap();
        // The descriptor of this directory is closed by the time of the last read.
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
        let target = std::fs::read_link(entry.path()).ok()?;
        (flags & libc::O_CLOEXEC == 0).then(|| format!("{fd}: {}", target.display()))
    });
    open.collect()
}

/// Bytes of memory that devices have pinned (`VmPin`).
pub(crate) fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kib = line.unwrap().trim().strip_suffix("kB").unwrap().trim();
    1024 * kib.parse::<u64>().unwrap()
}

/// Suspends or resumes a device that this process has open anywhere: the kernel accepts any
/// descriptor of it.
pub(crate) fn behind_the_back(device: &SimDevice, request: Plain) {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let of_device = entries
        .map_while(Result::ok)
        .find(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == device.path()));
    let name = of_device.unwrap().file_name();
    let fd: RawFd = name.to_str().unwrap().parse().unwrap();
    // SAFETY: there is no safe interface to ioctls. The descriptor was open a moment ago and its
    // owner is not dropped meanwhile; a `Plain` takes no argument.
    let result = unsafe { libc::ioctl(fd, request.number()) };
    assert_eq!(result, 0);
}
