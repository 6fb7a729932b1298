//! The user, capabilities and attributes of a jailed process.
//!
//! Owns their order: each step needs a privilege that a later one gives up. It must not know files.

use std::io;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

/// Most private memory of a process that is no VMM, in bytes. A worker with 16 queue pairs uses a
/// tenth.
const DATA_MAX: u64 = 256 << 20;
/// Largest file that such a process writes, in bytes. Its log is in memory (`/run`), and another
/// process empties it each second if it exceeds 16 MiB.
const FILE_MAX: u64 = 32 << 20;
/// As that of the daemon's VMs. The kernel ends such a process before the daemon.
const OOM_SCORE_ADJ: &[u8] = b"100";

/// Limits the memory that the calling process can take from the host. It needs `/proc`. Memory that
/// `RLIMIT_DATA` does not count is the concern of [`confine`](super::seccomp::confine).
///
/// # Errors
/// The kernel refuses.
pub fn limit_memory() -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let score = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
    match rustix::io::write(score, OOM_SCORE_ADJ) {
        // In a container this process may have a higher value, which it may not lower.
        Ok(_) | Err(Errno::ACCESS) => {}
        Err(error) => return Err(error.into()),
    }
    for (resource, most) in [(Resource::Data, DATA_MAX), (Resource::Fsize, FILE_MAX)] {
        // A lower one stays.
        let most = rustix::process::getrlimit(resource)
            .maximum
            .map_or(most, |max| max.min(most));
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        rustix::process::setrlimit(resource, limit)?;
    }
    Ok(())
}

/// Changes to a user and the group with the same number, without other groups.
///
/// # Errors
/// This process may not.
pub fn become_user(user: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    // These change the calling thread, which is the only one.
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    // Before the user changes, which takes the capability for it away.
    lock_capabilities()?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Gives up all capabilities of the calling thread, and the ways to regain one. Without them no
/// core file is written. No other process of this user may trace this one or read its memory.
///
/// # Errors
/// The kernel refuses.
pub fn give_up() -> io::Result<()> {
    lock_capabilities()?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    rustix::process::setrlimit(Resource::Core, none)?;
    Ok(())
}

/// Empties the bounding set, and locks the bits by which an `execve` of root would gain
/// capabilities. A process without `CAP_SETPCAP` cannot, and gains none with `no_new_privs`.
fn lock_capabilities() -> io::Result<()> {
    let held = rustix::thread::capabilities(None)?.effective;
    if !held.contains(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    // The kernel refuses the numbers that it does not know.
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if matches!(
            rustix::thread::capability_is_in_bounding_set(capability),
            Ok(true)
        ) {
            rustix::thread::remove_capability_from_bounding_set(capability)?;
        }
    }
    let locked = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    rustix::thread::set_capabilities_secure_bits(locked)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a child, because a limit cannot be raised again.
    #[test]
    fn a_process_with_limited_memory_gets_no_more() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        use std::os::unix::process::CommandExt as _;
        let most = usize::try_from(DATA_MAX).unwrap();
        let limit = move || {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel chooses the address, and nothing accesses the memory.
            let map = |size| unsafe {
                mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE)
            };
            // Other tests run at the same time, so their memory counts, too.
            map(most)?;
            limit_memory()?;
            match map(most) {
                Err(Errno::NOMEM) => Ok(()),
                mapped => Err(mapped.err().unwrap_or(Errno::TOOBIG).into()),
            }
        };
        let mut command = std::process::Command::new("cat");
        command.args(["/proc/self/limits", "/proc/self/oom_score_adj"]);
        // SAFETY: between fork and exec it makes system calls, and allocates nothing.
        unsafe {
            command.pre_exec(limit);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        for (name, most) in [("Max data size", DATA_MAX), ("Max file size", FILE_MAX)] {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let values: Vec<_> = line.unwrap().split_whitespace().collect();
            let most = most.to_string();
            assert_eq!(values, [&most, &most, "bytes"], "{text}");
        }
        let score: i32 = text.lines().last().unwrap().parse().unwrap();
        assert!(score >= 100, "{text}");
    }

    /// In a child: attributes of a process cannot be regained.
    #[test]
    fn a_process_without_privileges_regains_none() {
        use std::os::unix::process::CommandExt as _;
        let mut command = std::process::Command::new("cat");
        command.arg("/proc/self/status");
        // SAFETY: `give_up` is only called with one thread in a real process. Between fork and exec
        // it makes system calls, and formats nothing.
        unsafe {
            command.pre_exec(give_up);
        }
        let output = command.output().unwrap();
        let status = String::from_utf8_lossy(&output.stdout);
        for line in ["CapPrm", "CapEff", "CapAmb"] {
            let wanted = format!("{line}:\t0000000000000000");
            assert!(status.contains(&wanted), "{status}");
        }
        assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        if rustix::process::geteuid().is_root() {
            assert!(status.contains("CapBnd:\t0000000000000000"), "{status}");
        }
    }
}
