//! The doorbells of a vhost-vdpa device: which queues have one, and whether
//! the guest is to get it.
//!
//! Owns the mappings, made once when the device is opened. It must not know
//! where a guest sees them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::device::{Device, Owned};
use vdpa::doorbell::{Doorbell, DoorbellAnswer};

use super::error::VdpaError;
use crate::hypervisor::DoorbellPage;

/// What the guest's kicks are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// Stores in the device's own page where a queue has one, else eventfds.
    #[default]
    Auto,
    /// As `auto`, but a data queue without a page is an error.
    On,
    /// Eventfds only.
    Off,
}

// SAFETY: needed so that a guest can be given the page. A `Doorbell` is one
// mapping of a page, at an address that never changes, unmapped when it is
// dropped; inside this process it is written by volatile stores only.
unsafe impl DoorbellPage for Doorbell {
    fn host_address(&self) -> u64 {
        Doorbell::host_address(self)
    }
}

/// The doorbell of each queue that has one and may use it.
#[derive(Debug)]
pub(super) struct DeviceDoorbells(Vec<Option<Arc<Doorbell>>>);

impl DeviceDoorbells {
    /// Maps what `mode` asks for. `control_queue` is the queue that is the VMM's
    /// when all offered features are negotiated: it needs no doorbell.
    ///
    /// # Errors
    /// [`VdpaError::NoDoorbell`] with [`DoorbellMode::On`] only.
    pub(super) fn map(
        device: &Device<Owned>,
        id: &str,
        mode: DoorbellMode,
        control_queue: Option<u16>,
    ) -> Result<Self, VdpaError> {
        let mut pages = Vec::new();
        for queue in 0..device.info().queue_count() {
            if mode == DoorbellMode::Off {
                pages.push(None);
                continue;
            }
            let answer = device.map_doorbell(queue);
            pages.push(choose(answer, id, queue, mode, control_queue)?);
        }
        let mapped = pages.iter().flatten().count();
        tracing::debug!(device = %id, ?mode, mapped, queues = pages.len(), "doorbells");
        Ok(Self(pages))
    }

    /// The doorbell of `queue`.
    pub(super) fn get(&self, queue: u16) -> Option<Arc<Doorbell>> {
        self.0.get(usize::from(queue)).cloned().flatten()
    }
}

/// What an answer about one queue comes to.
fn choose(
    answer: Result<DoorbellAnswer, vdpa::device::DeviceError>,
    id: &str,
    queue: u16,
    mode: DoorbellMode,
    control_queue: Option<u16>,
) -> Result<Option<Arc<Doorbell>>, VdpaError> {
    let needed = mode == DoorbellMode::On && Some(queue) != control_queue;
    match answer {
        Ok(DoorbellAnswer::Mapped(doorbell)) => Ok(Some(Arc::new(doorbell))),
        Ok(DoorbellAnswer::Absent(reason)) if needed => {
            Err(VdpaError::NoDoorbell { queue, reason })
        }
        Ok(DoorbellAnswer::Absent(_)) => Ok(None),
        Err(error) if needed => Err(error.into()),
        Err(error) => {
            tracing::warn!(
                device = %id,
                queue,
                error = &error as &dyn std::error::Error,
                "the doorbell cannot be mapped: kicks of this queue cost an exit each"
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use vdpa::device::DeviceError;
    use vdpa::doorbell::NoDoorbell;

    use super::*;

    fn absent(mode: DoorbellMode, queue: u16) -> Result<Option<Arc<Doorbell>>, VdpaError> {
        let answer = Ok(DoorbellAnswer::Absent(NoDoorbell::NotOffered));
        choose(answer, "test", queue, mode, Some(2))
    }

    #[test]
    fn a_queue_without_a_doorbell_matters_only_where_it_was_asked_for() {
        assert!(absent(DoorbellMode::Auto, 0).unwrap().is_none());
        assert!(absent(DoorbellMode::On, 2).unwrap().is_none());
        let error = absent(DoorbellMode::On, 1).unwrap_err();
        assert!(matches!(error, VdpaError::NoDoorbell { queue: 1, .. }));
        let text = error.to_string();
        assert!(text.contains("doorbell=auto"), "{text}");
        assert!(error.source().unwrap().to_string().contains("page-per-vq"));
    }

    #[test]
    fn a_failure_is_told_but_does_not_stop_auto() {
        let failed = || {
            Err(DeviceError::Unable {
                ability: "be mapped",
            })
        };
        let auto = choose(failed(), "test", 0, DoorbellMode::Auto, None);
        assert!(auto.unwrap().is_none());
        assert!(choose(failed(), "test", 0, DoorbellMode::On, None).is_err());
    }
}
