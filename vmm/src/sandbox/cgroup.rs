//! The control group of a VM's process (cgroup v2).
//!
//! ```text
//!   PARENT/               delegated to the daemon, without processes of its own
//!     daemon/             the daemon (systemd: DelegateSubgroup=daemon)
//!     RUNTIME-DIRECTORY/  one for each daemon
//!       VM/               the process of a VM and all that it starts
//! ```
//! A group without processes is removed. Owns the files below the parent. It must not know VMs.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Where every system mounts cgroup v2.
const MOUNT: &str = "/sys/fs/cgroup";
/// The group of the daemon itself, beside those of its VMs.
const DAEMON: &str = "daemon";
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];
/// The memory of a VMM without its guest: code, stacks, page tables, buffers of a migration.
const OVERHEAD: u64 = 512 << 20;
/// Each page of the guest has page table entries in the kernel, for the VMM and for KVM.
const OVERHEAD_PART: u64 = 64;
/// Threads of a VMM with 32 vCPUs and all its other threads, twice.
const TASKS_MAX: u64 = 512;
/// The weight of a VM for each vCPU; 100 is the kernel's default for a group.
const WEIGHT: u64 = 100;
const WEIGHT_MAX: u64 = 10_000;
/// How long the kernel may take to end the processes of a group.
const KILL_TIME: Duration = Duration::from_secs(10);

/// The groups of one daemon's VMs.
#[derive(Debug, Clone)]
pub struct Groups(PathBuf);

/// The limits of a VM.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Guest memory in bytes.
    pub memory: u64,
    /// The number of vCPUs.
    pub cpus: u32,
}

impl Limits {
    fn memory_max(self) -> u64 {
        let overhead = OVERHEAD.saturating_add(self.memory / OVERHEAD_PART);
        self.memory.saturating_add(overhead)
    }

    fn weight(self) -> u64 {
        WEIGHT.saturating_mul(self.cpus.into()).clamp(1, WEIGHT_MAX)
    }
}

impl Groups {
    /// The groups of the daemon with this runtime directory. Enables the controllers that exist.
    ///
    /// # Errors
    /// cgroup v2 is not mounted, or not delegated to this process.
    pub fn open(runtime: &Path) -> io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let parent = parent(&own).ok_or_else(|| {
            let message = "this process is not in a group `daemon` of a delegated group (systemd \
                           254: Delegate=yes, DelegateSubgroup=daemon)";
            io::Error::new(ErrorKind::Unsupported, message)
        })?;
        let parent = Path::new(MOUNT).join(parent);
        let groups = parent.join(group_name(runtime));
        // Not there in cgroup v1, whose groups must not be touched.
        fs::metadata(parent.join("cgroup.controllers"))?;
        create(&groups)?;
        for group in [&parent, &groups] {
            let there = fs::read_to_string(group.join("cgroup.controllers"))?;
            for controller in there.split_whitespace() {
                if CONTROLLERS.contains(&controller) {
                    let enable = format!("+{controller}");
                    fs::write(group.join("cgroup.subtree_control"), enable)?;
                }
            }
        }
        Ok(Self(groups))
    }

    fn group(&self, vm: &str) -> PathBuf {
        self.0.join(vm)
    }

    /// Creates the group of a VM. Returns the file through which a process moves itself into the
    /// group, by writing `0`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn create(&self, vm: &str, limits: Limits) -> io::Result<File> {
        let group = self.group(vm);
        create(&group)?;
        let limits = [
            ("memory.max", limits.memory_max()),
            // The guest and its VMM end together.
            ("memory.oom.group", 1),
            ("pids.max", TASKS_MAX),
            ("cpu.weight", limits.weight()),
        ];
        for (file, value) in limits {
            match File::options().write(true).open(group.join(file)) {
                // The kernel or the parent does not have this controller.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                opened => opened?.write_all(value.to_string().as_bytes())?,
            }
        }
        File::options().write(true).open(group.join("cgroup.procs"))
    }

    /// Whether the kernel has killed a process in the group of a VM because memory ran out, in the
    /// group or on the host.
    #[must_use]
    pub fn ran_out_of_memory(&self, vm: &str) -> bool {
        let events = fs::read_to_string(self.group(vm).join("memory.events"));
        events.is_ok_and(|events| has_oom_kill(&events))
    }

    /// Kills all processes in the group of a VM, and removes it. Does nothing without the group.
    ///
    /// # Errors
    /// A process does not end: it waits in the kernel.
    pub fn remove(&self, vm: &str) -> io::Result<()> {
        let group = self.group(vm);
        let start = Instant::now();
        loop {
            match fs::remove_dir(&group) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                removed => return removed,
            }
            if start.elapsed() > KILL_TIME {
                let message = format!("{} has processes that do not end", group.display());
                return Err(io::Error::new(ErrorKind::TimedOut, message));
            }
            // Linux 5.14. An older kernel has ended the VMM itself by a signal.
            let _ = fs::write(group.join("cgroup.kill"), "1");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The parent of the groups, relative to the mount, from `/proc/self/cgroup`. The root group may
/// have processes and groups, others may not.
fn parent(own: &str) -> Option<&Path> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    if own.is_empty() {
        return Some(Path::new(""));
    }
    let own = Path::new(own);
    own.parent().filter(|_| own.ends_with(DAEMON))
}

/// Whether `memory.events` counts a process that was killed because memory ran out.
fn has_oom_kill(events: &str) -> bool {
    let mut counts = events.lines().filter_map(|line| line.split_once(' '));
    counts.any(|(name, count)| name == "oom_kill" && count != "0")
}

/// A directory's path as one name.
fn group_name(runtime: &Path) -> String {
    let path = runtime.to_string_lossy();
    format!("bellhop:{}", path.trim_matches('/').replace('/', "-"))
}

fn create(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        created => created,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_delegated_group_has_groups_of_vms() {
        let service = "0::/system.slice/bellhop.service/daemon\n";
        let delegated = Path::new("system.slice/bellhop.service");
        assert_eq!(parent(service), Some(delegated));
        assert_eq!(parent("1:memory:/x\n0::/\n"), Some(Path::new("")));
        for other in ["0::/user.slice/session.scope\n", "1:memory:/x/daemon\n", ""] {
            assert_eq!(parent(other), None, "{other}");
        }
        let name = group_name(Path::new("/run/bellhop"));
        assert_eq!(name, "bellhop:run-bellhop");
    }

    #[test]
    fn a_process_that_was_killed_for_memory_is_counted() {
        let events = |kills| format!("low 0\nmax 12\noom 1\noom_kill {kills}\noom_group_kill 1\n");
        assert!(has_oom_kill(&events(3)));
        assert!(!has_oom_kill(&events(0)));
        assert!(!has_oom_kill(""));
        let groups = Groups(PathBuf::from("/nowhere"));
        assert!(!groups.ran_out_of_memory("web"));
    }

    #[test]
    fn limits_leave_room_for_the_vmm() {
        let limits = |memory, cpus| Limits { memory, cpus };
        assert_eq!(
            limits(4 << 30, 2).memory_max(),
            (4 << 30) + (64 << 20) + OVERHEAD
        );
        assert_eq!(limits(u64::MAX, 1).memory_max(), u64::MAX);
        assert_eq!(limits(0, 0).weight(), 1);
        assert_eq!(limits(0, 2).weight(), 200);
        assert_eq!(limits(0, u32::MAX).weight(), WEIGHT_MAX);
    }
}
