//! PID 1 of the lab host: file systems, children, power.

use lab::agent::protocol::{Frame, Setup, Share};
use lab::error::{Error, Result};
use lab::files;
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{WaitOptions, chdir, chroot, wait};
use rustix::system::{RebootCommand, reboot};
use std::ffi::CString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Options of every 9p mount (Documentation/filesystems/9p.rst).
const SHARE_OPTIONS: &str = "trans=virtio,version=9p2000.L,msize=512000";

/// The path of this program in the lab host.
const SELF: &str = "/newroot/usr/local/bin/lab-host";

/// How long the agent's port may take to appear.
const PORT_LIMIT: Duration = Duration::from_secs(20);

/// Sets everything up, runs the agent, and returns when it has ended.
pub(crate) fn init() -> Result<()> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mounted(kind, kind, target, MountFlags::empty(), "")?;
    }
    for line in files::read_text(Path::new("/modules"))?.lines() {
        load(&Path::new("/lib").join(line), "")?;
    }
    let mut port = open_port()?;
    let setup = match Frame::read(&mut port).map_err(Error::system("read the agent's port"))? {
        Frame::Setup(setup) => setup,
        _ => return Err(Error::invalid("the first frame", "it is not a setup")),
    };
    mount_root()?;
    for share in &setup.shares {
        mount_share(share)?;
    }
    switch_root()?;
    run_agent(port, &setup)
}

/// Loads a kernel module from a file. An already loaded module is no error.
pub(crate) fn load(path: &Path, parameters: &str) -> Result<()> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    let parameters = CString::new(parameters)
        .map_err(|_| Error::invalid("module parameters", "they have a NUL"))?;
    match rustix::system::finit_module(&file, &parameters, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(Error::file("load", path)(error.into())),
    }
}

/// Switches the machine off, or stops forever if that is impossible.
pub(crate) fn power_off() {
    rustix::fs::sync();
    let _ = reboot(RebootCommand::PowerOff);
}

fn mounted(
    source: &str,
    kind: &str,
    target: impl AsRef<Path>,
    flags: MountFlags,
    options: &str,
) -> Result<()> {
    let target = target.as_ref();
    files::create_directory(target)?;
    let options =
        CString::new(options).map_err(|_| Error::invalid("mount options", "they have a NUL"))?;
    mount(source, target, kind, flags, Some(options.as_c_str()))
        .map_err(|error| Error::file("mount", target)(error.into()))
}

/// Waits for the agent's port: the kernel finds its device while init already runs.
fn open_port() -> Result<File> {
    let started = Instant::now();
    let path = Path::new("/dev/vport0p1");
    // The serial bus may number other ports first; the name identifies ours.
    loop {
        let found = find_port().unwrap_or_else(|| path.to_path_buf());
        match File::options().read(true).write(true).open(&found) {
            Ok(file) => {
                wait_for_outside(&file)?;
                return Ok(file);
            }
            Err(error) if started.elapsed() > PORT_LIMIT => {
                return Err(Error::file("open", found)(error));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The device of the port whose name is "lab".
fn find_port() -> Option<PathBuf> {
    files::list(Path::new("/sys/class/virtio-ports"))
        .ok()?
        .into_iter()
        .find(|port| files::read_text(&port.join("name")).is_ok_and(|name| name.trim() == "lab"))
        .and_then(|port| Some(Path::new("/dev").join(port.file_name()?)))
}

/// A port reads as ended until QEMU reports that the outside is connected.
fn wait_for_outside(port: &File) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    let started = Instant::now();
    loop {
        let mut fds = [PollFd::new(port, PollFlags::IN)];
        poll(&mut fds, None).map_err(Error::system("wait for the agent's port"))?;
        let [fd] = &fds;
        if !fd.revents().contains(PollFlags::HUP) {
            return Ok(());
        }
        if started.elapsed() > PORT_LIMIT {
            return Err(Error::invalid(
                "the agent's port",
                "no lab process is connected",
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The shared root is read-only and cached; writes go to memory.
fn mount_root() -> Result<()> {
    let options = format!("{SHARE_OPTIONS},cache=loose");
    mounted("root", "9p", "/run/lower", MountFlags::RDONLY, &options)?;
    mounted("tmpfs", "tmpfs", "/run/upper", MountFlags::empty(), "")?;
    files::create_directory(Path::new("/run/upper/data"))?;
    files::create_directory(Path::new("/run/upper/work"))?;
    mounted(
        "overlay",
        "overlay",
        "/newroot",
        MountFlags::empty(),
        "lowerdir=/run/lower,upperdir=/run/upper/data,workdir=/run/upper/work",
    )?;
    for directory in ["tmp", "run", "dev/shm"] {
        let target = Path::new("/newroot").join(directory);
        if directory != "dev/shm" {
            mounted("tmpfs", "tmpfs", target, MountFlags::empty(), "mode=1777")?;
        }
    }
    files::copy(Path::new("/init"), Path::new(SELF))
}

/// Writable shares have no write cache, so that the outside sees every write at once. Read-only
/// ones do not change while the host runs.
fn mount_share(share: &Share) -> Result<()> {
    let target = in_new_root(&share.path)?;
    let (flags, cache) = if share.writable {
        (MountFlags::empty(), "readahead")
    } else {
        (MountFlags::RDONLY, "loose")
    };
    let options = format!("{SHARE_OPTIONS},cache={cache}");
    mounted(&share.tag, "9p", target, flags, &options)
}

fn in_new_root(path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    let relative = path
        .strip_prefix("/")
        .map_err(|_| Error::invalid("a share's path", "it is not absolute"))?;
    Ok(Path::new("/newroot").join(relative))
}

fn switch_root() -> Result<()> {
    let failed = |error: rustix::io::Errno| Error::file("switch to", "/newroot")(error.into());
    for directory in ["proc", "sys", "dev"] {
        let target = Path::new("/newroot").join(directory);
        mount_move(format!("/{directory}"), target).map_err(failed)?;
    }
    chdir("/newroot").map_err(failed)?;
    mount_move(".", "/").map_err(failed)?;
    chroot(".").map_err(failed)?;
    chdir("/").map_err(failed)?;
    mounted(
        "devpts",
        "devpts",
        "/dev/pts",
        MountFlags::empty(),
        "ptmxmode=666",
    )?;
    mounted("tmpfs", "tmpfs", "/dev/shm", MountFlags::empty(), "")?;
    mounted(
        "cgroup2",
        "cgroup2",
        "/sys/fs/cgroup",
        MountFlags::empty(),
        "",
    )?;
    mounted(
        "tracefs",
        "tracefs",
        "/sys/kernel/tracing",
        MountFlags::empty(),
        "",
    )?;
    mounted(
        "debugfs",
        "debugfs",
        "/sys/kernel/debug",
        MountFlags::empty(),
        "",
    )?;
    rustix::system::sethostname(b"lab").map_err(Error::system("set the host's name"))
}

/// Runs the agent as a child: PID 1 must reap all orphans and must not steal the exit statuses that
/// the agent waits for.
fn run_agent(port: File, setup: &Setup) -> Result<()> {
    let start = |source| Error::Start {
        program: "the agent".into(),
        source,
    };
    let setup = serde_json::to_string(&setup.modules)
        .map_err(|error| Error::invalid("the setup", error.to_string()))?;
    let agent = Command::new("/proc/self/exe")
        .args(["agent", &setup])
        .stdin(Stdio::from(port))
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .env("HOME", "/root")
        .env("USER", "root")
        .env("LC_ALL", "C.UTF-8")
        .spawn()
        .map_err(start)?;
    let agent = i32::try_from(agent.id()).unwrap_or_default();
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == agent => {
                return if status.exit_status() == Some(0) {
                    Ok(())
                } else {
                    Err(Error::Usage(format!("the agent ended: {status:?}")))
                };
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::system("wait for children")(error)),
        }
    }
}
