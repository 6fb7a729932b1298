//! Kicks: one eventfd per queue for the life of the device, and the doorbells
//! (ioeventfds) that signal them while the notify part of BAR 0 is decoded.
//!
//! ```text
//!              bar_moved(Some(address))
//!   detached ---------------------------> attached(address)
//!            <---------------------------
//!              bar_moved(None), drop
//! ```
//! It must not know what a kick leads to.

use std::io;
use std::sync::Arc;

use tracing::warn;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::layout::{NOTIFY, NOTIFY_STRIDE};
use crate::hypervisor::Doorbells;

/// One eventfd per queue, with counter 0.
pub(super) fn kicks(queues: u16) -> io::Result<Vec<Arc<EventFd>>> {
    let kick = |_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new);
    (0..queues).map(kick).collect()
}

/// Signals the kick eventfd of `queue`, if there is such a queue.
pub(super) fn kick(kicks: &[Arc<EventFd>], queue: usize) {
    if let Some(kick) = kicks.get(queue) {
        // Not blocking: an error only says that the counter is full, and then
        // the backend is about to be woken anyway.
        let _ = kick.write(1);
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct NotifyDoorbells {
    doorbells: Arc<dyn Doorbells>,
    kicks: Vec<Arc<EventFd>>,
    /// Address and queue of each doorbell that is attached.
    attached: Vec<(u64, usize)>,
}

impl NotifyDoorbells {
    pub(super) fn new(doorbells: Arc<dyn Doorbells>, kicks: Vec<Arc<EventFd>>) -> Self {
        Self {
            doorbells,
            kicks,
            attached: Vec::new(),
        }
    }

    /// The kick eventfds by queue.
    pub(super) fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    /// Forgets kicks that nobody served.
    pub(super) fn drain(&self) {
        for kick in &self.kicks {
            // Not blocking: an error only says that the counter is zero.
            let _ = kick.read();
        }
    }

    /// BAR 0 answers at `bar`, or nowhere.
    pub(super) fn bar_moved(&mut self, bar: Option<u64>) {
        for (address, queue) in self.attached.drain(..) {
            if let Some(kick) = self.kicks.get(queue)
                && let Err(error) = self.doorbells.detach(address, kick)
            {
                warn!(address, queue, %error, "cannot detach a doorbell");
            }
        }
        let Some(first) = bar.and_then(|bar| bar.checked_add(NOTIFY)) else {
            return;
        };
        let addresses = (0..).map_while(|page: u64| {
            let offset = page.checked_mul(NOTIFY_STRIDE)?;
            first.checked_add(offset)
        });
        for ((queue, kick), address) in self.kicks.iter().enumerate().zip(addresses) {
            match self.doorbells.attach(address, kick) {
                Ok(()) => self.attached.push((address, queue)),
                // The guest's writes exit to us and are signalled all the same.
                Err(error) => {
                    warn!(address, queue, %error, "cannot attach a doorbell: kicks of this queue are slow");
                }
            }
        }
    }
}

impl Drop for NotifyDoorbells {
    fn drop(&mut self) {
        self.bar_moved(None);
    }
}
