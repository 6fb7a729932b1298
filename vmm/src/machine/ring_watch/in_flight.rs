//! What NICs have been given and have not used at a moment, such as that at which a guest was stopped.
//!
//! Owns the count, by what the queues are for. It must not know why somebody counts.

use devices::virtio::backend::QueueRole;
use devices::virtio::pci::{RunningRing, VirtioPciDevice};
use serde::Serialize;
use utoipa::ToSchema;
use vdpa::memory::GuestMemory;

use crate::machine::devices::VIRTIO_ID_NET;

/// Buffers that NICs had been given and had not used when the guest was stopped, by what the queues are for. Packed rings do
/// not tell it, and are not counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct InFlight {
    /// Receive buffers that were not filled.
    pub rx: u32,
    /// Frames that were not sent.
    pub tx: u32,
    /// Commands on control queues that were not answered.
    pub cvq: u32,
}

impl InFlight {
    /// Adds a device's. Others than NICs have none.
    pub(in crate::machine) fn add(&mut self, device: &VirtioPciDevice, memory: &GuestMemory) {
        if device.describe().device_type == VIRTIO_ID_NET {
            device.running_rings(|ring| self.add_ring(ring, memory));
        }
    }

    fn add_ring(&mut self, ring: &RunningRing, memory: &GuestMemory) {
        let kind = match ring.role {
            QueueRole::Receive => &mut self.rx,
            // receiveq1, transmitq1, ..., controlq (virtio 1.3, 5.1.2).
            QueueRole::Request if ring.index.is_multiple_of(2) => &mut self.cvq,
            QueueRole::Request => &mut self.tx,
            QueueRole::Other => return,
        };
        if ring.packed {
            return;
        }
        if let Some((avail, used)) = super::indices(ring, memory) {
            // A driver may write what it likes there.
            let count = avail.wrapping_sub(used).min(ring.addresses.size);
            *kind = kind.saturating_add(count.into());
        }
    }
}
