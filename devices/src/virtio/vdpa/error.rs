//! Why a vhost-vdpa device cannot be given to a guest, or not go on.

use std::io;

use vdpa::control_queue::{CommandError, ControlQueueError};
use vdpa::device::{DeviceError, OpenError, VringBase};
use vdpa::doorbell::NoDoorbell;
use vdpa::iotlb::IotlbError;
use vdpa::relay::{Reason, RelayError, RelaySetError, TransitionError};
use vdpa::ring::guest::GuestRingError;
use vdpa::ring::packed::StandingError;
use vdpa::window::WindowError;

use crate::virtio::backend::{BackendError, BrokenRing};
use crate::virtio::userspace_queue::QueueError;

/// What went wrong with a vhost-vdpa device.
#[derive(Debug, thiserror::Error)]
pub enum VdpaError {
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device refused something.
    #[error("the device does not work as asked")]
    Device(#[from] DeviceError),
    /// The user expects another number of queues.
    #[error(
        "the device has {has} queues and num_queues is {expected}: leave num_queues out, or \
         create the device with another max_vqp"
    )]
    QueueCount {
        /// What the user said.
        expected: u16,
        /// What the device has.
        has: u16,
    },
    /// A doorbell was asked for where there is none.
    #[error(
        "queue {queue} has no doorbell to give to the guest: leave doorbell=on out (or say \
         doorbell=auto) to kick by eventfds"
    )]
    NoDoorbell {
        /// Index of the queue.
        queue: u16,
        /// What the device says.
        #[source]
        reason: NoDoorbell,
    },
    /// The control queue would lie behind the last queue.
    #[error(
        "the device says max_virtqueue_pairs {max_virtqueue_pairs}, which leaves no room for a \
         control queue among its {has} queues"
    )]
    ControlQueueIndex {
        /// `max_virtqueue_pairs` of its configuration.
        max_virtqueue_pairs: u16,
        /// Number of its queues.
        has: u16,
    },
    /// A MAC address was given for a device that has none.
    #[error(
        "a MAC address is given, but the device has none (it is no network device, or does not \
         offer the feature MAC)"
    )]
    NoMac,
    /// The device's own address differs and it takes no other.
    #[error(
        "the device has another MAC address and takes no commands to change it: create it with \
         the address (`vdpa dev add … mac ADDRESS`)"
    )]
    FixedMac,
    /// There is no room for the VMM's own memory in the device's address range.
    #[error("the device reaches too few addresses")]
    PrivateWindow(#[source] WindowError),
    /// Guest memory cannot be mapped.
    #[error("guest memory cannot be mapped for the device")]
    MapMemory(#[source] IotlbError),
    /// The control queue's memory cannot be mapped.
    #[error("the control queue cannot be mapped for the device")]
    MapControlQueue(#[source] IotlbError),
    /// The VMM's control queue failed.
    #[error("the control queue does not work")]
    ControlQueue(#[from] ControlQueueError),
    /// The device refused a command that brings its state back.
    #[error("the device refused to take up its former state: {command}")]
    Replay {
        /// The command, for people.
        command: String,
    },
    /// The saved control state is none that the device could have had.
    #[error("the saved control state is not possible")]
    SavedControl(#[from] CommandError),
    /// The guest's control queue is malformed.
    #[error("the guest's control queue cannot be served")]
    GuestQueue(#[from] QueueError),
    /// An eventfd, timer or epoll cannot be made or used.
    #[error("cannot make or use an eventfd; the limit of open files (ulimit -n) may be too low")]
    EventFd(#[source] io::Error),
    /// A call in the wrong order.
    #[error("the features are not negotiated")]
    NotNegotiated,
    /// A queue was enabled that the device works on already.
    #[error("queue {index} is enabled already")]
    AlreadyEnabled {
        /// Its index.
        index: u16,
    },
    /// A queue was reset that the device does not work on.
    #[error("queue {index} is not enabled")]
    NotEnabled {
        /// Its index.
        index: u16,
    },
    /// Nothing can stand between the guest's queues and this device.
    #[error("the device's queues cannot be relayed: {reason}")]
    NotRelayable {
        /// Why.
        reason: Reason,
    },
    /// The queues can't be prepared for being relayed.
    #[error("the device's queues cannot be relayed")]
    RelaySet(#[from] RelaySetError),
    /// How the queues reach the device can't be changed, or not now.
    #[error("the way from the guest's queues to the device cannot be changed")]
    Relay(#[from] TransitionError),
    /// There is no thread for relayed queues.
    #[error(
        "cannot make a thread or eventfd for relayed queues; a limit of tasks or open files may be too low"
    )]
    RelayThread(#[source] io::Error),
    /// The relays are lost, or have no device.
    #[error("relayed queues cannot go on: the guest's driver must reset the device")]
    RelaysLost,
    /// A saved state of another device class.
    #[error("the saved state is of device type {saved}, the device has type {has}")]
    OtherDevice {
        /// Type in the state.
        saved: u32,
        /// Type of the device.
        has: u32,
    },
    /// A saved state with features that do not fit.
    #[error("the saved state has the features {saved:#x}, the device offers {offered:#x}")]
    OtherFeatures {
        /// Features in the state.
        saved: u64,
        /// What can be had.
        offered: u64,
    },
    /// A saved state without the position of a queue that the guest uses.
    #[error("the saved state has no position for queue {index}")]
    NoSavedRing {
        /// Its index.
        index: u16,
    },
    /// A saved position that the guest's ring contradicts.
    #[error(
        "queue {queue} cannot go on at {position}: the guest has made buffers available up to {available}"
    )]
    SavedPosition {
        /// Index of the queue.
        queue: u16,
        /// The saved position (avail index, free-running).
        position: u16,
        /// The guest's avail index.
        available: u16,
    },
    /// Saved positions that no packed ring can have.
    #[error("queue {queue}, a packed ring of {size} entries, cannot go on at {base:?}")]
    SavedPackedPosition {
        /// Index of the queue.
        queue: u16,
        /// The saved positions.
        base: VringBase,
        /// Entries of the guest's ring.
        size: u16,
    },
    /// A ring that is not in guest memory.
    #[error("the rings of queue {queue} lie outside guest memory")]
    RingOutsideMemory {
        /// Index of the queue.
        queue: u16,
    },
    /// A device of another class than a network device is to be replaced.
    #[error("only network devices can be replaced while the machine runs")]
    NotReplaceable,
    /// The guest has a control queue at another place than the device.
    #[error(
        "the guest uses {needs} queue pairs at most, the device has {has}: create the device with \
         max_vqp {needs}"
    )]
    OtherQueuePairs {
        /// `max_virtqueue_pairs` that the guest was told.
        needs: u16,
        /// That of the device.
        has: u16,
    },
    /// The guest may send larger frames than the device takes.
    #[error(
        "the guest was told an MTU of {needs}, the device has {has}: create the device with mtu {needs}"
    )]
    SmallerMtu {
        /// What the guest was told.
        needs: u16,
        /// What the device has.
        has: u16,
    },
    /// The guest was told more of receive-side scaling than the device can do.
    #[error("the device hashes less than the guest was told (RSS key, table or hash types)")]
    SmallerHash,
    /// The device has another address than the guest, and the guest's driver lets nobody change it.
    #[error(
        "the device has another MAC address, and the guest's driver did not negotiate \
         CTRL_MAC_ADDR: create the device with the guest's address (`vdpa dev add … mac ADDRESS`)"
    )]
    UnsettableMac,
    /// A device that cannot be suspended works on rings whose position only it knows.
    #[error(
        "the device cannot be suspended, and packed rings do not show where it stands: it cannot be \
         replaced while its driver runs"
    )]
    NoSuspendPacked,
    /// Chains are with the device, and the ring does not say which.
    #[error(
        "queue {queue}: the device has completed buffers out of order and still holds some; the rings do not \
         say which, so another one cannot take them over: try again when the NIC is idle, or have the guest's driver \
         start anew, as unbind and bind do"
    )]
    InFlightUnknown {
        /// Index of the queue.
        queue: u16,
    },
    /// A packed ring does not tell where a device that failed has left it.
    #[error("queue {queue}: where its packed ring stands is not known")]
    Standing {
        /// Index of the queue.
        queue: u16,
        /// Why.
        #[source]
        source: StandingError,
    },
    /// The guest's driver, or its device, has made a ring that is none.
    #[error(
        "queue {queue} is broken: the guest's driver must reset the device, as unbind and bind do"
    )]
    BrokenRing {
        /// Index of the queue.
        queue: u16,
        /// What is wrong with it.
        #[source]
        source: GuestRingError,
    },
}

impl VdpaError {
    /// For the transport: [`BrokenRing`] if that is what it is.
    pub(super) fn into_backend(self) -> BackendError {
        match self.broken_queue() {
            Some(queue) => Box::new(BrokenRing {
                queue,
                source: Box::new(self),
            }),
            None => Box::new(self),
        }
    }

    /// The queue with which nobody can go on, because the guest's driver broke a rule. A device that does so may
    /// serve its guest well otherwise.
    fn broken_queue(&self) -> Option<u16> {
        match self {
            Self::BrokenRing { queue, .. } => Some(*queue),
            Self::Relay(TransitionError::Queue {
                queue,
                source:
                    RelayError::Guest {
                        source: GuestRingError::Guest { .. },
                    }
                    | RelayError::ChainTooLong { .. },
            }) => Some(*queue),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdpa::ring::guest::GuestViolation;

    #[test]
    fn only_a_broken_ring_is_one() {
        let jump = || GuestRingError::from(GuestViolation::AvailJump { ahead: 9, size: 8 });
        let of = |source| VdpaError::Relay(TransitionError::Queue { queue: 2, source });
        for (error, broken) in [
            (of(RelayError::Guest { source: jump() }), true),
            (
                VdpaError::BrokenRing {
                    queue: 2,
                    source: jump(),
                },
                true,
            ),
            (of(RelayError::OutOfOrder), false),
            (of(RelayError::InFlightUnknown { unknown: 3 }), false),
            (VdpaError::InFlightUnknown { queue: 2 }, false),
            (VdpaError::RelaysLost, false),
        ] {
            let error = error.into_backend();
            let known = error.downcast_ref::<BrokenRing>();
            assert_eq!(known.map(|ring| ring.queue), broken.then_some(2), "{error}");
        }
    }
}
