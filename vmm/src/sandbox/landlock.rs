//! Landlock: the second layer for files, signals and TCP, where the kernel has it (Linux 5.13).
//!
//! The rules hold for this process and its children, whatever namespace they reach and whatever
//! descriptor of a directory they find. They stay across execve, so a live upgrade adds none.

use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, PathBeneath,
    PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use crate::Error;

/// The newest interface that the rules use; an older kernel enforces what it knows.
const INTERFACE: ABI = ABI::V6;

/// Access to files that no VMM needs, anywhere.
fn never() -> BitFlags<AccessFs> {
    AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeFifo | AccessFs::MakeSym
}

/// Whether the process may connect and bind TCP sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tcp {
    /// As its network namespace permits.
    Allowed,
    /// No (Linux 6.7). The sockets of a migration, which the daemon passes to a VM without a
    /// network, are of the host's namespace. Without this rule they could connect to other hosts.
    Denied,
}

/// How much of the rules the kernel enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforced {
    /// All.
    Fully,
    /// Those that this kernel knows.
    Partly,
    /// None: the kernel has no Landlock, or it is not enabled.
    Not,
}

/// Restricts the calling thread, which must be the only one, and all that it starts:
///
/// * files only beneath `root`, and this program's own; no device nodes, FIFOs or symbolic links
/// * signals only to this process and its children; no abstract Unix sockets of other processes
/// * with [`Tcp::Denied`], no TCP socket connects or binds, whatever its namespace
///
/// Execution is not restricted: the program of a live upgrade may be anywhere.
///
/// # Errors
/// `root` cannot be opened, or the kernel refuses the rules that it should know.
pub fn restrict(root: &Path, tcp: Tcp) -> Result<Enforced, Error> {
    let failed = "cannot set up Landlock";
    let open = |path: &Path| PathFd::new(path).map_err(|error| Error::host(failed).because(error));
    let files = AccessFs::from_all(INTERFACE) & !AccessFs::Execute;
    let root = PathBeneath::new(open(root)?, files & !never());
    let own = PathBeneath::new(open(Path::new("/proc/self/exe"))?, AccessFs::ReadFile);
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(files)
        .and_then(|rules| rules.scope(Scope::from_all(INTERFACE)));
    let rules = match tcp {
        Tcp::Allowed => rules,
        Tcp::Denied => rules.and_then(|rules| rules.handle_access(AccessNet::from_all(INTERFACE))),
    };
    let status = rules
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rule(root))
        .and_then(|rules| rules.add_rule(own))
        .and_then(|rules| rules.restrict_self())
        .map_err(|error| Error::host(failed).because(error))?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Enforced::Fully,
        RulesetStatus::PartiallyEnforced => Enforced::Partly,
        RulesetStatus::NotEnforced => Enforced::Not,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::ErrorKind;

    use rustix::fs::{CWD, Mode};
    use rustix::io::Errno;

    use super::*;

    /// The rules hold for a thread, so each test has its own.
    fn in_thread(work: impl FnOnce() + Send + 'static) {
        std::thread::spawn(work).join().unwrap();
    }

    /// What the kernel itself says: its version of the interface.
    fn expected() -> Enforced {
        /// `LANDLOCK_CREATE_RULESET_VERSION`.
        const VERSION: usize = 1;
        // SAFETY: needed because the crate does not return the version. With this flag the kernel
        // returns a number, and reads no memory.
        let version =
            unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0usize, 0usize, VERSION) };
        match version {
            6.. => Enforced::Fully,
            1..6 => Enforced::Partly,
            _ => panic!(
                "this kernel has no active Landlock, so its rules cannot be tested ({}): use one \
                 with CONFIG_SECURITY_LANDLOCK, and landlock in its parameter lsm=",
                std::io::Error::last_os_error()
            ),
        }
    }

    #[test]
    fn files_outside_the_root_are_out_of_reach() {
        let root = std::env::temp_dir().join(format!("bellhop-landlock-{}", std::process::id()));
        fs::create_dir_all(root.join("inner")).unwrap();
        let directory = root.clone();
        in_thread(move || {
            let above = File::open("/").unwrap();
            let enforced = restrict(&directory, Tcp::Denied).unwrap();
            assert_eq!(enforced, expected());
            fs::write(directory.join("file"), "content").unwrap();
            fs::rename(directory.join("file"), directory.join("other")).unwrap();
            let denied = |error: std::io::Error| error.kind() == ErrorKind::PermissionDenied;
            assert!(denied(File::open("/etc/passwd").unwrap_err()));
            assert!(denied(fs::read_dir("/proc").unwrap_err()));
            let flags = rustix::fs::OFlags::RDONLY;
            let beside = rustix::fs::openat(&above, "etc/passwd", flags, Mode::empty());
            assert_eq!(beside.unwrap_err(), Errno::ACCESS);
            let fifo = rustix::fs::mkfifoat(CWD, directory.join("fifo"), Mode::RUSR);
            assert_eq!(fifo.unwrap_err(), Errno::ACCESS);
            let link = std::os::unix::fs::symlink("other", directory.join("link"));
            assert!(denied(link.unwrap_err()));
            // The program that a live upgrade returns to.
            File::open("/proc/self/exe").unwrap();
            if enforced == Enforced::Fully {
                let parent = rustix::process::getppid().unwrap();
                let signalled = rustix::process::test_kill_process(parent);
                assert_eq!(signalled.unwrap_err(), Errno::PERM);
            }
        });
        fs::remove_dir_all(root).unwrap();
    }

    /// The socket was there before, as those that the daemon passes to a VM.
    #[test]
    fn no_socket_connects_elsewhere() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for tcp in [Tcp::Allowed, Tcp::Denied] {
            in_thread(move || {
                let passed = std::net::TcpStream::connect(address).unwrap();
                let enforced = restrict(Path::new("/"), tcp).unwrap();
                rustix::net::connect_unspec(&passed).unwrap();
                let connected = rustix::net::connect(&passed, &address);
                match tcp {
                    Tcp::Denied if enforced == Enforced::Fully => {
                        assert_eq!(connected.unwrap_err(), Errno::ACCESS);
                    }
                    _ => connected.unwrap(),
                }
            });
        }
    }
}
