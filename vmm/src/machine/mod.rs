//! The machine: everything of one guest, from its construction to its end.
//!
//! [`Machine::new`] builds it, top to bottom in `build.rs`; [`Machine::run`]
//! is its life, on the caller's thread, which is the *vmm* thread: it serves the devices'
//! events, takes the guest's wish for power-off or reset, notices when a vCPU
//! cannot go on, and does what the [`Handle`] asks for. This module owns all parts and the order in which they go. It
//! must not know the terminal, the command line, or what a device does inside.
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
mod failover;
mod faults;
mod generation;
mod hand_over;
mod handle;
mod inventory;
mod migration;
mod pluggable;
#[cfg(test)]
pub(crate) mod pretend;
mod program;
mod requests;
mod ring_watch;
mod run;
mod saved;
mod saving;
mod snapshot;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::devices::legacy::clock::Clock;
use ::devices::legacy::event::AcpiEvent;
use ::devices::legacy::power::PowerSignal;
use ::devices::legacy::serial::Serial;
use ::devices::pci::{ConfigPorts, PciBus, PciHotplug};
use ::devices::virtio::backend::SharedMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::config::VmConfig;
use crate::console::{InputPump, Screen};
use crate::event_loop::{EventLoop, Timer};
use crate::kvm::Vm;
use crate::kvm::doorbells::KvmDoorbells;
use crate::kvm::line::InterruptLine;
use crate::kvm::memory_slots::MemorySlots;
use crate::kvm::msi::{KvmMsiVectors, MsiCounts};
use crate::layout::Layout;
use crate::memory::GuestRam;
use crate::vcpu::{Buses, VcpuReport, Vcpus};

use self::generation::Generation;
use self::handle::Requests;
use self::inventory::Inventory;
use self::migration::{Leaving, Throttle};
use self::saving::Held;

pub use board::{DeviceStatus, MachineStatus, RunState, UpgradeStatus};
pub(crate) use end::stopped;
pub use end::{End, EndReason, failed};
pub use failover::{Failover, FailoverState};
pub use hand_over::{HandOver, HandedOver};
pub use handle::{Handle, NicSwapped, RequestError};
pub(crate) use migration::milliseconds;
pub use migration::{
    Arriving, Direction, InFlight, Migration, MigrationEnd, NotMovable, ReceiveConfig, SendConfig,
    load_tls,
};
pub use pluggable::{DeviceKind, DiskStatus, NicStatus, PlugState, Pluggable};
pub use program::{STATE_VERSIONS_COMMAND, check_program, state_versions};
pub use ring_watch::{Alarm, WatchState, WatchStatus};
pub use snapshot::{Origin, Snapshot, SnapshotError, Written};

/// How a machine's run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// The guest switched the power off.
    PoweredOff,
    /// Somebody outside asked for it: the [`StopHandle`], or the console's user.
    Stopped,
    /// A vCPU could not go on.
    Crashed(VcpuReport),
    /// It stands still for another program: see [`Machine::take_hand_over`].
    HandedOver,
    /// Its guest runs elsewhere: it was sent ([`Handle::migrate`]), or somebody said so ([`Handle::settle`]).
    Moved,
    /// It was told to stop, or failed, after it had left its guest to another process and before it knew whether that has it: the
    /// guest runs there or nowhere, and nobody knows which.
    Unsettled,
}

/// Asks a machine to stop, from any thread or from a signal handler. Clones ask
/// the same machine. The wish stays: a machine that runs later stops at once.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<StopWish>);

#[derive(Debug)]
struct StopWish {
    event: EventFd,
    asked: AtomicBool,
}

impl StopHandle {
    /// A handle that asks nothing yet, to be given to [`Machine::new`].
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self(Arc::new(StopWish {
            event,
            asked: AtomicBool::new(false),
        })))
    }

    /// Asks. Safe in a signal handler: it is a store and one `write`.
    pub fn stop(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.event.write(1);
    }

    /// Whether somebody asked.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed)
    }

    /// Readable, and never read, once somebody asked.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.0.event
    }
}

/// Asks a machine that runs to log (level info) what KVM has counted, from any
/// thread or from a signal handler.
#[derive(Debug, Clone)]
pub struct StatisticsHandle(Arc<EventFd>);

impl StatisticsHandle {
    fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map(|event| Self(Arc::new(event)))
    }

    /// Asks. Safe in a signal handler: it is one `write`.
    pub fn log(&self) {
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.write(1);
    }
}

/// What a machine holds of KVM; the same before and after any number of
/// reboots, once the guest has let go of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Memory slots.
    pub memory_slots: usize,
    /// ioeventfds.
    pub doorbells: usize,
    /// Doorbells of devices that the guest sees; they are among the memory slots.
    pub mapped_doorbells: usize,
    /// Interrupt vectors, routes and irqfds.
    pub msi: MsiCounts,
}

/// A virtual machine. See the module.
pub struct Machine {
    // The order of the fields is the order in which they are dropped.
    vcpus: Vcpus,
    events: EventLoop,
    input: InputPump,
    screen: Screen,
    /// `None`: nobody wants to watch.
    watch_timer: Option<Timer>,
    inventory: Inventory,
    hotplug: Arc<PciHotplug>,
    pci: Arc<PciBus>,
    /// What the vCPUs' exits go to; the PCI bus knows it only weakly.
    _buses: Buses,
    serial: Arc<Serial>,
    power: Arc<PowerSignal>,
    button: Arc<AcpiEvent>,
    generation: Generation,
    clock: Arc<Clock>,
    config_ports: Arc<ConfigPorts>,
    _serial_line: InterruptLine,
    doorbells: Arc<KvmDoorbells>,
    msi: KvmMsiVectors,
    slots: Arc<MemorySlots>,
    vm: Vm,
    /// For devices that are plugged in later ([`Handle`] has it weakly), and to look at their rings.
    memory: SharedMemory,
    ram: Arc<GuestRam>,
    layout: Layout,
    config: VmConfig,
    _stop: StopHandle,
    statistics: StatisticsHandle,
    /// Whether the vCPUs ran before: their state is no longer that of power-on.
    used: bool,
    /// Whether it is powered on and nobody serves it yet.
    powered: bool,
    /// While it is saved for a snapshot or another program.
    held: Option<Held>,
    upgrade: UpgradeStatus,
    leaving: Leaving,
    /// Holds vCPUs back while it is sent.
    throttle: Option<Throttle>,
    /// For the other program.
    hand_over: Option<HandOver>,
    /// The last: when it goes, whoever waits is told that all devices are closed.
    requests: Requests,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("config", &self.config)
            .field("layout", &self.layout)
            .field("resources", &self.resources())
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// As it was built, without descriptors.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// For asking this machine for its statistics while it runs.
    #[must_use]
    pub fn statistics_handle(&self) -> StatisticsHandle {
        self.statistics.clone()
    }

    /// For asking this machine for something while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.requests.handle()
    }

    /// What the machine holds of KVM now; for leak tests and metrics.
    #[must_use]
    pub fn resources(&self) -> Resources {
        Resources {
            memory_slots: self.slots.count(),
            doorbells: self.doorbells.count(),
            mapped_doorbells: self.doorbells.mapped_count(),
            msi: self.msi.counts(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_handle_keeps_asking() {
        let handle = StopHandle::new().unwrap();
        let other = handle.clone();
        other.stop();
        handle.stop();
        assert_eq!(handle.eventfd().read().unwrap(), 2);
    }
}
