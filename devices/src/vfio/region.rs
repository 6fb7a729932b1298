//! The parts of BARs that the guest reaches without an exit.
//!
//! Owns the mappings of the device's pages and their places in the guest. It must not know why the
//! device's memory is enabled.
//!
//! ```text
//!               BAR decoded at an address
//!   unmapped ------------------------------> mapped (memory slot)
//!      ^                                        |
//!      +----------------------------------------+
//!       BAR moves, memory disabled, reset, memory fault
//! ```
//! An unmapped part still answers: each access exits and becomes a read or write of the host.

use std::sync::Arc;

use tracing::{error, warn};

use super::MappedArea;
use super::config::Part;
use super::host::{BARS, Host, Region};
use crate::hypervisor::{DeviceMappings, DevicePages};

const PAGE: u64 = 4096;
/// The most parts of one device that are mapped, because memory slots are few.
const AREAS_MAX: usize = 64;

/// Returns the pages of `region` that can be mapped and lie outside `holes`: offset and length.
pub(super) fn mappable(region: &Region, holes: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut areas: Vec<(u64, u64)> = Vec::new();
    for &(offset, len) in &region.areas {
        let end = offset.saturating_add(len).min(region.size) / PAGE * PAGE;
        if let Some(start) = offset
            .checked_next_multiple_of(PAGE)
            .filter(|start| *start < end)
        {
            areas.push((start, end));
        }
    }
    for &(offset, len) in holes {
        let first = offset / PAGE * PAGE;
        let end = offset.saturating_add(len);
        let end = end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let around = |(start, stop): (u64, u64)| {
            let left = (start, stop.min(first));
            let right = (start.max(end), stop);
            [left, right]
                .into_iter()
                .filter(|(start, stop)| start < stop)
        };
        areas = areas.into_iter().flat_map(around).collect();
    }
    areas
        .into_iter()
        .map(|(start, end)| (start, end - start))
        .collect()
}

#[derive(Debug)]
struct Area {
    bar: u8,
    offset: u64,
    pages: Arc<dyn DevicePages>,
    /// The guest-physical address.
    mapped: Option<u64>,
}

/// The mapped parts of all BARs of a device.
#[derive(Debug)]
pub(super) struct MappedBars {
    areas: Vec<Area>,
    mappings: Arc<dyn DeviceMappings>,
}

impl MappedBars {
    /// Maps the pages of all BARs but those of `holes` into this process. A part that cannot be
    /// mapped stays slow.
    pub(super) fn new(
        host: &dyn Host,
        regions: &[Region; BARS],
        holes: &[Part],
        mappings: Arc<dyn DeviceMappings>,
    ) -> Self {
        let mut areas = Vec::new();
        for (bar, region) in (0..).zip(regions) {
            let holes = holes.iter().filter(|hole| hole.bar == bar);
            let holes: Vec<_> = holes.map(|hole| (hole.offset, hole.len)).collect();
            for (offset, size) in mappable(region, &holes) {
                if areas.len() == AREAS_MAX {
                    warn!(
                        bar,
                        offset, "too many parts of BARs: accesses here are slow"
                    );
                    continue;
                }
                match host.map(bar, offset, size) {
                    Ok(pages) => areas.push(Area {
                        bar,
                        offset,
                        pages,
                        mapped: None,
                    }),
                    Err(error) => warn!(
                        bar,
                        offset,
                        %error,
                        "cannot map a part of a BAR: each access there costs an exit"
                    ),
                }
            }
        }
        Self { areas, mappings }
    }

    /// Returns all parts with their places in the guest.
    pub(super) fn areas(&self) -> impl Iterator<Item = MappedArea> {
        self.areas.iter().map(|area| MappedArea {
            bar: area.bar,
            offset: area.offset,
            size: area.pages.size(),
            address: area.mapped,
        })
    }

    /// BAR `bar` is decoded at `address` from now on, or nowhere.
    pub(super) fn moved(&mut self, bar: u8, address: Option<u64>) {
        for area in self.areas.iter_mut().filter(|area| area.bar == bar) {
            area.unmap(&*self.mappings);
            let place = address.and_then(|address| address.checked_add(area.offset));
            let (Some(place), None) = (place, area.mapped) else {
                continue;
            };
            match self.mappings.map(place, Arc::clone(&area.pages)) {
                Ok(()) => area.mapped = Some(place),
                Err(error) => warn!(
                    bar,
                    address = place,
                    %error,
                    "cannot map a part of a BAR into the guest: each access there costs an exit"
                ),
            }
        }
    }

    /// When this returns, no access of the guest reaches the device without an exit.
    pub(super) fn unmap_all(&mut self) {
        for area in &mut self.areas {
            area.unmap(&*self.mappings);
        }
    }

    /// Unmaps the part that an access at `address` met, or all if it is unknown. Returns `true` if
    /// there was one.
    pub(super) fn fault(&mut self, address: Option<u64>) -> bool {
        let mut hit = false;
        for area in &mut self.areas {
            let meant = area.mapped.is_some_and(|mapped| {
                address.is_none_or(|address| {
                    let offset = address.checked_sub(mapped);
                    offset.is_some_and(|offset| offset < area.pages.size())
                })
            });
            if meant {
                area.unmap(&*self.mappings);
                hit = true;
            }
        }
        hit
    }
}

impl Area {
    fn unmap(&mut self, mappings: &dyn DeviceMappings) {
        if let Some(address) = self.mapped {
            match mappings.unmap(address) {
                Ok(()) => self.mapped = None,
                // The address stays recorded, so that unmapping is retried.
                Err(error) => error!(address, %error, "cannot unmap a part of a BAR"),
            }
        }
    }
}

impl Drop for MappedBars {
    fn drop(&mut self) {
        self.unmap_all();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_of_msix_are_left_out() {
        let region = Region {
            size: 0x8000,
            areas: vec![(0, 0x8000)],
        };
        let holes = [(0x2010, 0x30), (0x3000, 8)];
        assert_eq!(mappable(&region, &holes), [(0, 0x2000), (0x4000, 0x4000)]);
        assert!(mappable(&region, &[(0, 0x8000)]).is_empty());
        let small = Region {
            size: 0x100,
            areas: vec![(0, 0x100)],
        };
        assert!(mappable(&small, &[]).is_empty());
    }

    proptest! {
        #[test]
        fn parts_are_pages_inside_the_areas_and_outside_the_holes(
            size in 0u64..0x1_0000,
            areas in prop::collection::vec((0u64..0x2_0000, any::<u64>()), 0..4),
            holes in prop::collection::vec((0u64..0x1_0000, 0u64..0x3000), 0..3),
        ) {
            let region = Region { size, areas };
            for (offset, len) in mappable(&region, &holes) {
                prop_assert!(len > 0 && offset % PAGE == 0 && len % PAGE == 0);
                prop_assert!(offset + len <= size);
                let mut areas = region.areas.iter();
                prop_assert!(areas.any(|(start, area)| *start <= offset
                    && offset + len <= start.saturating_add(*area)));
                for (start, hole) in &holes {
                    let meets = offset < start + hole && *start < offset + len && *hole > 0;
                    prop_assert!(!meets);
                }
            }
        }
    }
}
