//! The machine: everything that belongs to one guest, from construction to exit.
//!
//! [`Machine::new`] builds it, top to bottom in `build.rs`. [`Machine::run`] runs it on the
//! caller's thread, the *vmm* thread. That thread serves device events, handles the guest's
//! power-off and reset requests, detects vCPU failures and carries out the requests of the
//! [`Handle`]. It must not know the terminal, the command line or the inside of a device.
//!
//! The files are in layers. A file imports only files that precede it in this list:
//!
//! 1. plain types and small parts: `pluggable`, `end`, `signals`, `generation`, `faults`, `error`,
//!    `ring_watch/queue`, `ring_watch`, `migration/throttle`, `migration/leaving`
//! 2. states: `saved`, `snapshot`, `program`, `quiesced`
//! 3. devices: `status_publisher`, `devices`, `iommu`, `ring_watch/in_flight`, `device_manager`,
//!    `migration/compat`
//! 4. requests: `queue`, which does not depend on the machine type
//! 5. the machine: `parts` ([`Machine`])
//! 6. its clients: `handle` ([`Handle`])
//! 7. its steps: `build`, `saving`, `failover`, `removal`, `hand_over`, `migration`
//! 8. its run: `origin`, `requests`, `run`
//!
//! ```text
//!   Machine::new
//!        |
//!        v   run: power on                        poweroff ─> Exit::PoweredOff
//!     +-----+ -------------> +---------+ ------>  StopHandle,
//!     | off |                | running |          Ctrl-A X ─> Exit::Stopped
//!     +-----+ <------------- +---------+          a vCPU
//!        |      guest reset                       failed   ─> Exit::Crashed
//!        |                                            |
//!        +<-------------------------------------------+  vCPUs parked; run again
//!                                                        is the same as a reset
//! ```
//! While it runs, `Handle::pause` parks the vCPUs; everything else continues. `Handle::resume`
//! restarts them. A reset while paused leaves the vCPUs parked at the first instruction.
//!
//! **Power-on** is one sequence for the first boot, a reboot in place and a second run:
//!
//! 1. park the vCPUs
//! 2. reset the devices; from here on nothing touches guest memory
//! 3. put interrupt controllers and vCPUs into the state in which KVM created them
//! 4. load kernel, initramfs and ACPI tables again, the first two from their files
//! 5. set the entry point and run the vCPUs
//!
//! Power-on allocates and opens nothing that an earlier power-on did not. So any number of reboots
//! leaves the same descriptors, memory slots and routes. A hot-plugged NIC or disk stays; one with
//! a pending ejection is removed.
//!
//! **Shutdown** joins the vCPU threads, then drops devices, interrupts, memory slots, the VM and
//! guest RAM, in the order of the fields.

mod build;
mod device_manager;
mod devices;
mod end;
mod error;
mod failover;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
pub(crate) mod fake_machine;
mod faults;
mod generation;
mod hand_over;
mod handle;
mod iommu;
mod migration;
mod origin;
mod parts;
mod passthrough;
mod pluggable;
mod program;
mod queue;
mod quiesced;
mod removal;
mod requests;
mod ring_watch;
mod run;
mod saved;
mod saving;
mod signals;
mod snapshot;
mod status_publisher;

pub(crate) use end::stopped;
pub use end::{End, EndReason, Exit, failed};
pub use error::{NotMovable, RequestError, SnapshotError};
pub use hand_over::HandedOver;
pub use handle::Handle;
pub use migration::{
    Arriving, Direction, InFlight, Migration, MigrationEnd, ReceiveConfig, SendConfig,
    milliseconds, route,
};
pub use origin::Origin;
pub use parts::Machine;
pub use pluggable::{
    DeviceKind, DiskStatus, Failover, FailoverState, NicStatus, NicSwapped, PlugPhase, Pluggable,
    VfioStatus,
};
pub use program::{STATE_VERSIONS_COMMAND, check_program, requirements, state_versions};
pub use quiesced::HandOver;
pub use signals::{StatisticsHandle, StopHandle};
pub use snapshot::{Snapshot, Written};
pub use status_publisher::{DeviceStatus, MachineStatus, Resources, RunState, UpgradeStatus};
