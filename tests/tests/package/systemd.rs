//! A systemd for one test in the lab host, whose init is another program.
//!
//! ```text
//!   lab host (init: lab-host)
//!    └─ unshare: mounts, processes, control groups, host name
//!        └─ systemd ─ udevd, journald, the units of a package
//! ```
//! It shares the lab host's kernel, devices, network and files. It runs without D-Bus: systemctl
//! connects to its private socket. It owns its processes and files; dropping it removes both. It
//! must not know any package.

use lab::node::until;
use lab::process::{die_with_parent, output};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Its control group, in which all units' groups are.
const GROUP: &str = "/sys/fs/cgroup/lab-systemd";

/// Units of an ordinary boot that would change the lab host or that take long under emulation.
const MASKED: [&str; 17] = [
    "ldconfig.service",
    "systemd-binfmt.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
    "systemd-machine-id-commit.service",
    "systemd-modules-load.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-sysusers.service",
    "systemd-tmpfiles-setup.service",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-tmpfiles-setup-dev-early.service",
    "systemd-udev-trigger.service",
    "timers.target",
];

/// Its namespaces have the group as their root. It does not use the lab host's console.
const START: &str = "
    mkdir -p $GROUP && echo $$ >$GROUP/cgroup.procs &&
    exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
        --cgroup --uts sh -c '
            mount -t cgroup2 none /sys/fs/cgroup && mount --bind /dev/null /dev/console &&
            exec env -i PATH=/usr/sbin:/usr/bin container=lab \
                /usr/lib/systemd/systemd --system --unit=basic.target'
";

/// A running systemd.
#[derive(Debug)]
pub(crate) struct Systemd {
    unshare: Child,
    /// Its process ID in the lab host.
    pid: i32,
}

impl Systemd {
    /// Starts it and waits until basic.target is reached.
    pub(crate) fn start() -> Self {
        let units = Path::new("/run/systemd/system");
        fs::create_dir_all(units).unwrap();
        for unit in MASKED {
            symlink("/dev/null", units.join(unit)).unwrap();
        }
        let mut command = Command::new("sh");
        command.args(["-c", START]).env("GROUP", GROUP);
        let unshare = die_with_parent(command.stdin(Stdio::null())).spawn();
        let mut systemd = Self {
            unshare: unshare.unwrap(),
            pid: 0,
        };
        let own = systemd.unshare.id();
        let children = format!("/proc/{own}/task/{own}/children");
        until("systemd starts", || {
            let text = fs::read_to_string(&children).unwrap_or_default();
            systemd.pid = text.trim().parse().unwrap_or_default();
            systemd.pid != 0 && name(systemd.pid) == "systemd"
        })
        .unwrap();
        until("systemd reaches basic.target", || {
            let words = ["systemctl", "--quiet", "is-active", "basic.target"];
            systemd.run(&words).status.success()
        })
        .unwrap();
        systemd
    }

    /// A command that runs beside its units.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args([
                "--mount", "--pid", "--cgroup", "--uts", "--root", "--target",
            ])
            .arg(self.pid.to_string())
            .arg("--")
            .args(words)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// The standard output of a command that succeeds.
    #[track_caller]
    pub(crate) fn done(&self, words: &[&str]) -> String {
        let bytes = output(&mut self.command(words));
        let bytes = bytes.unwrap_or_else(|error| panic!("{words:?}: {error}"));
        String::from_utf8(bytes).unwrap()
    }

    /// A property of a unit.
    #[track_caller]
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        let words = ["systemctl", "show", "--value", "--property", name, unit];
        self.done(&words).trim().to_owned()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        if std::thread::panicking() && self.pid != 0 {
            let journal = self.run(&["journalctl", "--no-pager", "--lines=80"]);
            eprintln!("{}", String::from_utf8_lossy(&journal.stdout));
        }
        // The kernel kills all processes of the namespace with it, and `unshare` waits for that.
        let killed = match Pid::from_raw(self.pid) {
            Some(pid) => kill_process(pid, Signal::KILL).is_ok(),
            None => false,
        };
        if !killed {
            let _ = self.unshare.kill();
        }
        let _ = self.unshare.wait();
        remove_groups(Path::new(GROUP));
        for left in ["/run/systemd", "/run/udev", "/run/log/journal"] {
            let _ = fs::remove_dir_all(left);
        }
    }
}

/// A process's name.
fn name(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.unwrap_or_default().trim().to_owned()
}

/// Removes control groups, the innermost first.
fn remove_groups(group: &Path) {
    for entry in lab::files::list(group).unwrap_or_default() {
        if entry.is_dir() {
            remove_groups(&entry);
        }
    }
    let _ = fs::remove_dir(group);
}
