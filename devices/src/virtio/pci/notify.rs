//! Kicks: one eventfd per queue for the device's life, and the target of a guest's store to the
//! queue's notify page in BAR 0.
//!
//! ```text
//!                        BAR 0 decoded                      run(queue, page)
//!   nowhere (store --> VMM thread) -------> eventfd (ioeventfd) ------> page (memory slot)
//!      ^                                       |  ^                        |
//!      +---------------------------------------+  +------------------------+
//!      ^     BAR moved, decoding off,             stop(), memory_fault     |
//!      +-------------------------------------------------------------------+
//!            unplugged
//! ```
//! A page is mapped only while its queue runs: a store never reaches a device that was reset, saved
//! or is broken. Between eventfd and page, the new target is added before the old one is removed,
//! so that no kick is lost. If neither is available, the store exits to the VMM, which signals the
//! eventfd.
//!
//! A page cannot be read. A guest that reads it causes a memory fault. The queue then keeps its
//! eventfd until the function is reset, and the read returns zero, as in a BAR without pages. (Once
//! the guest has stored to a page, reads no longer fault, and the device determines the value.)
//!
//! It must not know the effect of a kick.

use std::io;
use std::sync::Arc;

use tracing::{error, warn};
use vmm_sys_util::eventfd::EventFd;

use super::layout::{NOTIFY, NOTIFY_STRIDE};
use crate::hypervisor::{DeviceMappings, DevicePages};

/// Creates one eventfd per queue, with counter 0.
pub(super) fn kicks(queues: u16) -> io::Result<Vec<Arc<EventFd>>> {
    let kick = |_| vdpa::eventfd::new().map(Arc::new);
    (0..queues).map(kick).collect()
}

/// Signals the kick eventfd of `queue`, if there is such a queue.
pub(super) fn kick(kicks: &[Arc<EventFd>], queue: usize) {
    if let Some(kick) = kicks.get(queue) {
        // Non-blocking: an error only means that the counter is full, and then the backend is about
        // to be woken anyway.
        let _ = kick.write(1);
    }
}

/// Discards kicks that the backend has not served.
fn forget(kick: &Arc<EventFd>) {
    // Non-blocking: an error only means that the counter is zero.
    let _ = kick.read();
}

/// The target of a guest's store to a queue's notify page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KickPath {
    /// The VMM's threads, which signal the eventfd: the BAR is not decoded, or nothing better is
    /// available. Or the backend serves the queue in the vCPU's thread.
    Exit,
    /// The kick eventfd, inside KVM (ioeventfd).
    Eventfd,
    /// The device's own doorbell page (a memory slot).
    Doorbell,
}

/// The current and the wanted target of one queue's notify page.
#[derive(Debug, Default)]
struct NotifyPage {
    /// The guest-physical address of the page.
    address: Option<u64>,
    /// The device's doorbell while the queue runs.
    doorbell: Option<Arc<dyn DevicePages>>,
    /// The guest has read the page: no doorbell is mapped until the function's reset.
    was_read: bool,
    /// Where the eventfd is attached.
    eventfd_at: Option<u64>,
    /// Where the doorbell is mapped.
    doorbell_at: Option<u64>,
    /// No eventfd is attached: the vCPU serves the queue.
    inline: bool,
}

impl NotifyPage {
    /// Makes the current target the wanted one.
    fn settle(&mut self, queue: usize, kick: &EventFd, doorbells: &dyn DeviceMappings) {
        let wanted = self.doorbell.clone().filter(|_| !self.was_read);
        let place = self.address.filter(|_| wanted.is_some());
        if let (Some(address), Some(doorbell), None) = (place, wanted, self.doorbell_at) {
            match doorbells.map(address, doorbell) {
                Ok(()) => self.doorbell_at = Some(address),
                Err(error) => {
                    warn!(
                        address,
                        queue,
                        %error,
                        "cannot map the device's doorbell: each kick of this queue costs an exit"
                    );
                    // Not retried before the queue is started again.
                    self.doorbell = None;
                }
            }
        }
        let mapped = place.is_some() && self.doorbell_at == place;
        let eventfd_place = self.address.filter(|_| !mapped && !self.inline);
        if self.eventfd_at != eventfd_place {
            if let Some(address) = self.eventfd_at.take()
                && let Err(error) = doorbells.detach(address, kick)
            {
                warn!(address, queue, %error, "cannot detach a doorbell's eventfd");
            }
            if let Some(address) = eventfd_place {
                match doorbells.attach(address, kick) {
                    Ok(()) => self.eventfd_at = Some(address),
                    // The guest's writes exit to the VMM and are signalled all the same.
                    Err(error) => {
                        warn!(
                            address,
                            queue,
                            %error,
                            "cannot attach a doorbell's eventfd: kicks of this queue are slow"
                        );
                    }
                }
            }
        }
        if !mapped && let Some(address) = self.doorbell_at {
            match doorbells.unmap(address) {
                Ok(()) => self.doorbell_at = None,
                // The address stays recorded, so that unmapping is retried and no second mapping is
                // created.
                Err(error) => {
                    error!(
                        address,
                        queue,
                        %error,
                        "cannot unmap the device's doorbell from the guest"
                    );
                }
            }
        }
    }
}

/// The notify pages of all queues; see the module.
#[derive(Debug)]
pub(super) struct NotifyDoorbells {
    doorbells: Arc<dyn DeviceMappings>,
    kicks: Vec<Arc<EventFd>>,
    /// By queue.
    pages: Vec<NotifyPage>,
}

impl NotifyDoorbells {
    /// The queues in `inline` get no eventfd.
    pub(super) fn new(
        doorbells: Arc<dyn DeviceMappings>,
        kicks: Vec<Arc<EventFd>>,
        inline: &[usize],
    ) -> Self {
        let page = |queue| NotifyPage {
            inline: inline.contains(&queue),
            ..NotifyPage::default()
        };
        Self {
            doorbells,
            pages: (0..kicks.len()).map(page).collect(),
            kicks,
        }
    }

    /// Returns the current target of a store to the notify page of `queue`.
    pub(super) fn kick_path(&self, queue: u16) -> KickPath {
        match self.pages.get(usize::from(queue)) {
            Some(page) if page.doorbell_at.is_some() => KickPath::Doorbell,
            Some(page) if page.eventfd_at.is_some() => KickPath::Eventfd,
            _ => KickPath::Exit,
        }
    }

    /// Returns the kick eventfds by queue.
    pub(super) fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    /// Discards kicks that were not served.
    pub(super) fn drain(&self) {
        self.kicks.iter().for_each(forget);
    }

    /// BAR 0 is now decoded at `bar`, or nowhere.
    pub(super) fn bar_moved(&mut self, bar: Option<u64>) {
        let first = bar.and_then(|bar| bar.checked_add(NOTIFY));
        for (number, page) in (0u64..).zip(&mut self.pages) {
            let offset = number.checked_mul(NOTIFY_STRIDE);
            page.address = first
                .zip(offset)
                .and_then(|(first, offset)| first.checked_add(offset));
        }
        self.settle();
    }

    /// The device runs; its queues have the doorbells that `doorbell_of` returns.
    pub(super) fn run(&mut self, mut doorbell_of: impl FnMut(u16) -> Option<Arc<dyn DevicePages>>) {
        for (queue, page) in (0..=u16::MAX).zip(&mut self.pages) {
            page.doorbell = doorbell_of(queue);
        }
        self.settle();
    }

    /// Discards kicks of one queue that were not served.
    pub(super) fn drain_queue(&self, queue: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue)) {
            forget(kick);
        }
    }

    /// One queue of the running device starts with this doorbell, or stops (`None`). After a stop,
    /// no store of the guest to its page reaches the device when this returns.
    pub(super) fn set(&mut self, queue: u16, doorbell: Option<Arc<dyn DevicePages>>) {
        if let Some(page) = self.pages.get_mut(usize::from(queue)) {
            page.doorbell = doorbell;
        }
        self.settle();
    }

    /// The device does not run. When this returns, no store of the guest reaches it, and its
    /// doorbells are released.
    pub(super) fn stop(&mut self) {
        for page in &mut self.pages {
            page.doorbell = None;
        }
        self.settle();
    }

    /// Handles an access of the guest that no memory serves, at `address` or an unknown one. The
    /// doorbell that it may have accessed is replaced by its eventfd. Returns `true` if there was
    /// one.
    pub(super) fn memory_fault(&mut self, address: Option<u64>) -> bool {
        let mut hit = Vec::new();
        for (queue, page) in self.pages.iter_mut().enumerate() {
            let Some(mapped) = page.doorbell_at else {
                continue;
            };
            let meant = address.is_none_or(|address| address & !(NOTIFY_STRIDE - 1) == mapped);
            if meant && !page.was_read {
                page.was_read = true;
                hit.push(queue);
            }
        }
        if hit.is_empty() {
            return false;
        }
        // If KVM does not report the page, all doorbells are replaced.
        warn!(
            queues = ?hit,
            ?address,
            "the guest read a write-only doorbell: each kick of these queues costs an exit until \
             the machine resets"
        );
        self.settle();
        true
    }

    /// Allows doorbells again after a reset of the function: the new driver may be correct.
    pub(super) fn forgive(&mut self) {
        for page in &mut self.pages {
            page.was_read = false;
        }
        self.settle();
    }

    fn settle(&mut self) {
        for ((queue, page), kick) in self.pages.iter_mut().enumerate().zip(&self.kicks) {
            page.settle(queue, kick, &*self.doorbells);
        }
    }
}

impl Drop for NotifyDoorbells {
    fn drop(&mut self) {
        self.stop();
        self.bar_moved(None);
    }
}
