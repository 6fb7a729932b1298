//! The descriptors of the VMM, and attempts through them.

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal};
use rustix::thread::ThreadNameSpaceType;
use vmm::sandbox::rings::DEPTH;

use super::Attempt;
use super::attempts::result;

/// `FIFREEZE` (`linux/fs.h`).
const FREEZE: libc::Ioctl = 0xc004_5877;
/// The mode of a program that runs as its owner.
const SET_USER_ID: Mode = Mode::from_raw_mode(0o4755);

/// A descriptor of the VMM.
pub(super) struct Descriptor {
    /// Its name in /proc, without digits.
    pub(super) kind: String,
    fd: OwnedFd,
}

impl Descriptor {
    /// The type of its file and how it is open.
    fn is_file(&self, access: OFlags) -> bool {
        let is_regular = |mode| FileType::from_raw_mode(mode) == FileType::RegularFile;
        let opened = rustix::fs::fcntl_getfl(&self.fd).map(|flags| flags & OFlags::RWMODE);
        // Memory of the VM has no file on the host.
        self.kind.starts_with('/')
            && !self.kind.starts_with("/memfd:")
            && rustix::fs::fstat(&self.fd).is_ok_and(|stat| is_regular(stat.st_mode))
            && opened == Ok(access)
    }

    /// Whether it is a connection to one of these processes.
    fn connects_to(&self, processes: &[Pid]) -> bool {
        rustix::net::sockopt::socket_peercred(&self.fd)
            .is_ok_and(|peer| processes.contains(&peer.pid))
    }
}

/// Copies all descriptors of a process.
pub(super) fn of(process: Pid) -> Result<Vec<Rc<Descriptor>>, Box<dyn Error>> {
    let pidfd = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
    let mut all = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let entry = entry?.path();
        let link = fs::read_link(&entry)?.display().to_string();
        let number = entry.file_name().and_then(|name| name.to_str());
        let number = number.ok_or("no number")?.parse()?;
        let flags = PidfdGetfdFlags::empty();
        all.push(Rc::new(Descriptor {
            kind: link.replace(|letter: char| letter.is_ascii_digit(), ""),
            fd: rustix::process::pidfd_getfd(&pidfd, number, flags)?,
        }));
    }
    Ok(all)
}

/// An attempt with each of these descriptors, of which there is at least one. All must end alike.
fn each<'a>(
    name: &str,
    chosen: impl Iterator<Item = &'a Rc<Descriptor>>,
    run: impl Fn(BorrowedFd<'_>) -> io::Result<()> + 'static,
) -> Attempt {
    let chosen: Vec<_> = chosen.cloned().collect();
    Attempt::new(name, move || {
        let mut ends = chosen.iter().map(|one| {
            let end = run(one.fd.as_fd());
            (end.map_err(|error| error.raw_os_error()), &one.kind)
        });
        let (first, _) = ends
            .next()
            .ok_or_else(|| io::Error::other("the VMM has no such descriptor"))?;
        if let Some((other, kind)) = ends.find(|(end, _)| *end != first) {
            let text = format!("{kind}: {other:?}, others: {first:?}");
            return Err(io::Error::other(text));
        }
        first.map_err(|error| io::Error::from_raw_os_error(error.unwrap_or_default()))
    })
}

/// Opens the file of a descriptor again.
fn open_again(fd: BorrowedFd<'_>, write: bool) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    File::options().read(true).write(write).open(path).map(drop)
}

/// A process at the other end of a Unix socket.
fn peer(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut peer = -1;
    let mut size = libc::socklen_t::try_from(size_of_val(&peer)).unwrap_or_default();
    // SAFETY: the kernel writes two numbers to local variables.
    let got = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    result(got.into())?;
    // SAFETY: the kernel has opened this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(peer) })
}

/// A request whose argument is a number, or is ignored.
pub(super) fn ioctl(fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<()> {
    // SAFETY: none of the requests of this file has an argument that is a pointer.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), request, 0) }.into())
}

/// Attempts through the rings of the VMM's disks: `own` is its directory.
pub(super) fn by_rings(all: &[Rc<Descriptor>], own: &Path) -> io::Result<Attempt> {
    // The kernel gives all rings of this size the same layout.
    let ring: IoUring = IoUring::builder().setup_cqsize(DEPTH).build(DEPTH)?;
    let parameters = ring.params().clone();
    let path = CString::new(own.join("by-ring").as_os_str().as_bytes())?;
    let rings = all.iter().filter(|one| one.kind == "anon_inode:[io_uring]");
    // A filter would not see it.
    let name = "create a set-user-ID program through a ring of a disk";
    Ok(each(name, rings, move |fd| {
        let fd = fd.try_clone_to_owned()?.into_raw_fd();
        // SAFETY: the descriptor is owned, and of a ring with this layout.
        let mut ring = unsafe { IoUring::from_fd(fd, parameters.clone()) }?;
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path.as_ptr())
            .flags(libc::O_CREAT | libc::O_WRONLY)
            .mode(SET_USER_ID.bits());
        // SAFETY: the path outlives the operation, whose end is awaited.
        unsafe { ring.submission().push(&open.build()) }.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        let completion = ring.completion().next();
        match completion.map_or(0, |completion| completion.result()) {
            error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
            _ => Ok(()),
        }
    })
    .denied_by(Errno::ACCESS))
}

/// Attempts through the descriptors. `others` are processes that the VMM must not reach.
pub(super) fn attempts(all: &[Rc<Descriptor>], others: &[Pid]) -> Vec<Attempt> {
    let every = || all.iter();
    let of_kind = |kind: &'static str| every().filter(move |one| one.kind == kind);
    let read_only = || every().filter(|one| one.is_file(OFlags::RDONLY));
    let writable = || every().filter(|one| one.is_file(OFlags::RDWR));
    let connected = || every().filter(|one| one.connects_to(others));
    let [first, ..] = *others else {
        return Vec::new();
    };
    let mut attempts = works(all);
    attempts.extend([
        // No descriptor is a directory.
        each("open a path relative to a descriptor", every(), |fd| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            rustix::fs::openat(fd, "../../etc/passwd", flags, Mode::empty())?;
            Ok(())
        })
        .denied_by(Errno::NOTDIR),
        each("open the root by its inode", every(), by_handle)
            .denied_by(Errno::PERM)
            .ended_by_filter(),
        each("copy the mount of a descriptor", every(), |fd| {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_EMPTY_PATH;
            rustix::mount::open_tree(fd, "", flags)?;
            Ok(())
        })
        .denied_by(Errno::PERM)
        .ended_by_filter(),
        each("open a read-only disk for writing", read_only(), |fd| {
            open_again(fd, true)
        })
        .denied_by(Errno::ROFS),
        // The file belongs to root on the host, and to the user of the VM in the jail.
        each("make a disk a set-user-ID program", writable(), |fd| {
            rustix::fs::fchmod(fd, SET_USER_ID)?;
            Ok(rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR)?)
        })
        .ended_by_filter(),
        each("freeze the file system of a disk", writable(), |fd| {
            ioctl(fd, FREEZE)
        })
        .denied_by(Errno::PERM)
        .ended_by_filter(),
        each("open the network of a socket", of_kind("socket:[]"), |fd| {
            ioctl(fd, libc::SIOCGSKNS)
        })
        .denied_by(Errno::PERM)
        .ended_by_filter(),
        each(
            "make a socket signal a process",
            of_kind("socket:[]"),
            move |fd| {
                let number = first.as_raw_pid();
                // SAFETY: the request has a number as its argument.
                result(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETOWN, number) }.into())
            },
        )
        .denied_by(Errno::SRCH)
        .ended_by_filter(),
        // The process is not in this namespace.
        each("signal the peer of a socket", connected(), |fd| {
            Ok(rustix::process::pidfd_send_signal(
                &peer(fd)?,
                Signal::KILL,
            )?)
        })
        .denied_by(Errno::INVAL)
        .ended_by_filter(),
        each("take a descriptor of the peer", connected(), |fd| {
            let flags = PidfdGetfdFlags::empty();
            rustix::process::pidfd_getfd(&peer(fd)?, 0, flags)?;
            Ok(())
        })
        .denied_by(Errno::PERM)
        .ended_by_filter(),
        each("enter the network of the peer", connected(), |fd| {
            let network = ThreadNameSpaceType::NETWORK;
            rustix::thread::move_into_thread_name_spaces(peer(fd)?.as_fd(), network)?;
            Ok(())
        })
        .denied_by(Errno::PERM)
        .ended_by_filter(),
    ]);
    attempts
}

/// Attempts that succeed: the descriptors are those of the VMM, and work.
fn works(all: &[Rc<Descriptor>]) -> Vec<Attempt> {
    let files = |access| all.iter().filter(move |one| one.is_file(access));
    let named = |name: &'static str| all.iter().filter(move |one| one.kind.starts_with(name));
    let read = |fd: BorrowedFd<'_>| Ok(rustix::io::pread(fd, &mut [0; 16], 0).map(drop)?);
    vec![
        each("read a disk", files(OFlags::RDWR), read),
        each("read a read-only disk", files(OFlags::RDONLY), read),
        each("open a disk again", files(OFlags::RDWR), |fd| {
            open_again(fd, true)
        }),
        each("open a read-only disk again", files(OFlags::RDONLY), |fd| {
            open_again(fd, false)
        }),
        each("read the memory of the guest", named("/memfd:"), read),
        each(
            "request the features of a NIC",
            named("/dev/vhost-vdpa"),
            |fd| {
                let mut features = 0_u64;
                let request = vdpa::uapi::get_features().number();
                // SAFETY: the kernel writes the features to a local variable.
                result(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut features) }.into())
            },
        ),
    ]
}

/// Opens an inode by its number in the file system of a descriptor.
fn by_handle(fd: BorrowedFd<'_>) -> io::Result<()> {
    /// `struct file_handle`, with the number and the generation of an inode.
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        inode: [u32; 2],
    }
    let mut handle = Handle {
        bytes: 8,
        kind: 1,
        inode: [2, 0],
    };
    let (fd, handle) = (fd.as_raw_fd(), &raw mut handle);
    // SAFETY: the kernel reads the handle, which outlives the call and has the size that it names.
    result(unsafe { libc::syscall(libc::SYS_open_by_handle_at, fd, handle, libc::O_RDONLY) })
}
