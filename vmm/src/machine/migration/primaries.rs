//! Functions by VFIO whose place a NIC of the VM can take (net failover).
//!
//! ```text
//!   source:       primary ── ejected by the guest ──> the NIC moves ──> the VM ends
//!                    ^                                      │
//!                    └────────── plugged again ─────────────┘ the VM stays
//!   destination:  the NIC carries the traffic ──> the VM runs ──> a primary is plugged
//! ```
//! The guest's driver pairs the NIC with the function by their MAC address (virtio 1.3, 5.1.3.1).
//!
//! Owns this order. It must not know how a function is plugged, nor the protocol of a migration.

use std::thread;
use std::time::{Duration, Instant};

use crate::config::VfioConfig;
use crate::machine::VfioStatus;
use crate::machine::error::{NotMovable, RequestError};
use crate::machine::handle::Handle;
use crate::migration::channel::Cancel;
use crate::sandbox::seccomp;

/// How long a guest may take to eject its functions.
const EJECTION: Duration = Duration::from_secs(30);
/// How often the sending thread looks whether they are ejected.
const LOOK: Duration = Duration::from_millis(20);

impl Handle {
    /// Returns the functions that leave the guest before a migration: those with a standby.
    ///
    /// # Errors
    /// [`NotMovable::PassedThrough`]: no NIC stands by for a function, and its driver cannot move
    /// it.
    pub fn primaries(&self) -> Result<Vec<VfioConfig>, RequestError> {
        let functions: Vec<VfioStatus> = self.status().vfio;
        if functions.is_empty() {
            return Ok(Vec::new());
        }
        let configs = functions.into_iter().map(|function| function.config);
        let primaries = configs.filter(|config| config.standby.is_some());
        let primaries: Vec<VfioConfig> = primaries.collect();
        let leave: Vec<String> = primaries.iter().map(VfioConfig::name).collect();
        self.on_vmm_thread(move |machine| {
            let leaves = |id: &str| leave.iter().any(|leaving| leaving == id);
            machine.device_manager.ensure_functions_movable(leaves)
        })??;
        Ok(primaries)
    }

    /// Has the guest eject its functions, and waits.
    ///
    /// # Errors
    /// The guest has not ejected them in time, or the migration was cancelled.
    pub(super) fn eject(
        &self,
        primaries: &[VfioConfig],
        cancel: &Cancel,
    ) -> Result<(), RequestError> {
        for primary in primaries {
            let id = primary.name();
            tracing::info!(%id, "the guest ejects the VFIO device; its standby takes over");
            self.unplug_vfio(&id)?;
        }
        let begin = Instant::now();
        for id in primaries.iter().map(VfioConfig::name) {
            while self.vfio(&id).is_some() {
                if begin.elapsed() >= EJECTION || cancel.is_cancelled() {
                    return Err(NotMovable::Unplugging(id).into());
                }
                thread::sleep(LOOK);
            }
        }
        Ok(())
    }

    /// Plugs functions, except those that the guest still has. A failure leaves their standby in
    /// use, and is logged.
    pub(super) fn plug_primaries(&self, primaries: &[VfioConfig]) {
        for primary in primaries {
            let id = primary.name();
            if self.vfio(&id).is_some() {
                continue;
            }
            match self.plug_vfio(primary) {
                Ok(_) => tracing::info!(%id, "plugged the VFIO device; its standby rests"),
                Err(error) => tracing::error!(
                    %id,
                    error = &error as &dyn std::error::Error,
                    "cannot plug the VFIO device; the guest uses its standby"
                ),
            }
        }
    }

    /// Plugs functions from a thread of its own, once the machine serves requests.
    pub(super) fn plug_primaries_soon(self, primaries: Vec<VfioConfig>) {
        if primaries.is_empty() {
            return;
        }
        let thread = thread::Builder::new().name("migration".to_owned());
        let plug = move || {
            seccomp::enter(seccomp::Thread::Migration);
            self.plug_primaries(&primaries);
        };
        if let Err(error) = thread.spawn(plug) {
            tracing::error!(%error, "no thread to plug VFIO devices; the guest uses their standby");
        }
    }
}
