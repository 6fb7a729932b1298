//! Builds a machine, top to bottom.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use devices::bus::{Bus, BusDevice};
use devices::legacy::clock::{CLOCK_LEN, Clock};
use devices::legacy::event::{ACPI_EVENT_LEN, AcpiEvent};
use devices::legacy::power::{
    ACPI_POWER_LEN, AcpiPower, KEYBOARD_CONTROLLER_LEN, KeyboardController, PowerSignal,
};
use devices::legacy::serial::Serial;
use devices::pci::{ConfigPorts, Ecam, HOTPLUG_LEN, MmioWindow, PciBus, PciHotplug, Slot};

use super::device_manager::DeviceManager;
use super::devices::{self as backends, Device};
use super::faults::DoorbellFaults;
use super::generation::Generation;
use super::iommu;
use super::migration::OutgoingState;
use super::parts::Machine;
use super::passthrough::{Function, Passthrough};
use super::queue::Requests;
use super::ring_watch;
use super::signals::{StatisticsHandle, StopHandle};
use super::status_publisher::UpgradeStatus;
use crate::Error;
use crate::config::VmConfig;
use crate::console::{Attached, Console, ConsoleOutput};
use crate::event_loop::{EventLoop, Timer, Token};
use crate::host::Host;
use crate::kvm::cpuid::{baseline, physical_address_bits};
use crate::kvm::device_mappings::KvmDeviceMappings;
use crate::kvm::line::{InterruptLine, LevelLine};
use crate::kvm::memory_slots::MemorySlots;
use crate::kvm::msi::KvmMsiVectors;
use crate::kvm::{Hypervisor, PlatformAddresses};
use crate::layout::{self, AddressRange, Layout, common_physical_bits};
use crate::memory::GuestRam;
use crate::vcpu::{Buses, FaultHandler, Vcpus};

/// The keyboard controller's first port; its command port is the last one.
const KEYBOARD_CONTROLLER_PORT: u64 =
    layout::I8042_COMMAND_PORT as u64 + 1 - KEYBOARD_CONTROLLER_LEN;

/// The parts that a machine takes over from another one.
#[derive(Debug, Default)]
pub(super) struct Given<'a> {
    /// The slots of devices by name; other devices take the first free slots.
    pub(super) slots: BTreeMap<String, Slot>,
    /// Guest RAM.
    pub(super) ram: Option<&'a File>,
}

impl Machine {
    /// Builds the machine that `config` describes. Everything is opened, mapped and registered, and
    /// the vCPUs are parked. `stop` ends [`Machine::run`].
    ///
    /// # Errors
    /// See [`Error`]; nothing stays allocated.
    pub fn new(config: &VmConfig, console: Console, stop: &StopHandle) -> Result<Self, Error> {
        Self::build(config, &Given::default(), console, stop)
    }

    /// As [`Machine::new`], with parts of another machine.
    pub(super) fn build(
        config: &VmConfig,
        given: &Given<'_>,
        console: Console,
        stop: &StopHandle,
    ) -> Result<Self, Error> {
        let cpus = config.cpus.get();

        // Check that the host has the requested CPUs and node.
        let host = Host::new();
        config.cpu_affinity.check(cpus)?;
        host.check_cpus(config.cpu_affinity.lists())?;
        let node = config.memory.host_numa_node;
        if let Some(node) = node {
            host.check_node(node, config.memory.size.bytes())?;
        }

        // The VM and its memory.
        let hypervisor = Hypervisor::open()?;
        let ram_size = config.memory.size.bytes();
        let supported = hypervisor.supported_cpuid()?;
        let shown = baseline::show(&supported, config.cpu, common_physical_bits(ram_size))?;
        let layout = Layout::new(ram_size, physical_address_bits(&shown))?;
        let hugepages = config.memory.hugepages;
        let ram = Arc::new(match given.ram {
            None => GuestRam::on_node(&layout, hugepages, node)?,
            Some(file) => {
                let file = file.try_clone();
                let file = file.map_err(Error::failed("duplicating a descriptor"))?;
                GuestRam::adopt(&layout, file, hugepages)?
            }
        });
        let platform = PlatformAddresses {
            identity_map: layout::KVM_IDENTITY_MAP.start,
            tss: layout::KVM_TSS.start,
        };
        let vm = hypervisor.create_vm(platform, cpus)?;
        let slots = Arc::new(MemorySlots::new(vm.fd().clone()));
        slots
            .add_ram(ram.memory())
            .map_err(|source| Error::host("cannot give the guest its memory").because(source))?;
        let msi = KvmMsiVectors::new(vm.fd().clone());
        let mappings = Arc::new(KvmDeviceMappings::new(vm.fd().clone(), slots.clone()));

        // The buses, and the devices that every machine has.
        let io = Arc::new(Bus::new());
        let mmio = Arc::new(Bus::new());
        let power = Arc::new(PowerSignal::new().map_err(Error::failed("eventfd"))?);
        let events = EventLoop::new().map_err(Error::failed("epoll_create1"))?;
        let Attached {
            console_output,
            input,
            writer,
        } = ConsoleOutput::attach(console, &events)
            .map_err(Error::failed("waiting for the console"))?;
        let interrupt = vdpa::eventfd::new()
            .map(Arc::new)
            .map_err(Error::failed("eventfd"))?;
        let serial_line =
            InterruptLine::new(vm.fd().clone(), &interrupt, u32::from(layout::SERIAL_IRQ))
                .map_err(Error::failed("KVM_IRQFD"))?;
        let serial = Serial::new(interrupt, writer)
            .map(Arc::new)
            .map_err(Error::failed("eventfd"))?;
        let clock = Arc::new(Clock::new());
        let at_ports: [(u64, u64, Arc<dyn BusDevice>); 4] = [
            (
                layout::SERIAL_PORT.into(),
                layout::SERIAL_PORT_LEN.into(),
                serial.clone(),
            ),
            (
                layout::ACPI_SLEEP_CONTROL_PORT.into(),
                ACPI_POWER_LEN,
                Arc::new(AcpiPower::new(power.clone())),
            ),
            (
                KEYBOARD_CONTROLLER_PORT,
                KEYBOARD_CONTROLLER_LEN,
                Arc::new(KeyboardController::new(power.clone())),
            ),
            (layout::RTC_PORT.into(), CLOCK_LEN, clock.clone()),
        ];
        for (port, len, device) in at_ports {
            io.insert(port, len, device).map_err(not_placed)?;
        }

        // PCI.
        let window = |range: AddressRange| {
            MmioWindow::new(range.start, range.len).map_err(|source| {
                // An error in the machine's layout.
                Error::host("cannot lay out PCI memory").because(source)
            })
        };
        let (wide, narrow) = (window(layout.pci_mmio64())?, window(layout::PCI_MMIO32)?);
        let pci = Arc::new(PciBus::new(&mmio, wide, Some(narrow)));
        mmio.insert(
            layout::PCI_ECAM.start,
            layout::PCI_ECAM.len,
            Arc::new(Ecam::new(pci.clone())),
        )
        .map_err(not_placed)?;
        let config_ports = Arc::new(ConfigPorts::new(pci.clone()));
        io.insert(
            layout::PCI_CONFIG_PORT.into(),
            layout::PCI_CONFIG_PORT_LEN.into(),
            config_ports.clone(),
        )
        .map_err(not_placed)?;

        let line = LevelLine::new(vm.fd().clone(), u32::from(layout::HOTPLUG_IRQ));
        let hotplug = PciHotplug::new(pci.clone(), Box::new(line))
            .map(Arc::new)
            .map_err(Error::failed("eventfd"))?;
        io.insert(layout::HOTPLUG_PORT.into(), HOTPLUG_LEN, hotplug.clone())
            .map_err(not_placed)?;

        let event = |name, irq, port: u16| {
            let line = LevelLine::new(vm.fd().clone(), u32::from(irq));
            let event = Arc::new(AcpiEvent::new(name, Box::new(line)));
            io.insert(port.into(), ACPI_EVENT_LEN, event.clone())
                .map_err(not_placed)?;
            Ok::<_, Error>(event)
        };
        let button = event(
            "power button",
            layout::POWER_BUTTON_IRQ,
            layout::POWER_BUTTON_PORT,
        )?;
        let generation = event(
            "generation ID",
            layout::GENERATION_IRQ,
            layout::GENERATION_PORT,
        )?;

        // The devices on it.
        let memory = Arc::new(ram.memory().clone());
        // There is no memory hot-plug, so the end of RAM never grows.
        let ram_end = layout.ram().map(|range| range.end()).max().unwrap_or(0);
        let mut devices = backends::open(config, &memory, ram_end)?;
        let passthrough = Arc::new(Passthrough::new(vm.fd().clone()));
        let open = |function| passthrough.open(function, &memory);
        let functions = config.vfio.iter().map(open);
        let functions: Vec<Function> = functions.collect::<Result<_, _>>()?;
        let (domains, iommu) = config
            .iommu_needed()
            .map(|iommu| iommu::create(iommu, &memory, &mut devices, &functions))
            .unzip();
        let mut device_manager = DeviceManager::new(
            pci.clone(),
            msi.clone(),
            mappings.clone(),
            node,
            config.ring_watch,
            domains,
        );
        // The IOMMU is restored before the devices behind it.
        let devices = iommu.into_iter().chain(devices);
        let (placed, others): (Vec<Device>, Vec<Device>) =
            devices.partition(|device| given.slots.contains_key(&device.id));
        for device in placed.into_iter().chain(others) {
            let slot = given.slots.get(&device.id).copied();
            let slot = slot.or_else(|| iommu::fixed_slot(&device.id));
            device_manager.attach(device, slot, &events)?;
        }
        for function in functions {
            let slot = given.slots.get(&function.config.name()).copied();
            device_manager.attach_vfio(function, slot, &events)?;
        }

        // The descriptors that the vmm thread polls.
        let requests = Requests::new(&ram, ram_end, Arc::downgrade(&passthrough))
            .map_err(Error::failed("eventfd"))?;
        requests.publish_devices(
            device_manager.pluggable(),
            device_manager.pluggable(),
            device_manager.pluggable(),
        );
        let statistics = StatisticsHandle::new().map_err(Error::failed("eventfd"))?;
        let poll = |fd: &dyn AsRawFd, token| {
            let added = events.add(fd.as_raw_fd(), token);
            added.map_err(Error::failed("epoll_ctl"))
        };
        for (eventfd, token) in [
            (stop.eventfd(), Token::Stop),
            (power.eventfd(), Token::Power),
            (serial.input_space(), Token::ConsoleRoom),
            (serial.output_waits(), Token::ConsoleOutput),
            (&*statistics.0, Token::Statistics),
            (requests.eventfd(), Token::Request),
            (hotplug.eventfd(), Token::Ejected),
        ] {
            poll(eventfd, token)?;
        }
        let check_timer = Timer::new().map_err(Error::failed("timerfd_create"))?;
        ring_watch::arm(&check_timer).map_err(Error::failed("timerfd_settime"))?;
        poll(&check_timer, Token::Check)?;

        // The vCPUs, last: everything that they can reach exists by now.
        let buses = Buses { io, mmio };
        let faults: Arc<dyn FaultHandler> = Arc::new(DoorbellFaults {
            pci: pci.clone(),
            mappings: mappings.clone(),
        });
        let vcpus = Vcpus::new(
            &hypervisor,
            &vm,
            cpus,
            &shown,
            config.cpu_affinity.lists(),
            &buses,
            &faults,
        )?;
        poll(vcpus.failure_event(), Token::VcpuFailed)?;

        Ok(Self {
            vcpus,
            events,
            input,
            console_output,
            check_timer,
            watches_rings: false,
            device_manager,
            hotplug,
            pci,
            _buses: buses,
            serial,
            power,
            button,
            generation: Generation::new(generation),
            clock,
            config_ports,
            _serial_line: serial_line,
            mappings,
            msi,
            slots,
            _passthrough: passthrough,
            vm,
            ram,
            layout,
            config: kept(config),
            stop: stop.clone(),
            statistics,
            used: false,
            powered: false,
            quiesced: None,
            upgrade: UpgradeStatus::default(),
            outgoing: OutgoingState::default(),
            throttle: None,
            hand_over: None,
            requests,
        })
    }
}

/// For `map_err`: two devices claim the same addresses, an error in the machine's layout.
fn not_placed(source: devices::Error) -> Error {
    Error::host("cannot place a device of the machine").because(source)
}

/// Copies the configuration without descriptors, so that a device is free once the guest has
/// ejected it. The IOMMU stays, even if no device needs it any more.
fn kept(config: &VmConfig) -> VmConfig {
    let mut config = config.clone();
    config.iommu = config.iommu_needed();
    config.release_descriptors();
    config
}
