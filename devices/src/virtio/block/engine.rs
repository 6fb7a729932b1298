//! Disk I/O between an image and guest memory, through io_uring.
//!
//! Owns the image, and every operation in flight with the vectors that the kernel reads. It has a
//! ring of `rings`, and returns it when nothing is in flight. It must not know virtio rings or
//! status bytes. All `unsafe` of the block device that concerns guest memory is here.
//!
//! ```text
//!   free slot --start--> queued --submit--> with the kernel --reap--> free slot
//!                          ^                      |
//!                          +--- short transfer ---+
//! ```
//! Storage may not answer for any time, and then the kernel cannot cancel its operations. So each
//! wait has a limit. An engine that is closed earlier leaves a thread that keeps what the kernel
//! still uses: see [`hung_disks`].
//!
//! The ring is deliberately in its default mode: completions that need the submitting thread
//! interrupt it (no COOP_TASKRUN, no DEFER_TASKRUN). So another thread may wait in `Engine::drain`
//! while the submitter sleeps on a lock.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{opcode, squeue};
use vdpa::iova::{DeviceAddress, IovaRange};
use vdpa::memory::DeviceMemory;
use vdpa::ring::Piece;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemory as _, GuestMemoryError, Permissions};

use super::disk::Disk;
use super::request::{Io, Transfer};
use super::rings::Ring;

/// No new operation begins while this many bytes are in flight.
pub(crate) const MAX_BYTES_IN_FLIGHT: u64 = 64 << 20;
/// How often an operation that made no progress is retried.
const MAX_RETRIES: u8 = 8;

/// How long closing waits for operations that cannot be cancelled.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// How long a thread waits when the kernel is short of memory.
const SHORT_OF_MEMORY: Duration = Duration::from_millis(1);

/// How many closed engines have operations in flight.
static HUNG: AtomicUsize = AtomicUsize::new(0);

/// Returns how many closed disks wait for their storage. The kernel may still write into guest
/// memory for them.
#[must_use]
pub fn hung_disks() -> usize {
    HUNG.load(Ordering::Acquire)
}

/// The request to which an operation belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// The head of its chain.
    pub(crate) head: u16,
    /// The address of its status byte.
    pub(crate) status: DeviceAddress,
}

/// A finished operation.
#[derive(Debug)]
pub(crate) struct Done {
    /// The ticket of its request.
    pub(crate) ticket: Ticket,
    /// The number of bytes written to guest memory, or the error.
    pub(crate) result: io::Result<u64>,
}

/// Addresses in this process of the guest memory of one operation.
struct Vectors(Vec<libc::iovec>);

// SAFETY: needed because raw pointers are not `Send`. The pointers lead into the mapping of guest
// memory. `Engine` keeps the mapping alive, every thread sees it at the same address, and only the
// kernel accesses it through these pointers.
unsafe impl Send for Vectors {}

impl fmt::Debug for Vectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Vectors").field(&self.0.len()).finish()
    }
}

impl Vectors {
    /// Returns the memory of `data` after its first `skip` bytes.
    fn new(
        memory: &DeviceMemory,
        data: &[Piece],
        mut skip: u64,
        access: Permissions,
    ) -> Result<Self, GuestMemoryError> {
        let mut vectors = Vec::with_capacity(data.len());
        for piece in data {
            let address = GuestAddress(piece.iova.0);
            let len = usize::try_from(piece.len)
                .map_err(|_| GuestMemoryError::InvalidGuestAddress(address))?;
            for slice in memory.get_slices(address, len, access)? {
                let slice = slice?;
                let len = slice.len();
                let passed = usize::try_from(skip).unwrap_or(len).min(len);
                // At most `skip`, by the line above.
                skip -= u64::try_from(passed).unwrap_or(skip);
                if passed < len {
                    vectors.push(libc::iovec {
                        iov_base: slice.ptr_guard_mut().as_ptr().wrapping_add(passed).cast(),
                        iov_len: len - passed,
                    });
                }
            }
        }
        Ok(Self(vectors))
    }
}

/// Returns the memory of an operation after its first `skip` bytes.
fn vectors(io: &Io, memory: &DeviceMemory, skip: u64) -> io::Result<Vectors> {
    let (transfer, access) = match io {
        Io::Read(transfer) => (transfer, Permissions::Write),
        Io::Write(transfer) => (transfer, Permissions::Read),
        Io::Flush => return Ok(Vectors(Vec::new())),
    };
    Vectors::new(memory, &transfer.data, skip, access).map_err(io::Error::other)
}

#[derive(Debug)]
struct Slot {
    ticket: Ticket,
    io: Io,
    vectors: Vectors,
    done: u64,
    retries: u8,
}

impl Slot {
    fn transfer(&self) -> Option<&Transfer> {
        match &self.io {
            Io::Read(transfer) | Io::Write(transfer) => Some(transfer),
            Io::Flush => None,
        }
    }

    fn len(&self) -> u64 {
        self.transfer().map_or(0, |transfer| transfer.len)
    }

    /// Whether its memory overlaps one of these ranges of device addresses.
    fn uses(&self, ranges: &[IovaRange]) -> bool {
        let data = self.transfer().map_or(&[][..], |transfer| &transfer.data);
        data.iter().any(|piece| {
            let piece = IovaRange::from_size(piece.iova.0, piece.len.into());
            piece.is_some_and(|piece| ranges.iter().any(|range| range.overlaps(&piece)))
        })
    }
}

/// The next state of a slot whose operation the kernel returned.
enum Progress {
    Again,
    Finished(io::Result<u64>),
}

/// The I/O engine of one disk.
pub(crate) struct Engine {
    /// Taken when the engine is dropped.
    ring: ManuallyDrop<Ring>,
    disk: Disk,
    memory: DeviceMemory,
    slots: Vec<Option<Slot>>,
    free: Vec<u16>,
    bytes: u64,
    write_through: bool,
    /// Whether the operations in flight are cancelled: none is retried.
    cancelled: bool,
    /// Simulates storage that does not answer.
    #[cfg(test)]
    pub(super) is_hung: bool,
    /// How many operations failed. Only the first error is logged.
    errors: u64,
}

vdpa::opaque_debug! {
    Engine, this =>
    disk: this.disk,
    in_flight: this.in_flight(),
    bytes: this.bytes,
}

impl Engine {
    /// Creates an idle engine.
    pub(super) fn new(disk: Disk, memory: DeviceMemory, ring: Ring) -> Self {
        let depth = ring.depth();
        Self {
            ring: ManuallyDrop::new(ring),
            disk,
            memory,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            bytes: 0,
            write_through: false,
            cancelled: false,
            #[cfg(test)]
            is_hung: false,
            errors: 0,
        }
    }

    /// Returns how many operations failed.
    pub(crate) fn errors(&self) -> u64 {
        self.errors
    }

    /// Returns the image.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Sets whether a write is durable before it is reported as done.
    pub(crate) fn set_write_through(&mut self, write_through: bool) {
        self.write_through = write_through;
    }

    /// Returns the descriptor that becomes readable when an operation completed.
    pub(crate) fn completion_fd(&self) -> RawFd {
        self.ring.completed().as_raw_fd()
    }

    /// Clears the signal on [`Engine::completion_fd`]; call it before [`Engine::reap`].
    pub(crate) fn acknowledge(&self) {
        // The only possible failure is that nothing completed.
        let _ = self.ring.completed().read();
    }

    /// Returns the number of operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether another operation may begin.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() && self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Queues an operation; [`Engine::submit`] passes it to the kernel.
    ///
    /// # Errors
    /// There is no room (see [`Engine::has_room`]), or the data is not in guest memory. Nothing was
    /// queued then.
    pub(crate) fn start(&mut self, ticket: Ticket, io: Io) -> io::Result<()> {
        let vectors = vectors(&io, &self.memory, 0)?;
        let index = self.free.pop().ok_or(io::ErrorKind::WouldBlock)?;
        let slot = Slot {
            ticket,
            io,
            vectors,
            done: 0,
            retries: 0,
        };
        let len = slot.len();
        if let Some(place) = self.slots.get_mut(usize::from(index)) {
            self.bytes += len;
            *place = Some(slot);
        }
        self.enqueue(index).inspect_err(|_| {
            self.release(index);
        })
    }

    /// Passes all queued operations to the kernel.
    pub(crate) fn submit(&mut self) {
        // One system call takes all, unless a signal or an entry that fails at once interrupts it;
        // then the next call continues.
        for _ in 0..=self.slots.len() {
            if self.ring.submission().is_empty() {
                return;
            }
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The kernel is short of memory: the event loop retries.
                    tracing::debug!(%error, "io_uring takes no requests now");
                    let _ = self.ring.completed().write(1);
                    return;
                }
            }
        }
    }

    /// Takes completed operations. Everything that a read wrote is marked dirty. Short transfers
    /// are queued again and stay in flight.
    pub(crate) fn reap(&mut self) -> Vec<Done> {
        let may_resume = !self.cancelled;
        let completions: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        let mut finished = Vec::with_capacity(completions.len());
        for (user_data, result) in completions {
            let Ok(index) = u16::try_from(user_data) else {
                continue;
            };
            let Some(slot) = self
                .slots
                .get_mut(usize::from(index))
                .and_then(Option::as_mut)
            else {
                continue;
            };
            let mut progress = judge(slot, result, may_resume);
            if matches!(progress, Progress::Again)
                && let Err(error) = self.resume(index)
            {
                progress = Progress::Finished(Err(error));
            }
            if let Progress::Finished(result) = progress
                && let Some(slot) = self.release(index)
            {
                if let Io::Read(transfer) = &slot.io {
                    // Even after an error: a part may have been written.
                    mark_dirty(&self.memory, &transfer.data);
                }
                if let Err(error) = &result
                    && may_resume
                {
                    if self.errors == 0 {
                        tracing::warn!(
                            %error,
                            "the disk image fails; the guest sees I/O errors; later errors are \
                             counted, not logged"
                        );
                    }
                    self.errors = self.errors.saturating_add(1);
                }
                finished.push(Done {
                    ticket: slot.ticket,
                    result,
                });
            }
        }
        finished
    }

    /// Cancels the operations in flight, and retries none. Those that the kernel cannot cancel end
    /// when their storage answers.
    pub(crate) fn cancel(&mut self) {
        if self.in_flight() == 0 {
            return;
        }
        self.cancelled = true;
        self.submit();
        #[cfg(test)]
        if self.is_hung {
            return;
        }
        // Best effort, since Linux 6.0.
        let _ = self
            .ring
            .submitter()
            .register_sync_cancel(Some(Timespec::new()), CancelBuilder::any());
    }

    /// Whether an operation in flight uses memory in one of these ranges of device addresses.
    pub(crate) fn uses(&self, ranges: &[IovaRange]) -> bool {
        let mut slots = self.slots.iter().flatten();
        !ranges.is_empty() && slots.any(|slot| slot.uses(ranges))
    }

    /// Waits until nothing is in flight, at most for `limit`. Once [`Engine::in_flight`] is 0, the
    /// kernel no longer accesses guest memory.
    pub(crate) fn drain(&mut self, limit: Duration) -> Vec<Done> {
        self.drain_while(limit, |engine| engine.in_flight() > 0)
    }

    /// Waits as long as `is_awaited`, which needs something in flight, at most for `limit`.
    pub(crate) fn drain_while(
        &mut self,
        limit: Duration,
        is_awaited: impl Fn(&Self) -> bool,
    ) -> Vec<Done> {
        let begin = Instant::now();
        let mut finished = self.reap();
        while is_awaited(self) {
            let left = limit.saturating_sub(begin.elapsed());
            if left.is_zero() {
                break;
            }
            let left = Timespec::from(left);
            let limit = SubmitArgs::new().timespec(&left);
            match self.ring.submitter().submit_with_args(1, &limit) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ETIME)) => {}
                Err(_) => thread::sleep(SHORT_OF_MEMORY),
            }
            finished.extend(self.reap());
        }
        finished
    }

    /// Whether a completion waits for [`Engine::reap`].
    pub(crate) fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn resume(&mut self, index: u16) -> io::Result<()> {
        if let Some(slot) = self
            .slots
            .get_mut(usize::from(index))
            .and_then(Option::as_mut)
        {
            slot.vectors = vectors(&slot.io, &self.memory, slot.done)?;
        }
        self.enqueue(index)
    }

    fn enqueue(&mut self, index: u16) -> io::Result<()> {
        let slot = self
            .slots
            .get(usize::from(index))
            .and_then(Option::as_ref)
            .ok_or(io::ErrorKind::NotFound)?;
        let entry = self.entry(slot)?.user_data(u64::from(index));
        // SAFETY: needed to pass pointers to the kernel. The vectors live in the slot, and guest
        // memory in `self.memory`, until the completion is reaped; `drop` ensures that. The
        // kernel writes only to guest memory, which is shared with the guest anyway and never
        // accessed through references. The file is open as long as `self.disk`.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)
    }

    fn entry(&self, slot: &Slot) -> io::Result<squeue::Entry> {
        let file = Fd(self.disk.file().as_raw_fd());
        let vectors = slot.vectors.0.as_ptr();
        let count = u32::try_from(slot.vectors.0.len()).map_err(io::Error::other)?;
        Ok(match &slot.io {
            Io::Read(transfer) => opcode::Readv::new(file, vectors, count)
                .offset(transfer.offset + slot.done)
                .build(),
            Io::Write(transfer) => opcode::Writev::new(file, vectors, count)
                .offset(transfer.offset + slot.done)
                .rw_flags(if self.write_through {
                    libc::RWF_DSYNC
                } else {
                    0
                })
                .build(),
            Io::Flush => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        })
    }

    fn release(&mut self, index: u16) -> Option<Slot> {
        let slot = self.slots.get_mut(usize::from(index))?.take()?;
        self.free.push(index);
        self.bytes -= slot.len();
        self.cancelled &= self.in_flight() > 0;
        Some(slot)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.cancel();
        self.drain(CLOSE_TIME);
        let in_flight = self.in_flight();
        // SAFETY: needed because a value that is dropped cannot be taken apart otherwise. Nothing
        // uses the field after this.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if in_flight > 0 {
            let slots = std::mem::take(&mut self.slots);
            // The duplicate keeps the image's lock.
            let file = self.disk.file().try_clone();
            outlive(ring, in_flight, (slots, self.memory.clone(), file));
        }
    }
}

/// Keeps what the kernel uses until the operations have ended, in a thread of its own.
fn outlive(ring: Ring, mut in_flight: usize, used: impl Send + 'static) {
    tracing::warn!(
        in_flight,
        "the storage of a disk does not answer: closing it later"
    );
    HUNG.fetch_add(1, Ordering::Release);
    // If the thread cannot start, nothing is freed: the kernel may still write there.
    let mut kept = ManuallyDrop::new((ring, used));
    let wait = move || {
        while in_flight > 0 {
            if kept.0.submit_and_wait(1).is_err() {
                thread::sleep(SHORT_OF_MEMORY);
            }
            in_flight = in_flight.saturating_sub(kept.0.completion().count());
        }
        drop(ManuallyDrop::into_inner(kept));
        HUNG.fetch_sub(1, Ordering::Release);
        tracing::info!("the storage of the disk has answered: closed it");
    };
    if let Err(error) = thread::Builder::new().name("disk-drain".into()).spawn(wait) {
        tracing::error!(%error, "cannot start a thread: the disk stays open");
    }
}

/// Evaluates the kernel's result of an operation.
fn judge(slot: &mut Slot, result: i32, may_resume: bool) -> Progress {
    let Ok(now) = u64::try_from(result) else {
        let transient = matches!(-result, libc::EINTR | libc::EAGAIN);
        if transient && may_resume && slot.retries < MAX_RETRIES {
            slot.retries += 1;
            return Progress::Again;
        }
        return Progress::Finished(Err(io::Error::from_raw_os_error(-result)));
    };
    let Some(len) = slot.transfer().map(|transfer| transfer.len) else {
        return Progress::Finished(Ok(0));
    };
    slot.done = slot.done.saturating_add(now).min(len);
    if slot.done == len {
        let written = if matches!(slot.io, Io::Read(_)) {
            len
        } else {
            0
        };
        Progress::Finished(Ok(written))
    } else if now == 0 {
        // The image became shorter than the disk.
        Progress::Finished(Err(io::ErrorKind::UnexpectedEof.into()))
    } else if may_resume {
        Progress::Again
    } else {
        Progress::Finished(Err(io::ErrorKind::Interrupted.into()))
    }
}

/// Marks the kernel's writes, which bypass the bitmap.
fn mark_dirty(memory: &DeviceMemory, data: &[Piece]) {
    for piece in data {
        let Ok(len) = usize::try_from(piece.len) else {
            continue;
        };
        let address = GuestAddress(piece.iova.0);
        let Ok(slices) = memory.get_slices(address, len, Permissions::Write) else {
            continue;
        };
        for slice in slices.flatten() {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_transfers_continue_and_empty_ones_end() {
        let slot = |done| Slot {
            ticket: Ticket {
                head: 0,
                status: DeviceAddress(0),
            },
            io: Io::Read(Transfer {
                offset: 0,
                len: 1024,
                data: Vec::new(),
            }),
            vectors: Vectors(Vec::new()),
            done,
            retries: 0,
        };
        assert!(matches!(judge(&mut slot(0), 512, true), Progress::Again));
        assert!(matches!(
            judge(&mut slot(512), 512, true),
            Progress::Finished(Ok(1024))
        ));
        // The end of the file, a reset, a real error.
        for (result, may_resume) in [(0, true), (512, false), (-libc::EIO, true)] {
            assert!(matches!(
                judge(&mut slot(0), result, may_resume),
                Progress::Finished(Err(_))
            ));
        }
        // A result above the requested length is impossible; if it occurs, it counts as the whole
        // length.
        assert!(matches!(
            judge(&mut slot(512), i32::MAX, true),
            Progress::Finished(Ok(1024))
        ));
        // Transient errors are retried, but not for ever.
        let mut stuck = slot(0);
        let tries = (0..100)
            .take_while(|_| matches!(judge(&mut stuck, -libc::EAGAIN, true), Progress::Again))
            .count();
        assert_eq!(tries, usize::from(MAX_RETRIES));
    }
}
