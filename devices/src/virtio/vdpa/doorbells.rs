//! The doorbells of a vhost-vdpa device: which queues have one, and whether the guest gets it.
//!
//! Owns the mappings. Each is created when its queue is first started, because the negotiated
//! features determine which queues have a doorbell. It is kept for the device's life. It must not
//! know where a guest sees them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::device::Device;
use vdpa::doorbell::{Doorbell, DoorbellAnswer};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use crate::Error;
use crate::hypervisor::DevicePages;

/// How the guest kicks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// Stores in the device's own page if a queue has one, else eventfds.
    #[default]
    #[serde(alias = "Auto")]
    Auto,
    /// As `auto`, but a data queue without a page is an error.
    #[serde(alias = "On")]
    On,
    /// Eventfds only.
    #[serde(alias = "Off")]
    Off,
}

// SAFETY: needed to map the page into a guest. A `Doorbell` is one mapping of a page, at an address
// that never changes, unmapped when it is dropped. This process writes it by volatile stores only.
unsafe impl DevicePages for Doorbell {
    fn host_address(&self) -> u64 {
        Doorbell::host_address(self)
    }
}

/// The doorbells that are mapped so far.
#[derive(Debug)]
pub(super) struct DeviceDoorbells {
    mode: DoorbellMode,
    /// By queue.
    pages: Vec<Option<Arc<Doorbell>>>,
}

impl DeviceDoorbells {
    /// Maps no doorbell yet. With [`DoorbellMode::On`], the queues that are data queues under any
    /// negotiation are checked now. So a machine that cannot work as configured does not start.
    ///
    /// # Errors
    /// A queue has no doorbell; with [`DoorbellMode::On`] only.
    pub(super) fn new(device: &Device, mode: DoorbellMode) -> Result<Self, Error> {
        let count = device.info().queue_count();
        if mode == DoorbellMode::On {
            let is_net = device.info().device_id == VIRTIO_ID_NET;
            for queue in 0..if is_net { count.min(2) } else { count } {
                if let Some(reason) = device.missing_doorbell(queue)? {
                    return Err(no_doorbell(queue, reason));
                }
            }
        }
        Ok(Self {
            mode,
            pages: vec![None; count.into()],
        })
    }

    /// Maps the doorbell of a data queue that is about to start, if the queue has one and the mode
    /// allows it.
    ///
    /// # Errors
    /// As [`DeviceDoorbells::new`].
    pub(super) fn prepare(&mut self, device: &Device, id: &str, queue: u16) -> Result<(), Error> {
        if self.mode == DoorbellMode::Off {
            return Ok(());
        }
        if let Some(page @ None) = self.pages.get_mut(usize::from(queue)) {
            *page = choose(device.map_doorbell(queue), id, queue, self.mode)?;
            tracing::debug!(device = %id, queue, mapped = page.is_some(), "doorbell");
        }
        Ok(())
    }

    /// Unmaps all doorbells, which the guest has no longer.
    pub(super) fn unmap(&mut self) {
        self.pages.fill(None);
    }

    /// Returns the doorbell of `queue`, if it was prepared and has one.
    pub(super) fn get(&self, queue: u16) -> Option<Arc<Doorbell>> {
        self.pages.get(usize::from(queue)).cloned().flatten()
    }
}

fn no_doorbell(queue: u16, reason: &str) -> Error {
    Error::other(format!(
        "queue {queue} has no doorbell to give to the guest: leave doorbell=on out (or use \
         doorbell=auto) to kick by eventfds"
    ))
    .because(reason)
}

/// Evaluates the answer about one queue.
fn choose(
    answer: Result<DoorbellAnswer, vdpa::Error>,
    id: &str,
    queue: u16,
    mode: DoorbellMode,
) -> Result<Option<Arc<Doorbell>>, Error> {
    let needed = mode == DoorbellMode::On;
    match answer {
        Ok(DoorbellAnswer::Mapped(doorbell)) => Ok(Some(Arc::new(doorbell))),
        Ok(DoorbellAnswer::Absent(reason)) if needed => Err(no_doorbell(queue, reason)),
        Ok(DoorbellAnswer::Absent(_)) => Ok(None),
        Err(error) if needed => Err(error.into()),
        Err(error) => {
            tracing::warn!(
                device = %id,
                queue,
                error = &error as &dyn std::error::Error,
                "cannot map the doorbell: each kick of this queue costs an exit"
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn absent(mode: DoorbellMode, queue: u16) -> Result<Option<Arc<Doorbell>>, Error> {
        let answer = Ok(DoorbellAnswer::Absent("try page-per-vq"));
        choose(answer, "test", queue, mode)
    }

    #[test]
    fn a_queue_without_a_doorbell_matters_only_where_it_was_asked_for() {
        assert!(absent(DoorbellMode::Auto, 0).unwrap().is_none());
        let error = absent(DoorbellMode::On, 1).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("queue 1 has no doorbell"), "{text}");
        assert!(text.contains("doorbell=auto"), "{text}");
        assert!(error.source().unwrap().to_string().contains("page-per-vq"));
    }

    #[test]
    fn a_failure_is_reported_but_does_not_stop_auto() {
        let failed = || {
            let message = "the device cannot be mapped";
            Err(vdpa::Error::new(vdpa::ErrorKind::Other, message))
        };
        let auto = choose(failed(), "test", 0, DoorbellMode::Auto);
        assert!(auto.unwrap().is_none());
        assert!(choose(failed(), "test", 0, DoorbellMode::On).is_err());
    }
}
