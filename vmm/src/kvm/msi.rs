//! MSI-X vectors as KVM irqfds with GSI routes.
//!
//! This module owns the machine's GSI routing table and one eventfd per
//! vector. It must not know which device a vector belongs to, nor PCI.
//!
//! ```text
//!                unmask(message): route set if it changed, irqfd assigned
//!        masked ------------------------------------------------------------> routed
//!  eventfd counts  <------------------------------------------------------  irqfd consumes
//!                mask(): irqfd deassigned, the route stays in the table
//! ```
//!
//! The route stays while masked, because Linux masks and unmasks a vector around every change of
//! its affinity. `KVM_SET_GSI_ROUTING` waits for an SRCU grace period; a mask and unmask with the
//! same message avoids that wait.

use std::io;
use std::sync::Arc;

use devices::hypervisor::{MsiMessage, MsiVector, MsiVectors};
use kvm_bindings::KvmIrqRouting;
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::routing::RoutingTable;

/// Usage of the VM's interrupt routing; for leak tests and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsiCounts {
    /// Vectors that devices hold.
    pub vectors: usize,
    /// MSI routes of these vectors, those of masked ones included.
    pub routes: usize,
    /// irqfds assigned in KVM: the vectors that are not masked.
    pub irqfds: usize,
}

/// All vectors of a VM: their shared table and their VM.
#[derive(Debug)]
struct Router {
    vm: Arc<VmFd>,
    /// Held during the ioctl, so that KVM always has the latest table.
    state: Mutex<RouterState>,
}

#[derive(Debug)]
struct RouterState {
    table: RoutingTable,
    irqfds: usize,
}

impl Router {
    /// Passes the whole table to KVM.
    fn publish(&self, table: &RoutingTable) -> io::Result<()> {
        let routing = KvmIrqRouting::from_entries(&table.entries())
            .map_err(|_| io::Error::other("more interrupt routes than KVM takes"))?;
        self.vm.set_gsi_routing(&routing).map_err(io::Error::from)
    }

    /// Routes `gsi` to `message`. On failure the table is as before: one bad entry would make KVM
    /// reject every later table too.
    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut state = self.state.lock();
        let before = state.table.get(gsi);
        if before == Some(message) {
            return Ok(());
        }
        state.table.set(gsi, Some(message));
        let result = self.publish(&state.table);
        if result.is_err() {
            state.table.set(gsi, before);
        }
        result
    }
}

/// Allocates MSI vectors of one VM. Clones share everything.
#[derive(Debug, Clone)]
pub struct KvmMsiVectors {
    router: Arc<Router>,
}

impl KvmMsiVectors {
    /// Creates the allocator of a VM with in-kernel interrupt controllers. There must be only one
    /// per VM (clones aside): it owns the VM's routing table.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        let max = vm.check_extension_int(kvm_ioctls::Cap::IrqRouting);
        // Old kernels return 1 for "yes"; they had 1024 entries.
        let max = usize::try_from(max).unwrap_or(0).max(1024);
        let max = max.min(kvm_bindings::KVM_MAX_IRQ_ROUTES);
        Self {
            router: Arc::new(Router {
                vm,
                state: Mutex::new(RouterState {
                    table: RoutingTable::new(max),
                    irqfds: 0,
                }),
            }),
        }
    }

    /// Current usage.
    #[must_use]
    pub fn counts(&self) -> MsiCounts {
        let state = self.router.state.lock();
        MsiCounts {
            vectors: state.table.allocated(),
            routes: state.table.routes(),
            irqfds: state.irqfds,
        }
    }
}

impl MsiVectors for KvmMsiVectors {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        let eventfd = vdpa::eventfd::new()?;
        let gsi = self
            .router
            .state
            .lock()
            .table
            .allocate()
            .ok_or_else(|| io::Error::other("all interrupt routes of the VM are in use"))?;
        Ok(Arc::new(KvmMsiVector {
            router: Arc::clone(&self.router),
            gsi,
            eventfd,
            assigned: Mutex::new(false),
        }))
    }
}

/// One vector: a GSI and an eventfd.
#[derive(Debug)]
struct KvmMsiVector {
    router: Arc<Router>,
    gsi: u32,
    eventfd: EventFd,
    /// Whether KVM polls the eventfd (an irqfd is assigned).
    assigned: Mutex<bool>,
}

impl MsiVector for KvmMsiVector {
    fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    fn unmask(&self, message: MsiMessage) -> io::Result<()> {
        let mut assigned = self.assigned.lock();
        self.router.route(self.gsi, message)?;
        if *assigned {
            return Ok(());
        }
        self.router.vm.register_irqfd(&self.eventfd, self.gsi)?;
        *assigned = true;
        self.router.state.lock().irqfds += 1;
        // KVM injects a pending trigger when the irqfd is assigned but leaves it in the counter.
        // The next mask would find it there and deliver it a second time. KVM consumes new triggers
        // at once, so this removes only injected ones.
        drain(&self.eventfd)
    }

    fn mask(&self) -> io::Result<()> {
        let mut assigned = self.assigned.lock();
        if *assigned {
            self.router.vm.unregister_irqfd(&self.eventfd, self.gsi)?;
            *assigned = false;
            self.router.state.lock().irqfds -= 1;
        }
        Ok(())
    }

    fn pending(&self) -> bool {
        !*self.assigned.lock() && readable(&self.eventfd)
    }
}

impl Drop for KvmMsiVector {
    fn drop(&mut self) {
        if let Err(error) = self.mask() {
            tracing::error!(gsi = self.gsi, %error, "cannot remove an irqfd");
        }
        // KVM keeps the stale route until the next change of the table. Without its irqfd it has no
        // effect, and dropping many vectors stays cheap.
        self.router.state.lock().table.free(self.gsi);
    }
}

/// Resets the counter of a non-blocking eventfd.
fn drain(eventfd: &EventFd) -> io::Result<()> {
    match eventfd.read() {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

/// Whether an eventfd's counter is not zero; does not change it.
fn readable(eventfd: &EventFd) -> bool {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd {
        fd: eventfd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: needed because the standard library has no poll. The pointer is to one valid pollfd,
    // which matches the count, and the call does not block.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready == 1 && poll.revents & libc::POLLIN != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_the_pending_bit_does_not_consume_it() {
        let eventfd = vdpa::eventfd::new().unwrap();
        assert!(!readable(&eventfd));
        eventfd.write(3).unwrap();
        assert!(readable(&eventfd));
        assert!(readable(&eventfd));
        drain(&eventfd).unwrap();
        assert!(!readable(&eventfd));
        drain(&eventfd).unwrap();
    }
}
