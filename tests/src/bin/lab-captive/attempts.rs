//! Attempts by paths, calls and new sockets.

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::UnshareFlags;

use super::Attempt;
use super::descriptors::ioctl;

/// `KVM_GET_API_VERSION` (`linux/kvm.h`).
const KVM_VERSION: libc::Ioctl = 0xae00;

/// The result of a C function.
pub(super) fn result(returned: i64) -> io::Result<()> {
    if returned == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn open(path: &Path) -> Attempt {
    let (name, path) = (format!("open {}", path.display()), path.to_owned());
    Attempt::new(name, move || File::open(&path).map(drop))
}

fn connect(path: &Path) -> Attempt {
    let (name, path) = (format!("connect {}", path.display()), path.to_owned());
    Attempt::new(name, move || UnixStream::connect(&path).map(drop))
}

/// Creates a file, and removes it again.
fn create(path: &Path) -> Attempt {
    let (name, path) = (format!("create {}", path.display()), path.to_owned());
    Attempt::new(name, move || {
        File::create(&path)?;
        fs::remove_file(&path)
    })
}

/// Checks that a target exists outside the jail. Inside, no path and no route leads there.
pub(super) fn on_target_outside(target: &str) -> Result<Vec<Attempt>, Box<dyn Error>> {
    let missing = |error| format!("{target}: {error}");
    if let Ok(address) = target.parse::<SocketAddr>() {
        return Ok(on_address(address).map_err(missing)?.into());
    }
    let file = Path::new(target);
    let is_socket = |metadata: fs::Metadata| metadata.file_type().is_socket();
    if fs::metadata(file).map(is_socket).map_err(missing)? {
        return Ok(vec![connect(file).denied_by(Errno::NOENT)]);
    }
    match File::open(file) {
        // Another VM has the device.
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {}
        opened => drop(opened.map_err(missing)?),
    }
    Ok(vec![open(file).denied_by(Errno::NOENT)])
}

/// Attempts on a TCP server of the host.
fn on_address(address: SocketAddr) -> io::Result<[Attempt; 4]> {
    let passed = || TcpStream::connect(address);
    let (one, two) = (passed()?, passed()?);
    let connect = move || TcpStream::connect(address).map(drop);
    Ok([
        Attempt::new(format!("connect {address}"), connect)
            .denied_by(Errno::NETUNREACH)
            .denied_to_vmm_by(Errno::ACCESS),
        Attempt::new(format!("send a datagram to {address}"), move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.send_to(b"captive", address).map(drop)
        })
        .denied_by(Errno::NETUNREACH),
        // As one of a migration: the daemon opens it in the network namespace of the host.
        Attempt::new("connect a socket of the host elsewhere", move || {
            rustix::net::connect_unspec(&one)?;
            Ok(rustix::net::connect(&one, &address)?)
        })
        .denied_to_vmm_by(Errno::ACCESS),
        Attempt::new("send from a socket of the host elsewhere", move || {
            rustix::net::connect_unspec(&two)?;
            let flags =
                rustix::net::SendFlags::from_bits_retain(libc::MSG_FASTOPEN.cast_unsigned());
            rustix::net::sendto(&two, b"captive", flags, &address)?;
            Ok(())
        })
        .ended_by_filter(),
    ])
}

/// Attempts on files that the jail shows, or whose paths lead to other files there.
pub(super) fn on_files_inside(own: &Path) -> Vec<Attempt> {
    let vmm = "see the descriptors of the VMM";
    let mut all = vec![
        // The VMM is process 1 of its namespace. /proc hides processes that this one cannot trace.
        open(Path::new("/proc/1/mem")).denied_by(Errno::NOENT),
        open(Path::new("/proc/1/environ")).denied_by(Errno::NOENT),
        Attempt::new(vmm, || fs::read_dir("/proc/1/fd").map(drop)).denied_by(Errno::NOENT),
        open(Path::new("/proc/kcore")).denied_by(Errno::ACCESS),
        // Root owns both directories.
        create(Path::new("/file")).denied_by(Errno::ACCESS),
        create(Path::new("/dev/file")).denied_by(Errno::ACCESS),
        // Files, sockets and /proc work.
        create(&own.join("node")),
        connect(&own.join("api.socket")),
        open(Path::new("/proc/self/status")),
        Attempt::new("use KVM", || {
            let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
            ioctl(kvm.as_fd(), KVM_VERSION)
        }),
    ];
    for (path, denied_by) in [
        // This file system is read-only, which the kernel checks before the owner.
        ("/proc/sys/kernel/core_pattern", Errno::ROFS),
        (
            "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            Errno::ACCESS,
        ),
    ] {
        let run = move || File::options().write(true).open(path).map(drop);
        all.push(Attempt::new(format!("write {path}"), run).denied_by(denied_by));
    }
    all
}

/// Attempts by calls that need a privilege, or a file that is not there.
pub(super) fn by_calls(own: &Path) -> Vec<Attempt> {
    let flags = [
        ("create a user namespace", UnshareFlags::NEWUSER),
        ("create a mount namespace", UnshareFlags::NEWNS),
        ("create a network namespace", UnshareFlags::NEWNET),
        ("create a PID namespace", UnshareFlags::NEWPID),
    ];
    let namespaces = flags.map(|(name, flags)| {
        Attempt::new(name, move || {
            // SAFETY: none of these flags takes descriptors away.
            Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
        })
    });
    let tmpfs = rustix::mount::MountFlags::empty();
    let detach = rustix::mount::UnmountFlags::DETACH;
    let root = rustix::process::Uid::ROOT;
    let node = own.join("node");
    let set_id = own.join("set-id");
    let privileged = [
        Attempt::new("trace the VMM", || trace(Pid::INIT)),
        Attempt::new("change the root", || Ok(rustix::process::chroot("/sys")?)),
        Attempt::new("mount", move || {
            Ok(rustix::mount::mount("tmpfs", "/dev", "tmpfs", tmpfs, c"")?)
        }),
        Attempt::new("remove a mount", move || {
            Ok(rustix::mount::unmount("/sys/devices", detach)?)
        }),
        Attempt::new("become root", move || {
            Ok(rustix::thread::set_thread_uid(root)?)
        }),
        // In a directory where it may create files.
        Attempt::new("create a device node", move || {
            let device = CString::new(node.as_os_str().as_bytes())?;
            let (mode, number) = (libc::S_IFCHR | 0o600, libc::makedev(1, 1));
            // SAFETY: the path is a C string that outlives the call.
            result(unsafe { libc::mknod(device.as_ptr(), mode, number) }.into())
        }),
        Attempt::new("capture all frames", || {
            // SAFETY: socket(2) touches no memory of this process.
            result(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 3) }.into())
        }),
    ];
    let privileged = namespaces.into_iter().chain(privileged);
    let privileged = privileged.map(|attempt| attempt.denied_by(Errno::PERM).ended_by_filter());
    let others = [
        // No program of the host exists here.
        Attempt::new("execute a program", || Err(Command::new("/bin/ls").exec()))
            .denied_by(Errno::NOENT),
        // A directory of a snapshot can belong to root on the host.
        Attempt::new("create a set-user-ID program", move || {
            let mode = rustix::fs::Mode::from_raw_mode(0o4755);
            let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
            rustix::fs::openat(rustix::fs::CWD, &set_id, flags, mode)?;
            fs::remove_file(&set_id)
        })
        .ended_by_filter(),
        // One without restrictions bypasses the filters.
        Attempt::new("create an io_uring", || io_uring::IoUring::new(4).map(drop))
            .ended_by_filter(),
    ];
    privileged.chain(others).collect()
}

fn trace(process: Pid) -> io::Result<()> {
    let number = process.as_raw_pid();
    // SAFETY: ptrace(2) with these arguments touches no memory of this process.
    result(unsafe { libc::ptrace(libc::PTRACE_ATTACH, number, 0, 0) })
}

/// Attempts on a process of the host, whose number does not exist here. They come before others: a
/// later child could have the same number.
pub(super) fn on_process(process: Pid) -> [Attempt; 4] {
    let missing = |action: &str, run: fn(Pid) -> io::Result<()>| {
        let name = format!("{action} process {process} of the host");
        Attempt::new(name, move || run(process)).denied_by(Errno::SRCH)
    };
    [
        missing("signal", |process| {
            Ok(rustix::process::kill_process(process, Signal::KILL)?)
        }),
        missing("trace", trace).ended_by_filter(),
        missing("read the memory of", |process| {
            let mut byte = 0_u8;
            let near = libc::iovec {
                iov_base: (&raw mut byte).cast(),
                iov_len: 1,
            };
            let (near, number) = (&raw const near, process.as_raw_pid());
            // SAFETY: the kernel writes a byte to a local variable. It reads the other address in
            // the other process only.
            result(
                unsafe { libc::process_vm_readv(number, near, 1, near, 1, 0) }
                    .try_into()
                    .unwrap_or(0),
            )
        })
        .ended_by_filter(),
        missing("open", |process| {
            rustix::process::pidfd_open(process, PidfdFlags::empty())?;
            Ok(())
        })
        .ended_by_filter(),
    ]
}

/// Attempts on abstract sockets of the host.
pub(super) fn on_network() -> io::Result<[Attempt; 1]> {
    let name = format!("lab-captive-{}", std::process::id());
    let address = UnixAddress::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&address)?;
    UnixStream::connect_addr(&address)?;
    Ok([
        Attempt::new("connect an abstract socket of the host", move || {
            // It listens as long as the attempt may be made.
            let _ = &listener;
            UnixStream::connect_addr(&address).map(drop)
        })
        .denied_by(Errno::CONNREFUSED),
    ])
}
