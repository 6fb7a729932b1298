//! Saves a machine, resumes it afterwards, and restores it.
//!
//! Owns the order, which is the same for a snapshot, a migration and an upgrade. It must not know
//! the destination or the origin of the state.
//!
//! ```text
//!   Running ──┐    vCPUs parked, devices stopped      resume: devices restored in place
//!             +── save ─────────────────────> quiesced ────────────────────────────────> as before
//!   Paused ───┘    (if one cannot be saved,
//!                   those before it are restored)
//!
//!   restore: built ──> memory ──> functions load ──> interrupt controllers, clock ──> vCPUs
//!            ──> platform ──> IOMMU's domains ──> devices ──> functions start ──> runs
//! ```
//! Devices are saved before vCPUs: an interrupt that a device sent when it stopped is in a local
//! APIC by then. Functions of the host are stopped after them, by their drivers. Devices are
//! restored after vCPUs, since each device that ran sends one spurious interrupt.

use devices::virtio::block::engine::hung_disks;
use devices::virtio::iommu::DomainsState;

use super::error::{RequestError, SnapshotError};
use super::parts::Machine;
use super::pluggable::{DiskStatus, NicStatus, VfioStatus};
use super::quiesced::{Arrived, Quiesced, QuiescedFor};
use super::saved::{SavedDevice, SavedFunction, SavedMachine, SavedPlatform};
use super::status_publisher::RunState;
use crate::Error;
use crate::config::VmConfig;
use crate::kvm::saved::{ClockPolicy, VmState};
use crate::vcpu::VcpuState;

/// Whose past a restored machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Past {
    /// Its own: it was handed over and is the only machine with this state. Its clock follows real
    /// time.
    Own,
    /// Its own, after another program failed to take over: some devices may have worked meanwhile.
    Returned,
    /// Shared: any number of machines can come from the snapshot. Its clock continues at the
    /// snapshot's time.
    Shared,
}

impl Machine {
    /// The reason for which the machine is quiesced, if it is.
    pub(super) fn quiesced_for(&self) -> Option<QuiescedFor> {
        self.quiesced.as_ref().map(|quiesced| quiesced.quiesced_for)
    }

    /// Fails if the machine is saved and quiesced.
    pub(super) fn ensure_not_quiesced(&self) -> Result<(), RequestError> {
        match self.quiesced_for() {
            Some(QuiescedFor::Snapshot) => Err(RequestError::Saving),
            Some(QuiescedFor::Migration) => Err(RequestError::Quiesced),
            None => Ok(()),
        }
    }

    /// Fails if the machine migrates, or has a function that cannot be saved.
    pub(super) fn ensure_savable(&self) -> Result<(), RequestError> {
        self.ensure_not_migrating()?;
        self.device_manager.ensure_functions_savable()
    }

    /// Fails if a vCPU has failed: that vCPU must not run again, and the machine is about to end.
    pub(super) fn ensure_not_crashed(&self) -> Result<(), RequestError> {
        match self.vcpus.failure() {
            Some(report) => Err(RequestError::Crashed(report)),
            None => Ok(()),
        }
    }

    /// Whether the machine is quiesced for a migration.
    pub(super) fn is_quiesced_for_migration(&self) -> bool {
        self.quiesced_for() == Some(QuiescedFor::Migration)
    }

    /// Parks the vCPUs, stops the devices and returns the whole state but guest memory. Guest
    /// memory does not change until [`Machine::unquiesce`].
    ///
    /// # Errors
    /// [`RequestError`]: the machine is saved already, or a device cannot be saved; it is as
    /// before. [`RequestError::Crashed`]: a vCPU has failed, maybe just now. The guest is lost, so
    /// nothing is saved and nothing resumes: the machine ends as soon as the vmm thread gets to it.
    pub(super) fn save(&mut self, quiesced_for: QuiescedFor) -> Result<SavedMachine, RequestError> {
        self.ensure_not_quiesced()?;
        // An ejected device is no longer part of the machine.
        self.take_ejected();
        if hung_disks() > 0 {
            return Err(RequestError::HungDisk);
        }
        let ran = self.requests.run_state() == RunState::Running;
        self.pause();
        // From here on no vCPU can fail, so a quiesced machine cannot crash.
        self.ensure_not_crashed()?;
        let mut saved = self.save_parked(quiesced_for);
        match &mut saved {
            Ok(saved) => {
                saved.ran = ran;
                self.quiesced = Some(Quiesced {
                    devices: saved.devices.clone(),
                    functions: Vec::new(),
                    iommu: None,
                    ran,
                    quiesced_for,
                    arrived: None,
                });
            }
            Err(_) if ran => self.resume(),
            Err(_) => {}
        }
        saved
    }

    fn save_parked(&self, quiesced_for: QuiescedFor) -> Result<SavedMachine, RequestError> {
        let devices = self.device_manager.save()?;
        let functions = match self.device_manager.save_functions() {
            Ok(functions) => functions,
            Err(error) => {
                self.device_manager.restore_in_place(&devices);
                return Err(error);
            }
        };
        let rest = self.save_processors();
        match rest {
            Ok((vm, vcpus)) => Ok(SavedMachine {
                config: self.config_now(),
                vm,
                vcpus,
                platform: SavedPlatform {
                    serial: self.serial.save(),
                    button: self.button.save(),
                    clock: self.clock.save(),
                    hotplug: self.hotplug.save(),
                    pci: self.pci.save(),
                    config_ports: self.config_ports.save(),
                    power: self.power.save(),
                    generation: self.generation.save(),
                },
                iommu: self.device_manager.save_domains(),
                devices,
                functions,
                views: match quiesced_for {
                    QuiescedFor::Snapshot => self.device_manager.function_views(),
                    QuiescedFor::Migration => Vec::new(),
                },
                ran: false,
                upgrades: self.upgrade.count,
            }),
            Err(error) => {
                self.device_manager.restore_in_place(&devices);
                self.device_manager.resume_functions();
                Err(error.into())
            }
        }
    }

    fn save_processors(&self) -> Result<(VmState, Vec<VcpuState>), Error> {
        Ok((self.vm.save()?, self.vcpus.save()?))
    }

    /// Returns the configuration with the current pluggable devices.
    pub(super) fn config_now(&self) -> VmConfig {
        let mut config = self.config.clone();
        // vDPA devices other than NICs are not hot-pluggable.
        config.vdpa.retain(|vdpa| {
            let id = vdpa.name();
            self.device_manager.named(&id).is_some()
                && self.device_manager.pluggable_named(&id).is_none()
        });
        let nics: Vec<NicStatus> = self.device_manager.pluggable();
        config.vdpa.extend(nics.into_iter().map(|nic| nic.config));
        let vfio: Vec<VfioStatus> = self.device_manager.pluggable();
        config.vfio = vfio.into_iter().map(|function| function.config).collect();
        let disks: Vec<DiskStatus> = self.device_manager.pluggable();
        config.disks = disks.into_iter().map(|disk| disk.config).collect();
        config
    }

    /// Resumes a saved machine as it was before. Does nothing if it is not quiesced.
    ///
    /// # Errors
    /// [`SnapshotError`]: a device of a machine from another host rejects its state. The machine
    /// stays quiesced.
    pub(super) fn unquiesce(&mut self) -> Result<(), SnapshotError> {
        let Some(quiesced) = self.quiesced.take() else {
            return Ok(());
        };
        if let Some(arrived) = quiesced.arrived {
            if let Err(error) = self.restore_arrived(&quiesced, arrived == Arrived::Tried) {
                // Reset, so that no device works for the guest and a second attempt is possible.
                self.device_manager.reset_all();
                self.quiesced = Some(Quiesced {
                    arrived: Some(Arrived::Tried),
                    ..quiesced
                });
                return Err(error);
            }
        } else {
            self.device_manager.restore_in_place(&quiesced.devices);
            self.device_manager.resume_functions();
        }
        // Requests that the guest made while it was stopped take effect now.
        self.power.release();
        if quiesced.ran {
            self.resume();
        }
        Ok(())
    }

    /// Makes a saved machine resume paused.
    pub(super) fn pause_when_resumed(&mut self) {
        if let Some(quiesced) = &mut self.quiesced {
            quiesced.ran = false;
        }
    }

    /// Loads a state into a machine that was built for it and already has its memory.
    pub(super) fn restore(
        &mut self,
        saved: &SavedMachine,
        past: Past,
        paused: bool,
    ) -> Result<(), Error> {
        let clock_policy = match past {
            Past::Own | Past::Returned => ClockPolicy::Advance,
            Past::Shared => ClockPolicy::StandStill,
        };
        self.restore_board(saved, clock_policy)?;
        if past == Past::Shared {
            self.generation
                .renew(self.ram.memory())
                .map_err(Error::failed("making a generation ID"))?;
        }
        self.restore_devices(
            &saved.devices,
            &saved.functions,
            saved.iommu.as_ref(),
            past == Past::Returned,
        )?;
        self.start(paused);
        Ok(())
    }

    /// As [`Machine::restore`], but the devices stay stopped and the machine is quiesced until
    /// [`Machine::unquiesce`].
    pub(super) fn restore_held(
        &mut self,
        saved: SavedMachine,
        clock_policy: ClockPolicy,
    ) -> Result<(), Error> {
        self.device_manager.check(&saved.devices)?;
        self.device_manager.check_domains(saved.iommu.as_ref())?;
        self.restore_board(&saved, clock_policy)?;
        self.requests.publish_boot(true);
        self.quiesced = Some(Quiesced {
            devices: saved.devices,
            functions: saved.functions,
            iommu: saved.iommu,
            ran: saved.ran,
            quiesced_for: QuiescedFor::Migration,
            arrived: Some(Arrived::AtRest),
        });
        Ok(())
    }

    /// Restores everything but the devices. Functions take their states and stay stopped.
    fn restore_board(
        &mut self,
        saved: &SavedMachine,
        clock_policy: ClockPolicy,
    ) -> Result<(), Error> {
        self.device_manager.load_functions(&saved.functions)?;
        self.used = true;
        self.vm.restore(&saved.vm, clock_policy)?;
        self.vcpus.restore(&saved.vcpus)?;
        self.restore_platform(&saved.platform)?;
        self.powered = true;
        Ok(())
    }

    /// Restores the devices, which work from here on.
    fn restore_devices(
        &mut self,
        saved: &[SavedDevice],
        functions: &[SavedFunction],
        iommu: Option<&DomainsState>,
        again: bool,
    ) -> Result<(), SnapshotError> {
        self.device_manager.restore_domains(iommu)?;
        self.device_manager.restore(saved, again)?;
        self.device_manager.start_functions(functions)?;
        self.publish();
        self.pci.remap();
        Ok(())
    }

    /// Restores the devices of a machine from another host. `again` if an earlier attempt failed,
    /// after which all devices were reset.
    fn restore_arrived(&mut self, quiesced: &Quiesced, again: bool) -> Result<(), SnapshotError> {
        let functions = &quiesced.functions;
        if again {
            self.device_manager.load_functions(functions)?;
        }
        let iommu = quiesced.iommu.as_ref();
        self.restore_devices(&quiesced.devices, functions, iommu, again)
    }

    fn restore_platform(&mut self, saved: &SavedPlatform) -> Result<(), SnapshotError> {
        let SavedPlatform {
            serial,
            clock,
            button,
            hotplug,
            pci,
            config_ports,
            power,
            generation,
        } = saved;
        self.serial.restore(serial)?;
        self.clock.restore(clock)?;
        self.button.restore(button)?;
        self.hotplug.restore(hotplug)?;
        self.pci.restore(pci).map_err(SnapshotError::HostBridge)?;
        self.config_ports.restore(config_ports)?;
        self.power.restore(power);
        self.generation.restore(generation.as_ref())?;
        Ok(())
    }
}
