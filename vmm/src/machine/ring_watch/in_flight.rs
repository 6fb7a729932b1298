//! Counts the buffers that NICs have received and not used at one moment, such as the stop of a
//! guest.
//!
//! Owns the count, by the role of the queues. It must not know the purpose of the count.

use bellhop_api::machine::InFlight;
use devices::virtio::backend::QueueRole;
use devices::virtio::pci::{RunningRing, VirtioPciDevice};
use vdpa::memory::DeviceMemory;

use crate::machine::devices::VIRTIO_ID_NET;

/// Adds the buffers of a device. Devices other than NICs add none.
pub(in crate::machine) fn add(count: &mut InFlight, device: &VirtioPciDevice) {
    if device.describe().device_type == VIRTIO_ID_NET {
        device.running_rings(|ring, memory| add_ring(count, ring, memory));
    }
}

fn add_ring(count: &mut InFlight, ring: &RunningRing, memory: Option<&DeviceMemory>) {
    let kind = match ring.role {
        QueueRole::Receive => &mut count.rx,
        // receiveq1, transmitq1, ..., controlq (virtio 1.3, 5.1.2).
        QueueRole::Request if ring.index.is_multiple_of(2) => &mut count.cvq,
        QueueRole::Request => &mut count.tx,
        QueueRole::Other => return,
    };
    if ring.packed {
        return;
    }
    if let Some((avail, used)) = memory.and_then(|memory| super::indices(ring, memory)) {
        // A driver may write any value there.
        let count = avail.wrapping_sub(used).min(ring.addresses.size);
        *kind = kind.saturating_add(count.into());
    }
}
