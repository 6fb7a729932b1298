//! The status of the guest's IOMMU, with the names of the devices behind it.

use std::time::Instant;

use bellhop_api::machine::{IommuInfo, IommuRefusal};
use devices::virtio::iommu::Refusal;

use super::DeviceManager;

impl DeviceManager {
    /// Returns the status of the guest's IOMMU, if it has one.
    pub(in super::super) fn iommu_info(&self) -> Option<IommuInfo> {
        let domains = self.iommu.as_ref()?.lock();
        let counters = domains.counters();
        Some(IommuInfo {
            mappings: u64::try_from(counters.mappings).unwrap_or(u64::MAX),
            kicks: counters.kicks,
            change_sets: counters.sets,
            maps: counters.maps,
            unmaps: counters.unmaps,
            refused: counters.refused,
            last_refusal: domains.last_refusal().map(|last| self.named_refusal(last)),
        })
    }

    /// Samples the refusals. Returns `true` if their alarm began or ended.
    pub(super) fn sample_refusals(&mut self, now: Instant) -> bool {
        // A vCPU that serves requests has the lock: the next sample counts its refusals.
        let Some(domains) = self.iommu.as_ref().and_then(|iommu| iommu.try_lock()) else {
            return false;
        };
        let refused = domains.refused();
        let last = domains.last_refusal().cloned();
        drop(domains);
        let last = last.map(|last| self.named_refusal(&last));
        self.refusals.sample(refused, last, now)
    }

    fn named_refusal(&self, refusal: &Refusal) -> IommuRefusal {
        let mut entries = self.entries.values();
        let entry = entries.find(|entry| entry.endpoint == Some(refusal.endpoint));
        IommuRefusal {
            // It may have been unplugged since.
            device: entry.map_or_else(
                || format!("endpoint {:#x}", refusal.endpoint),
                |entry| entry.id.clone(),
            ),
            iova: refusal.range.map(|range| range.first()),
            size: refusal.range.and_then(|range| range.size()),
            cause: refusal.cause.clone(),
        }
    }
}
