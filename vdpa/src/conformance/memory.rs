//! Rules about the memory that the device can access.

use super::rule::Rule;
use super::subject::{Moved, STUCK, Subject, exercise};
use super::verdict::{Attempt, fail, noted, pass, skipped};
use crate::iotlb::Iotlb;
use crate::uapi::BackendFeatures;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "memory.reach",
        rule: "the device reaches memory that a batch mapped without an error",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_process_iotlb_msg (BATCH_END ignores the result \
                 of set_map)",
        check: reach,
    },
    Rule {
        id: "memory.unbatched",
        rule: "the device reaches memory that was mapped outside a batch",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_map",
        check: unbatched,
    },
    Rule {
        id: "memory.persist",
        rule: "with IOTLB_PERSIST mappings survive a reset",
        source: "include/uapi/linux/vhost_types.h: VHOST_BACKEND_F_IOTLB_PERSIST",
        check: persist,
    },
    Rule {
        id: "memory.remap",
        rule: "without IOTLB_PERSIST memory can be mapped again after a reset",
        source: "drivers/vhost/vdpa.c: _compat_vdpa_reset",
        check: remap,
    },
];

const UNREACHED: &str =
    "the kernel mapped memory without an error, but the device does not process a ring in it";

/// Whether a device with these backend features can access mapped memory.
fn reached(subject: &Subject<'_>, wanted: BackendFeatures) -> Attempt {
    subject.is_network()?;
    let mut netdev = subject.start(wanted)?;
    Ok(match exercise(&mut netdev, 3) {
        // A broken used element also proves that a write arrived.
        Moved::All | Moved::Broken(_) => pass(),
        Moved::Stuck => fail(UNREACHED),
    })
}

fn reach(subject: &Subject<'_>) -> Attempt {
    reached(subject, BackendFeatures::all())
}

fn unbatched(subject: &Subject<'_>) -> Attempt {
    reached(
        subject,
        BackendFeatures::all() - BackendFeatures::IOTLB_BATCH,
    )
}

fn persist(subject: &Subject<'_>) -> Attempt {
    let mut netdev = subject.working(3)?;
    if !netdev.driver.iotlb.survives_reset() {
        return Ok(skipped("IOTLB_PERSIST is not offered"));
    }
    netdev.restart(|_| Ok(()))?;
    Ok(match exercise(&mut netdev, 3) {
        Moved::All => pass(),
        _ => fail("the device does not process its rings after a reset"),
    })
}

fn remap(subject: &Subject<'_>) -> Attempt {
    drop(subject.working(1)?);
    let without = BackendFeatures::all() - BackendFeatures::IOTLB_PERSIST;
    let mut netdev = subject.start(without)?;
    if !matches!(exercise(&mut netdev, 3), Moved::All) {
        return Ok(skipped(STUCK));
    }
    netdev.restart(Iotlb::remap_after_reset)?;
    Ok(match exercise(&mut netdev, 3) {
        Moved::All => noted("unmapped and mapped once more"),
        _ => fail("the device does not process its rings after a reset and new mappings"),
    })
}
