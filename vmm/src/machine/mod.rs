//! The machine: everything of one guest, from its construction to its end.
//!
//! [`Machine::new`] builds it, top to bottom in `build.rs`; [`Machine::run`]
//! is its life, on the caller's thread, which is the *vmm* thread: it serves the devices'
//! events, takes the guest's wish for power-off or reset, notices when a vCPU
//! cannot go on, and does what the [`Handle`] asks for. It
//! must not know the terminal, the command line, or what a device does inside.
//!
//! The files are in layers. Each file imports only files that stand before it in this list:
//!
//! 1. words and small parts: `pluggable`, `end`, `signals`, `generation`, `faults`, `error`,
//!    `ring_watch/queue`, `ring_watch`, `migration/throttle`, `migration/leaving`
//! 2. states: `saved`, `snapshot`, `program`, `held`
//! 3. devices: `board`, `devices`, `ring_watch/in_flight`, `inventory`, `migration/compat`
//! 4. requests: `queue`, which does not know what a machine is
//! 5. the machine: `parts` ([`Machine`])
//! 6. its clients: `handle` ([`Handle`])
//! 7. its steps: `build`, `saving`, `hand_over`, `failover`, `migration`
//! 8. its life: `origin`, `requests`, `run`
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
//! *Running* has a second half: `Handle::pause` parks the vCPUs while everything else goes
//! on, `Handle::resume` lets them go on. A reset in that state leaves them parked at the
//! first instruction.
//!
//! **Power on** is one sequence for the first boot, for a reboot in place and for
//! a second run: vCPUs parked → devices reset (nothing touches guest memory from
//! here on) → interrupt controllers and vCPUs as KVM made them → kernel,
//! initramfs and ACPI tables written anew, from their files → entry point set → vCPUs
//! run. Nothing is allocated or opened that an earlier power-on did not have, so
//! any number of reboots leaves the same descriptors, memory slots and routes.
//! A NIC or disk that was plugged in stays; one that the guest was asked to eject goes here.
//!
//! **The end**: vCPU threads are joined first, then devices go, then
//! interrupts, memory slots, the VM and guest RAM (the order of the fields).

mod board;
mod build;
mod devices;
mod end;
mod error;
mod failover;
mod faults;
mod generation;
mod hand_over;
mod handle;
mod held;
mod inventory;
mod migration;
mod origin;
mod parts;
mod pluggable;
#[cfg(test)]
pub(crate) mod pretend;
mod program;
mod queue;
mod requests;
mod ring_watch;
mod run;
mod saved;
mod saving;
mod signals;
mod snapshot;

pub use board::{DeviceStatus, MachineStatus, Resources, RunState, UpgradeStatus};
pub(crate) use end::stopped;
pub use end::{End, EndReason, Exit, failed};
pub use error::{NotMovable, RequestError, SnapshotError};
pub use hand_over::HandedOver;
pub use handle::Handle;
pub use held::HandOver;
pub(crate) use migration::milliseconds;
pub use migration::{
    Arriving, Direction, InFlight, Migration, MigrationEnd, ReceiveConfig, SendConfig, load_tls,
};
pub use origin::Origin;
pub use parts::Machine;
pub use pluggable::{
    DeviceKind, DiskStatus, Failover, FailoverState, NicStatus, NicSwapped, PlugState, Pluggable,
};
pub use program::{STATE_VERSIONS_COMMAND, check_program, state_versions};
pub use ring_watch::{Alarm, WatchState, WatchStatus};
pub use signals::{StatisticsHandle, StopHandle};
pub use snapshot::{Snapshot, Written};
