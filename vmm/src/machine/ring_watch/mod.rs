//! Ring watch: observes queues that no thread of this process serves.
//!
//! Kicks go to the device and interrupts to the guest without a thread of Bellhop. So there is
//! nothing to count, and a hung queue goes unnoticed. But the indices of split rings are in guest
//! RAM, including those of relayed rings. Two loads per queue and second give the buffers in
//! flight, rates, and an alarm for a queue that hangs (`queue.rs` decides).
//!
//! ```text
//!   timerfd, 1 s ──> vmm thread: sample, while vCPUs run ──> status (alarms), log
//!                                  │      │
//!                     guest RAM <──┘      └──> once per alarm, if enabled:
//!                     indices                  kick the device, interrupt the driver
//! ```
//! Owns the samples of each device, and the timer, which also serves
//! [`removal`](super::removal). It must not know the type of the device behind a queue, only the
//! queue's role. A sample allocates nothing. Guest memory is hostile: a ring is read where its
//! driver placed it, through the one guest-memory type, and impossible indices are reported.
//!
//! The timer alone wakes the vmm thread of an idle machine. `ring_watch: "off"` disables the
//! samples. A packed ring has no indices in memory. Its descriptors show the driver's position.
//! But a device skips the descriptors of a chain that it uses, so they do not show the buffers in
//! flight. Packed rings are not watched, and the state says so.

pub(super) mod in_flight;
mod queue;

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmKind, WatchInfo, WatchPhase};
use devices::virtio::pci::{RunningRing, VirtioPciDevice};
use vdpa::iova::DeviceAddress;
use vdpa::memory::DeviceMemory;
use vm_memory::{Bytes as _, GuestAddress};

use self::queue::{Event, QueueWatch};
use crate::event_loop::Timer;

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(1);

/// How often the indices are read until they are consistent.
const TRIES: u32 = 4;

/// Has the timer expire a period from now, and then each period.
pub(super) fn arm(timer: &Timer) -> io::Result<()> {
    timer.set(PERIOD, PERIOD)
}

/// The watch of one device.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    /// Whether a hung queue is kicked and its driver interrupted.
    stall_kick: bool,
    /// [`RunningRing::start`] of the last sample.
    start: Option<u64>,
    queues: Vec<Watched>,
}

/// One of its queues.
#[derive(Debug)]
struct Watched {
    watch: QueueWatch,
    /// It runs now.
    runs: bool,
    /// The events of the current sample; a start and a sample can cause one each.
    events: [Option<Event>; 2],
}

impl DeviceWatch {
    /// Creates the watch of a device with this many queues. A complaint becomes an alarm after
    /// `threshold`; with `stall_kick`, the queue is then kicked and its driver interrupted once.
    pub(super) fn new(queues: usize, threshold: Duration, stall_kick: bool) -> Self {
        let queue = || Watched {
            watch: QueueWatch::new(threshold),
            runs: false,
            events: [None, None],
        };
        Self {
            stall_kick,
            start: None,
            queues: std::iter::repeat_with(queue).take(queues).collect(),
        }
    }

    /// Returns the status of all queues, in the order of their indices.
    pub(super) fn status(&self) -> impl Iterator<Item = WatchInfo> {
        self.queues.iter().map(|queue| queue.watch.status())
    }

    /// Returns the alarms of its queues that are announced and not over.
    pub(super) fn alarms(&self) -> impl Iterator<Item = (u16, AlarmKind)> {
        let queues = (0..=u16::MAX).zip(&self.queues);
        queues.filter_map(|(index, queue)| Some((index, queue.watch.alarm()?)))
    }

    /// The vCPUs resume after a pause.
    pub(super) fn resume(&mut self, now: Instant) {
        for queue in &mut self.queues {
            queue.watch.resume(now);
        }
    }

    /// Samples all queues. Returns `true` if an alarm began or ended.
    pub(super) fn sample(&mut self, id: &str, device: &VirtioPciDevice, now: Instant) -> bool {
        for queue in &mut self.queues {
            queue.runs = false;
        }
        device.running_rings(|ring, memory| self.look(ring, memory, now));
        let mut changed = false;
        for (index, queue) in (0..=u16::MAX).zip(&mut self.queues) {
            if !queue.runs {
                let ended = queue.watch.stop(now, WatchPhase::NotRunning);
                queue.events[0] = queue.events[0].or(ended);
            }
            for event in std::mem::take(&mut queue.events).into_iter().flatten() {
                changed = true;
                tell(id, index, event);
                if self.stall_kick
                    && may_be_lost_notification(event)
                    && device.spurious_notify(index)
                {
                    queue.watch.count_stall_kick();
                    tracing::info!(
                        device = %id,
                        queue = index,
                        "kicked the device and interrupted the driver, in case either was lost"
                    );
                }
            }
        }
        changed
    }

    fn look(&mut self, ring: &RunningRing, memory: Option<&DeviceMemory>, now: Instant) {
        if self.start.replace(ring.start) != Some(ring.start) {
            for queue in &mut self.queues {
                queue.events[0] = queue.watch.stop(now, WatchPhase::NotRunning);
            }
        }
        let Some(queue) = self.queues.get_mut(usize::from(ring.index)) else {
            return;
        };
        queue.runs = true;
        let watch = &mut queue.watch;
        if watch.status().state == WatchPhase::NotRunning {
            watch.start(ring.role, ring.addresses.size);
        }
        queue.events[1] = if ring.packed {
            watch.stop(now, WatchPhase::NotWatchedPacked)
        } else if let Some((avail, used)) = memory.and_then(|memory| indices(ring, memory)) {
            watch.sample(now, avail, used)
        } else {
            watch.stop(now, WatchPhase::Unreadable)
        };
    }
}

/// Whether a lost kick or interrupt may be the cause, so that a kick can help.
fn may_be_lost_notification(event: Event) -> bool {
    matches!(
        event,
        Event::Began(AlarmKind::Stuck | AlarmKind::DriverStalled)
    )
}

/// Returns the avail and the used index (virtio 1.3, 2.7.6 and 2.7.8). `None`: the ring is outside
/// guest memory, or not mapped behind an IOMMU.
fn indices(ring: &RunningRing, memory: &DeviceMemory) -> Option<(u16, u16)> {
    let load = |area: DeviceAddress| {
        let address = GuestAddress(area.checked_add(2)?.0);
        let index: u16 = memory.load(address, Ordering::Acquire).ok()?;
        Some(u16::from_le(index))
    };
    let mut avail = 0;
    let mut used = load(ring.addresses.device)?;
    for _ in 0..TRIES {
        // Used first: then no conforming driver can be behind the device.
        avail = load(ring.addresses.driver)?;
        if avail.wrapping_sub(used) <= ring.addresses.size {
            return Some((avail, used));
        }
        let later = load(ring.addresses.device)?;
        if later == used {
            // The used index did not move in between, so the indices are inconsistent.
            return Some((avail, used));
        }
        used = later;
    }
    // A queue so fast that it advances by its size between two loads.
    let in_flight = avail.wrapping_sub(used);
    Some((
        avail,
        if in_flight <= ring.addresses.size {
            used
        } else {
            avail
        },
    ))
}

fn tell(id: &str, queue: u16, event: Event) {
    match event {
        Event::Began(alarm) => {
            let what = match alarm {
                AlarmKind::Stuck => {
                    "is stuck: buffers wait for the device, but it uses none; if a kick was lost, \
                     stall_kick=on recovers it; otherwise reset the device from its driver (unbind \
                     and bind) or reset the machine"
                }
                AlarmKind::DriverStalled => {
                    "is stalled: all receive buffers are used, and the driver posts no others; its \
                     interface is down, the guest hangs, or an interrupt was lost, which \
                     stall_kick=on recovers"
                }
                AlarmKind::Inconsistent => {
                    "has an impossible avail index: more is in flight than the ring holds; the \
                     guest's driver is broken or hostile"
                }
                // Not of a ring.
                AlarmKind::Refused | AlarmKind::DeviceError | AlarmKind::Unknown => {
                    "has an unknown fault"
                }
            };
            tracing::warn!(device = %id, queue, "queue {queue} of {id} {what}");
        }
        Event::Ended { alarm, lasted } => {
            let seconds = lasted.as_secs();
            tracing::info!(
                device = %id,
                queue,
                ?alarm,
                "queue {queue} of {id} recovered or stopped after {seconds} s"
            );
        }
    }
}

#[cfg(test)]
mod tests;
