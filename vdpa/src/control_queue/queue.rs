//! The VMM's own ring to the device's control queue.
//!
//! ```text
//!   memory        | ring: read part | ring: written part | command 16 KiB | ack |
//!   the device       reads only        reads and writes     reads only     writes
//!
//!              submit                        poll: the device used it
//!     idle ------------> command in flight ------------------------> idle
//!                              |                     (Answer)
//!                              +---- it broke a rule ---> broken (reset needed)
//! ```
//! One command is in flight at a time, as with the guest's driver. On a device with one address
//! space a guest can name these pages in a descriptor. So pages that the device only reads are
//! mapped read-only. Pages that it writes are separate, and their content is checked when it is
//! read.
//!
//! The ring has the negotiated format. Both formats of its size use the same pages, so the memory
//! stays mapped when the format changes. A packed ring's descriptors cannot be read-only for the
//! device. In a shared address space a guest can therefore have the device overwrite them. It can
//! then send unchecked commands to its own device, within the memory that is mapped for it. The
//! VMM's own view of the ring does not come from these pages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::virtio_net::{VIRTIO_NET_ERR, VIRTIO_NET_OK};
use vmm_sys_util::eventfd::EventFd;

use super::command::{COMMAND_LEN_MAX, Command};
use crate::Error;
use crate::device::{DeviceInfo, VringConfig};
use crate::iotlb::{Access, Iotlb, IotlbSink, Mapping};
use crate::iova::{IovaRange, PAGE_SIZE};
use crate::memory::SharedBuffer;
use crate::ring::{Direction, DriverQueue, Piece, RingFeatures, RingFormat, RingLayout, no_chain};
use crate::uapi::BackendFeatures;

/// Room for a command. No command exceeds [`COMMAND_LEN_MAX`].
const COMMAND_AREA: u64 = 16 * 1024;
const _: () = assert!(COMMAND_LEN_MAX <= 16 * 1024);
/// Entries of the ring: a command takes three descriptors.
const RING_SIZE: u16 = 16;
/// The ack byte before the device writes it. It reveals a device that uses the chain without
/// writing an answer.
const NO_ACK: u8 = 0xff;
/// Time after which a caller should give up on an answer, and on the device.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The address space in which the control queue's memory is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// In an address space that no guest queue can access.
    OwnAddressSpace {
        /// The control queue's group, for `Device::set_group_asid`.
        group: u32,
        /// The address space.
        asid: u32,
    },
    /// In address space 0, beside guest RAM.
    Shared,
}

impl Placement {
    /// Isolates the queue if the device has a second address space, the kernel honours it, and no
    /// other queue is in this one's group.
    #[must_use]
    pub fn choose(info: &DeviceInfo, acked: BackendFeatures, queue: u16) -> Self {
        let own = info.queues.get(usize::from(queue)).and_then(|q| q.group);
        let Some(group) = own else {
            return Self::Shared;
        };
        let members = info
            .queues
            .iter()
            .filter(|queue| queue.group == Some(group) || queue.descriptor_group == Some(group));
        let able = info.address_spaces >= 2 && acked.contains(BackendFeatures::IOTLB_ASID);
        // Rings in another group than the buffers would stay behind in ASID 0.
        let whole = info
            .queues
            .get(usize::from(queue))
            .is_some_and(|queue| queue.descriptor_group.is_none_or(|rings| rings == group));
        if able && whole && members.count() == 1 {
            Self::OwnAddressSpace { group, asid: 1 }
        } else {
            Self::Shared
        }
    }

    /// The address space.
    #[must_use]
    pub fn asid(&self) -> u32 {
        match *self {
            Self::OwnAddressSpace { asid, .. } => asid,
            Self::Shared => 0,
        }
    }
}

/// The device's answer to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// VIRTIO_NET_OK.
    Ok,
    /// VIRTIO_NET_ERR.
    Err,
}

/// For `map_err`: the memory cannot be created or accessed.
fn memory(source: Error) -> Error {
    Error::other("the control queue has no memory").because(source)
}

/// For `map_err`: the ring is full or broken.
fn ring(source: Error) -> Error {
    Error::other("the control queue's ring failed").because(source)
}

/// For `map_err`: an eventfd cannot be created or waited for.
fn event(source: std::io::Error) -> Error {
    Error::other("the control queue's eventfd failed").because(source)
}

/// Offsets of the parts in the memory.
#[derive(Debug, Clone, Copy)]
struct Parts {
    /// Start of the ring pages that the device writes.
    ring_writable: u64,
    command: u64,
    ack: u64,
}

/// The VMM's control queue.
#[derive(Debug)]
pub struct ControlQueue {
    memory: Arc<SharedBuffer>,
    parts: Parts,
    ring: DriverQueue,
    kick: EventFd,
    call: EventFd,
    /// Head of the command's chain while the device has it.
    in_flight: Option<u16>,
}

impl ControlQueue {
    /// Bytes of I/O virtual address space that the queue needs, for
    /// [`crate::window::PrivateWindow::allocate`].
    ///
    /// # Errors
    /// None in practice: the ring's size is a constant.
    pub fn memory_size() -> Result<u64, Error> {
        Ok(Self::parts()?.ack + PAGE_SIZE)
    }

    fn parts() -> Result<Parts, Error> {
        // A test checks that a packed ring of this size has the same pages.
        let layout = RingLayout::new(RingFormat::Split, RING_SIZE).map_err(ring)?;
        let command = layout.size();
        Ok(Parts {
            ring_writable: layout.writable_offset(),
            command,
            ack: command + COMMAND_AREA,
        })
    }

    /// Creates the queue with its memory at `iova`. `features` are the negotiated ones.
    ///
    /// # Errors
    /// The memory or an eventfd cannot be created.
    pub fn new(iova: u64, features: RingFeatures) -> Result<Self, Error> {
        let parts = Self::parts()?;
        let buffer = SharedBuffer::new(Self::memory_size()?, iova).map_err(memory)?;
        let buffer = Arc::new(buffer);
        let ring = DriverQueue::new(Arc::clone(&buffer), RING_SIZE, 0, features).map_err(ring)?;
        Ok(Self {
            memory: buffer,
            parts,
            ring,
            kick: crate::eventfd::new().map_err(event)?,
            call: crate::eventfd::new().map_err(event)?,
            in_flight: None,
        })
    }

    /// Maps the queue's memory for the device, each piece as small and with as few rights as
    /// possible.
    ///
    /// # Errors
    /// As [`Iotlb::map`]; nothing is mapped then.
    pub fn map<S: IotlbSink>(&self, iotlb: &mut Iotlb<S>, asid: u32) -> Result<(), Error> {
        let Parts {
            ring_writable,
            command,
            ack,
        } = self.parts;
        let mut batch = iotlb.batch(asid)?;
        batch.announce(ack + PAGE_SIZE);
        for (first, end, access) in [
            (0, ring_writable, Access::ReadOnly),
            // Devices read their own index back. A packed ring lies here whole.
            (ring_writable, command, Access::ReadWrite),
            (command, ack, Access::ReadOnly),
            (ack, ack + PAGE_SIZE, Access::ReadWrite),
        ] {
            let mapping = Mapping {
                region: Arc::clone(&self.memory) as _,
                offset: first,
                access,
            };
            batch.map(self.memory.range().first() + first, end - first, mapping)?;
        }
        batch.commit()
    }

    /// Starts over after a device reset: an empty ring, nothing in flight, the same memory and
    /// eventfds. `features` are those negotiated now.
    ///
    /// # Errors
    /// The memory cannot be accessed.
    pub fn restart(&mut self, features: RingFeatures) -> Result<(), Error> {
        let memory = Arc::clone(&self.memory);
        self.ring = DriverQueue::new(memory, RING_SIZE, 0, features).map_err(ring)?;
        self.in_flight = None;
        // The error is EAGAIN: nothing was signalled.
        let _ = self.call.read();
        Ok(())
    }

    /// Undoes [`ControlQueue::map`].
    ///
    /// # Errors
    /// As [`Iotlb::unmap`].
    pub fn unmap<S: IotlbSink>(&self, iotlb: &mut Iotlb<S>, asid: u32) -> Result<(), Error> {
        let Parts {
            ring_writable,
            command,
            ack,
        } = self.parts;
        let mut batch = iotlb.batch(asid)?;
        for first in [0, ring_writable, command, ack] {
            batch.unmap(self.memory.range().first() + first)?;
        }
        batch.commit()
    }

    /// The ring's description for `Device::set_vring`.
    #[must_use]
    pub fn vring_config(&self) -> VringConfig<'_> {
        VringConfig {
            size: self.ring.size(),
            addresses: self.ring.addresses(),
            base: self.ring.initial_base(),
            kick: Some(&self.kick),
            call: Some(&self.call),
        }
    }

    /// The memory that the ring lies in, for the same call.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.memory.range()
    }

    /// The memory itself, for a device in this process.
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedBuffer> {
        &self.memory
    }

    /// Becomes readable when an answer may be there. Non-blocking.
    #[must_use]
    pub fn call(&self) -> &EventFd {
        &self.call
    }

    /// Kicks again if the device has a command: a device that was suspended may have missed the
    /// kick.
    pub fn spurious_notify(&self) {
        if self.is_busy() {
            // The only failure is a counter at its maximum, which is a kick too.
            let _ = self.kick.write(1);
        }
    }

    /// Whether a command awaits its answer.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Sends a command. The caller then waits for [`ControlQueue::call`] and calls
    /// [`ControlQueue::poll`], for at most [`ANSWER_TIMEOUT`].
    ///
    /// # Errors
    /// One command is in flight already, or the ring is broken.
    pub fn submit(&mut self, command: &Command) -> Result<(), Error> {
        if self.is_busy() {
            return Err(Error::other(
                "an earlier control command still waits for its answer",
            ));
        }
        let bytes = command
            .encode()
            .map_err(Error::context("the control command is not valid"))?;
        let Parts { command, ack, .. } = self.parts;
        self.memory.write(command, &bytes).map_err(memory)?;
        self.memory.write(ack, &[NO_ACK]).map_err(memory)?;
        // Header, data and ack are separate pieces, as in the Linux driver: some parents do not
        // join pieces.
        let (header, data) = bytes.split_at(2);
        let mut chain = vec![self.piece(command, header.len(), Direction::DeviceReads)?];
        if !data.is_empty() {
            chain.push(self.piece(command + 2, data.len(), Direction::DeviceReads)?);
        }
        chain.push(self.piece(ack, 1, Direction::DeviceWrites)?);
        self.in_flight = Some(self.ring.add(&chain).map_err(ring)?);
        if self.ring.needs_kick().map_err(ring)? {
            self.kick.write(1).map_err(event)?;
        }
        Ok(())
    }

    fn piece(&self, offset: u64, len: usize, direction: Direction) -> Result<Piece, Error> {
        let len = u32::try_from(len).map_err(|_| ring(no_chain()))?;
        Ok(Piece {
            iova: self.memory.iova(offset, u64::from(len)).map_err(memory)?,
            len,
            direction,
        })
    }

    /// Takes the answer if there is one. Never blocks.
    ///
    /// # Errors
    /// The device broke a rule; it must be reset.
    pub fn poll(&mut self) -> Result<Option<Answer>, Error> {
        // Clear the eventfd before reading the ring, so that no later signal is lost. The error is
        // EAGAIN: nothing was signalled.
        let _ = self.call.read();
        // The ring accepts only outstanding chains, and one chain is outstanding.
        if self.ring.pop_used().map_err(ring)?.is_none() {
            return Ok(None);
        }
        self.in_flight = None;
        let mut ack = [NO_ACK];
        self.memory.read(self.parts.ack, &mut ack).map_err(memory)?;
        // The used length is ignored: some parents leave it 0, and NO_ACK shows whether the device
        // wrote the byte.
        match u32::from(ack[0]) {
            VIRTIO_NET_OK => Ok(Some(Answer::Ok)),
            VIRTIO_NET_ERR => Ok(Some(Answer::Err)),
            answer => Err(Error::other(format!(
                "the device answered a control command with {answer:#04x}"
            ))),
        }
    }

    /// Sends a command and waits for its answer. For activation and replay, where there is nothing
    /// else to do; never on a thread that must not block.
    ///
    /// # Errors
    /// As [`ControlQueue::submit`] and [`ControlQueue::poll`]; or no answer came in time. The
    /// command is still in flight then: the device must be reset.
    pub fn execute(&mut self, command: &Command, timeout: Duration) -> Result<Answer, Error> {
        self.submit(command)?;
        let begin = Instant::now();
        loop {
            if let Some(answer) = self.poll()? {
                return Ok(answer);
            }
            let left = timeout.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(Error::other(format!(
                    "the device did not answer a control command within {timeout:?}"
                )));
            }
            let left = Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: 10,
                tv_nsec: 0,
            });
            let mut fds = [PollFd::from_borrowed_fd(self.call_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(event(errno.into())),
            }
        }
    }

    fn call_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        crate::eventfd::descriptor(&self.call)
    }
}

#[cfg(test)]
mod tests;
