//! The io_urings of disks: each carries out the operations of a disk only.
//!
//! io_uring bypasses system call filters. So a process with filters must not be able to create a
//! ring, whose restrictions it could omit. It creates all rings before its filters:
//!
//! ```text
//!   reserve, adopt ──> idle ── take ──> has an engine
//!                       ^                  │ the engine is dropped, nothing is in flight
//!                       └──────────────────┘
//! ```
//! In other processes an engine has a ring of its own, which is closed with it.
//!
//! Owns the restrictions and the rings of this process. It must not know the operations in flight.
//! All `unsafe` of the block device that concerns a ring's descriptor is here.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::{IoUring, Parameters, opcode};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::pci::SLOTS;

/// `IORING_REGISTER_SYNC_CANCEL` (`linux/io_uring.h`).
const REGISTER_SYNC_CANCEL: u8 = 24;
/// The size of `struct io_uring_params`.
const PARAMETERS_LEN: usize = 120;
/// Maximum number of operations of a disk in flight, as in QEMU, and the entries of both queues of
/// a ring. It takes 20 KiB of kernel memory, and 40 KiB with twice as many.
pub const DEPTH: u32 = 128;
/// As many disks as fit beside the host bridge and the random number generator.
const MOST: usize = SLOTS as usize - 2;
/// Rings for disks that are plugged into a running VM.
const SPARE: usize = 4;

/// The rings of this process.
static POOL: Pool = Pool(Mutex::new(None));

/// The bytes of `struct io_uring_params`, as the kernel filled it in.
pub type ParameterBytes = [u8; PARAMETERS_LEN];

/// Creates rings for as many disks as a VM can have. From now on this process creates no other. If
/// the kernel refuses, a disk fails later. Does nothing after [`adopt`].
pub fn reserve() {
    POOL.reserve(MOST);
}

/// Closes all idle rings that [`reserve`] created, except a few for disks that are plugged later.
pub fn release() {
    POOL.release(SPARE);
}

/// Takes over the rings of the program that this process executed before. This process creates no
/// other.
pub fn adopt(rings: Vec<RingFiles>) {
    POOL.adopt(rings);
}

/// Returns all rings for another program in this process; `None` if they need not be passed.
/// Nothing may be in flight.
#[must_use]
pub fn all() -> Option<Vec<Arc<RingFiles>>> {
    let pool = POOL.0.lock();
    pool.as_ref().map(|pool| pool.rings.clone())
}

/// Returns an idle ring.
///
/// # Errors
/// io_uring cannot be used, or all rings of a process with filters are in use.
pub(super) fn take() -> Result<Ring, Error> {
    POOL.take()
}

/// For `map_err`: io_uring cannot be used.
fn unavailable(error: io::Error) -> Error {
    let message = match error.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring (CONFIG_IO_URING), which disk I/O needs",
        Some(libc::EPERM | libc::EACCES) => {
            "io_uring, which disk I/O needs, is not permitted; set sysctl \
             kernel.io_uring_disabled to 0, or to 1 with this user in the group \
             kernel.io_uring_group"
        }
        // Kernels before 5.12 count the ring against RLIMIT_MEMLOCK.
        Some(libc::ENOMEM) => {
            "no memory for an io_uring; if the kernel is older than 5.12, raise ulimit -l"
        }
        _ => "cannot set up an io_uring for disk I/O",
    };
    Error::other(message).because(error)
}

/// `None`: rings are created as needed.
struct Pool(Mutex<Option<Reserve>>);

/// The rings of a process that creates no other.
struct Reserve {
    /// An idle ring has no other owner.
    rings: Vec<Arc<RingFiles>>,
    /// Why there are not more.
    errno: Option<i32>,
    /// Whether idle ones may be closed.
    is_new: bool,
}

impl Pool {
    fn reserve(&self, count: usize) {
        let mut pool = self.0.lock();
        if pool.is_some() {
            return;
        }
        let mut rings = Vec::with_capacity(count);
        let mut errno = None;
        while rings.len() < count && errno.is_none() {
            match RingFiles::create() {
                Ok(ring) => rings.push(Arc::new(ring)),
                Err(error) => {
                    tracing::debug!(%error, created = rings.len(), "cannot create all io_urings");
                    errno = Some(error.raw_os_error().unwrap_or(libc::EIO));
                }
            }
        }
        *pool = Some(Reserve {
            rings,
            errno,
            is_new: true,
        });
    }

    fn release(&self, spare: usize) {
        let mut pool = self.0.lock();
        let Some(pool) = pool.as_mut().filter(|pool| pool.is_new) else {
            return;
        };
        pool.is_new = false;
        let mut idle = 0;
        pool.rings.retain_mut(|ring| {
            idle += usize::from(Arc::get_mut(ring).is_some());
            Arc::get_mut(ring).is_none() || idle <= spare
        });
    }

    fn adopt(&self, rings: Vec<RingFiles>) {
        *self.0.lock() = Some(Reserve {
            rings: rings.into_iter().map(Arc::new).collect(),
            errno: None,
            is_new: false,
        });
    }

    fn take(&self) -> Result<Ring, Error> {
        let mut pool = self.0.lock();
        let files = match &mut *pool {
            None => Arc::new(RingFiles::create().map_err(unavailable)?),
            Some(reserve) => reserve.idle()?,
        };
        let mapped = files.map().map_err(unavailable)?;
        // A signal of its former engine.
        let _ = files.completed.read();
        Ok(Ring { mapped, files })
    }
}

impl Reserve {
    fn idle(&mut self) -> Result<Arc<RingFiles>, Error> {
        let mut rings = self.rings.iter_mut();
        let idle = rings.find_map(|ring| Arc::get_mut(ring).is_some().then(|| Arc::clone(ring)));
        idle.ok_or_else(|| match self.errno {
            Some(errno) => unavailable(io::Error::from_raw_os_error(errno)),
            None => Error::other(
                "no io_uring is left for another disk: a VM in a sandbox can create none while \
                 it runs, and a removed disk keeps its own until its storage answers; unplug a \
                 disk, or stop and start the VM",
            ),
        })
    }
}

/// A ring of an engine.
pub(super) struct Ring {
    /// First, so that an idle ring is not mapped.
    mapped: IoUring,
    files: Arc<RingFiles>,
}

impl Ring {
    /// Returns the eventfd that is readable when an operation completed.
    pub(super) fn completed(&self) -> &EventFd {
        &self.files.completed
    }

    /// Returns how many operations may be in flight. Both queues of the ring have room for them.
    /// The ring of an earlier program may have another depth than [`DEPTH`].
    pub(super) fn depth(&self) -> u16 {
        let parameters = &self.files.parameters;
        let entries = parameters.sq_entries().min(parameters.cq_entries());
        u16::try_from(entries).unwrap_or(u16::MAX)
    }
}

impl Deref for Ring {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        &self.mapped
    }
}

impl DerefMut for Ring {
    fn deref_mut(&mut self) -> &mut IoUring {
        &mut self.mapped
    }
}

/// The descriptors of a ring, which is not mapped.
#[derive(Debug)]
pub struct RingFiles {
    ring: OwnedFd,
    completed: EventFd,
    parameters: Parameters,
}

impl RingFiles {
    fn create() -> io::Result<Self> {
        let completed = vdpa::eventfd::new()?;
        let mapped = restricted(&completed)?;
        // SAFETY: needed because `IoUring` has no `AsFd`. The descriptor is open as long as
        // `mapped`, which outlives the borrow.
        let ring = unsafe { BorrowedFd::borrow_raw(mapped.as_raw_fd()) }.try_clone_to_owned()?;
        Ok(Self {
            ring,
            completed,
            parameters: mapped.params().clone(),
        })
    }

    /// Takes over a ring of the program that this process executed before, with its eventfd.
    ///
    /// # Errors
    /// The ring cannot be mapped, or an operation of its former engine is left.
    ///
    /// # Safety
    /// [`RingFiles::parameters`] of that program returned `parameters` for `ring`. They describe
    /// its layout, which cannot be checked.
    pub unsafe fn inherited(
        ring: OwnedFd,
        completed: OwnedFd,
        parameters: &ParameterBytes,
    ) -> io::Result<Self> {
        let files = Self {
            ring,
            // SAFETY: the descriptor is owned.
            completed: unsafe { EventFd::from_raw_fd(completed.into_raw_fd()) },
            // SAFETY: `Parameters` is a transparent wrapper of `struct io_uring_params`, and may be
            // created of its bytes. It has integers only.
            parameters: unsafe { std::mem::transmute::<ParameterBytes, Parameters>(*parameters) },
        };
        let mut mapped = files.map()?;
        let is_submitted = mapped.submission().is_empty();
        if !is_submitted || !mapped.completion().is_empty() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(files)
    }

    /// Returns the bytes for [`RingFiles::inherited`].
    #[must_use]
    pub fn parameters(&self) -> ParameterBytes {
        // SAFETY: as in `inherited`. The structure has no padding.
        unsafe { std::mem::transmute::<Parameters, ParameterBytes>(self.parameters.clone()) }
    }

    /// Returns the descriptors of the ring and of its eventfd.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [
            self.ring.as_fd(),
            vdpa::eventfd::descriptor(&self.completed),
        ]
    }

    fn map(&self) -> io::Result<IoUring> {
        let fd = self.ring.try_clone()?.into_raw_fd();
        // SAFETY: the descriptor is owned, and the parameters are those with which the kernel
        // created the ring: `create` has them from there, and `inherited` requires it.
        unsafe { IoUring::from_fd(fd, self.parameters.clone()) }
    }
}

/// Creates a ring that signals `completed` and carries out the operations of a disk alone (Linux
/// 5.10).
fn restricted(completed: &EventFd) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    // The default is twice as many completions.
    let ring: IoUring = builder
        .setup_r_disabled()
        .setup_cqsize(DEPTH)
        .build(DEPTH)?;
    let submitter = ring.submitter();
    submitter.register_eventfd(completed.as_raw_fd())?;
    let operations = [
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
    ];
    let mut allowed: Vec<Restriction> = operations.map(Restriction::sqe_op).into();
    allowed.push(Restriction::register_op(REGISTER_SYNC_CANCEL));
    if submitter.register_restrictions(&mut allowed).is_err() {
        // A kernel before 6.0 does not know that operation.
        allowed.pop();
        submitter.register_restrictions(&mut allowed)?;
    }
    submitter.register_enable_rings()?;
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use io_uring::squeue;
    use io_uring::types::Fd;
    use vdpa::iova::DeviceAddress;
    use vdpa::ring::{Direction, Piece};

    use super::super::disk::Disk;
    use super::super::engine::{Engine, Ticket};
    use super::super::request::{Io, Transfer};
    use super::*;
    use crate::virtio::userspace_queue::driver::memory;

    fn pool(count: usize) -> Pool {
        let pool = Pool(Mutex::new(None));
        pool.reserve(count);
        pool
    }

    fn size(pool: &Pool) -> usize {
        pool.0.lock().as_ref().unwrap().rings.len()
    }

    fn tempfile() -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        File::from(rustix::fs::memfd_create("disk", flags).unwrap())
    }

    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: needed to try operations. None of them names memory.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    fn sync(ring: &mut IoUring) -> i32 {
        let file = tempfile();
        let sync = opcode::Fsync::new(Fd(file.as_raw_fd()));
        result(ring, sync.build())
    }

    /// As the next program takes a ring over.
    fn inherit(files: &RingFiles) -> io::Result<RingFiles> {
        let fds = files.descriptors();
        let [ring, completed] = fds.map(|fd| fd.try_clone_to_owned().unwrap());
        // SAFETY: the parameters are those of the ring.
        unsafe { RingFiles::inherited(ring, completed, &files.parameters()) }
    }

    #[test]
    fn errors_name_the_remedy() {
        let message = |errno| unavailable(io::Error::from_raw_os_error(errno)).to_string();
        assert!(message(libc::EPERM).contains("kernel.io_uring_disabled"));
        assert!(message(libc::ENOSYS).contains("CONFIG_IO_URING"));
        assert!(message(libc::ENOMEM).contains("ulimit -l"));
    }

    #[test]
    fn a_ring_carries_out_only_the_operations_of_a_disk() {
        let mut ring = Pool(Mutex::new(None)).take().unwrap();
        let buffers = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }];
        // SAFETY: needed to try a registration. It is refused, and names no memory.
        let registered = unsafe { ring.submitter().register_buffers(&buffers) };
        let errno = registered.unwrap_err().raw_os_error();
        assert_eq!(errno, Some(libc::EACCES));
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0);
        assert_eq!(result(&mut ring, socket.build()), -libc::EACCES);
        let file = tempfile();
        let close = opcode::Close::new(Fd(file.as_raw_fd()));
        assert_eq!(result(&mut ring, close.build()), -libc::EACCES);
        assert_eq!(sync(&mut ring), 0);
        let flags = squeue::Flags::IO_LINK;
        let linked = opcode::Fsync::new(Fd(file.as_raw_fd()))
            .build()
            .flags(flags);
        assert_eq!(result(&mut ring, linked), -libc::EACCES);
    }

    #[test]
    fn a_reserve_lends_each_ring_to_one_engine() {
        let pool = pool(2);
        let mut first = pool.take().unwrap();
        let second = pool.take().unwrap();
        assert_ne!(first.files.ring.as_raw_fd(), second.files.ring.as_raw_fd());
        let error = pool.take().err().unwrap().to_string();
        for words in ["sandbox", "unplug a disk", "stop and start"] {
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(sync(&mut first), 0);
        let before = first.files.ring.as_raw_fd();
        drop(first);
        let mut again = pool.take().unwrap();
        assert_eq!(again.files.ring.as_raw_fd(), before);
        // The former engine's signal is gone.
        assert!(again.completed().read().is_err());
        assert_eq!(sync(&mut again), 0);
        assert_eq!(again.completed().read().unwrap(), 1);
    }

    #[test]
    fn a_reserve_without_rings_names_the_cause() {
        let pool = pool(0);
        pool.0.lock().as_mut().unwrap().errno = Some(libc::EPERM);
        let error = pool.take().err().unwrap().to_string();
        assert!(error.contains("kernel.io_uring_disabled"), "{error}");
    }

    #[test]
    fn rings_in_use_and_spare_ones_stay() {
        let pool = pool(6);
        let used = [pool.take().unwrap(), pool.take().unwrap()];
        pool.release(3);
        assert_eq!(size(&pool), 5);
        // Once: a disk that is unplugged leaves its ring.
        drop(used);
        pool.release(3);
        assert_eq!(size(&pool), 5);
        pool.reserve(6);
        assert_eq!(size(&pool), 5);
    }

    #[test]
    fn a_ring_whose_storage_hangs_is_not_idle() {
        let pool = pool(1);
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let disk = Disk::for_test(File::from(reader), 8);
        let memory = memory();
        let mut engine = Engine::new(disk, memory.into(), pool.take().unwrap());
        let ticket = Ticket {
            head: 0,
            status: DeviceAddress(0),
        };
        let read = Io::Read(Transfer {
            offset: 0,
            len: 512,
            data: vec![Piece {
                iova: DeviceAddress(0x1000),
                len: 512,
                direction: Direction::DeviceWrites,
            }],
        });
        engine.start(ticket, read).unwrap();
        engine.submit();
        engine.is_hung = true;
        drop(engine);
        pool.take().err().unwrap();
        drop(writer);
        let begin = Instant::now();
        while pool.take().is_err() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_next_program_uses_a_ring_with_its_restrictions() {
        let files = RingFiles::create().unwrap();
        let next = Pool(Mutex::new(None));
        next.adopt(vec![inherit(&files).unwrap()]);
        let mut ring = next.take().unwrap();
        assert_eq!(sync(&mut ring), 0);
        assert_eq!(ring.completed().read().unwrap(), 1);
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0);
        assert_eq!(result(&mut ring, socket.build()), -libc::EACCES);
        // It creates none, and closes none.
        next.take().err().unwrap();
        drop(ring);
        next.reserve(2);
        next.release(0);
        assert_eq!(size(&next), 1);
    }

    #[test]
    fn the_next_program_fills_a_ring_of_another_depth() {
        let mapped: IoUring = IoUring::builder().setup_cqsize(16).build(8).unwrap();
        // SAFETY: the descriptor is open as long as `mapped`, which outlives the borrow.
        let ring = unsafe { BorrowedFd::borrow_raw(mapped.as_raw_fd()) };
        let files = RingFiles {
            ring: ring.try_clone_to_owned().unwrap(),
            completed: vdpa::eventfd::new().unwrap(),
            parameters: mapped.params().clone(),
        };
        let next = Pool(Mutex::new(None));
        next.adopt(vec![inherit(&files).unwrap()]);
        let disk = Disk::for_test(tempfile(), 8);
        let mut engine = Engine::new(disk, memory().into(), next.take().unwrap());
        while engine.has_room() {
            let ticket = Ticket {
                head: 0,
                status: DeviceAddress(0),
            };
            engine.start(ticket, Io::Flush).unwrap();
        }
        assert_eq!(engine.in_flight(), 8);
        assert_eq!(engine.drain(Duration::from_secs(60)).len(), 8);
    }

    #[test]
    fn the_next_program_takes_only_idle_rings() {
        let files = RingFiles::create().unwrap();
        let mut mapped = files.map().unwrap();
        // Not submitted.
        let sync = opcode::Fsync::new(Fd(-1)).build();
        // SAFETY: the operation names no memory.
        unsafe { mapped.submission().push(&sync) }.unwrap();
        let busy = |files: &RingFiles| inherit(files).unwrap_err().kind();
        assert_eq!(busy(&files), io::ErrorKind::ResourceBusy);
        // Not reaped.
        mapped.submit_and_wait(1).unwrap();
        assert_eq!(busy(&files), io::ErrorKind::ResourceBusy);
        assert_eq!(mapped.completion().count(), 1);
        inherit(&files).unwrap();
    }
}
