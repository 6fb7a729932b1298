//! Runs a machine: power on, serve, end.

use std::time::Duration;

use devices::legacy::power::PowerRequest;
use devices::legacy::serial::Serial;

use super::end::{self, Exit};
use super::migration::OutgoingState;
use super::parts::Machine;
use super::status_publisher::RunState;
use crate::Error;
use crate::acpi;
use crate::boot::{self, BootRegisters, BootSource};
use crate::console::{Pumped, Receiver};
use crate::event_loop::{Ready, Token};

/// How often a reset that waits for storage looks for a request to stop.
const STORAGE_POLL: Duration = Duration::from_millis(50);

impl Receiver for Serial {
    fn receive(&self, bytes: &[u8]) -> usize {
        self.enqueue(bytes)
    }
}

/// Why serving stopped.
enum Served {
    /// The guest requested a reset.
    Reset,
    /// The run is over.
    Ended(Exit),
}

impl Machine {
    /// Powers the machine on and serves it until it ends; guest resets do not end it. The calling
    /// thread is the vmm thread meanwhile. On return all vCPUs are parked; running again is the
    /// same as a reset.
    ///
    /// # Errors
    /// The kernel cannot be loaded, or the host fails. See [`Error`].
    pub fn run(&mut self) -> Result<Exit, Error> {
        let run = self.power_on_and_serve();
        // Read only now: the progress of the outgoing migration at the end of the run.
        let result = self.outgoing.ends(run);
        if matches!(result, Ok(Exit::HandedOver)) {
            // It resumes, here or in another program.
            self.powered = true;
            return result;
        }
        self.powered = false;
        self.vcpus.pause();
        self.watch_rings(false);
        // The console first: a listener may look at it once the end is published.
        self.console_output
            .finish(&self.serial, &mut self.input, &self.events);
        self.requests.publish_end(end::of_run(&result));
        result
    }

    fn power_on_and_serve(&mut self) -> Result<Exit, Error> {
        loop {
            if !self.powered {
                if self.used && !self.stop_devices() {
                    return Ok(Exit::Stopped);
                }
                self.power_on()?;
            }
            let served = self.serve();
            self.powered = false;
            match served? {
                Served::Reset => tracing::info!("the guest resets the machine"),
                Served::Ended(exit) => return Ok(exit),
            }
        }
    }

    /// Powers the machine on from any state; see the module's documentation. [`Machine::run`] calls
    /// it if needed. Call it before to learn early whether the kernel can be loaded.
    ///
    /// # Errors
    /// As [`Machine::run`].
    pub fn power_on(&mut self) -> Result<(), Error> {
        if self.used {
            self.reset()?;
        }
        self.used = true;
        let source = BootSource {
            kernel: &self.config.kernel,
            initramfs: self.config.initramfs.as_deref(),
            cmdline: &self.config.cmdline,
        };
        let booted = boot::load(self.ram.memory(), &self.layout, &source)?;
        acpi::write(
            self.ram.memory(),
            &self.layout,
            self.config.cpus.get(),
            self.device_manager.has_iommu(),
        )?;
        self.generation
            .power_on(self.ram.memory())
            .map_err(Error::failed("making a generation ID"))?;
        let registers = booted.registers();
        self.vcpus.set_msrs(&BootRegisters::MSRS)?;
        self.vcpus
            .set_entry(&registers.regs, |sregs| *sregs = registers.special(*sregs))?;
        tracing::debug!(entry = ?booted.entry, "power on");
        self.powered = true;
        // A machine that was paused at its reset stays paused.
        self.start(self.requests.run_state() == RunState::Paused);
        Ok(())
    }

    /// Stops all devices, and waits until no storage writes into memory for the former guest.
    /// Returns `false` if the machine is asked to stop meanwhile.
    fn stop_devices(&mut self) -> bool {
        self.vcpus.pause();
        self.device_manager.reset_all();
        let mut waits = false;
        while !self.device_manager.await_resets(STORAGE_POLL) {
            if self.stop.is_asked() {
                return false;
            }
            if !std::mem::replace(&mut waits, true) {
                tracing::warn!("the machine's reset waits for the storage of a disk");
            }
        }
        true
    }

    /// Resets everything to power-on except memory.
    fn reset(&mut self) -> Result<(), Error> {
        self.vcpus.pause();
        self.watch_rings(false);
        self.finish_unplugs();
        self.pci.reset();
        self.device_manager.power_on_iommu();
        // No queue runs, so this clears all alarms.
        self.sample_rings();
        self.serial.reset();
        self.button.reset();
        self.input.reset(&self.events);
        self.vm.reset_irqchips()?;
        self.vcpus.reset()?;
        // Discards a request of the previous guest, made after the one being served.
        self.power.take();
        tracing::debug!(resources = ?self.resources(), "machine reset");
        Ok(())
    }

    /// The vmm thread's loop.
    fn serve(&mut self) -> Result<Served, Error> {
        // A console that cannot be polled may have input already.
        if self.pump_input(false) == Pumped::Leave {
            return Ok(Served::Ended(Exit::Stopped));
        }
        let mut ready = Ready::default();
        loop {
            self.events
                .wait(&mut ready)
                .map_err(Error::failed("epoll_wait"))?;
            for token in ready.tokens() {
                if let Some(served) = self.dispatch(token)? {
                    return Ok(served);
                }
            }
        }
    }

    fn dispatch(&mut self, token: Token) -> Result<Option<Served>, Error> {
        match token {
            // Not read: the request stays set.
            Token::Stop => return Ok(Some(Served::Ended(Exit::Stopped))),
            // A saved machine has none pending: see `Machine::save`.
            Token::VcpuFailed => {
                if let Some(report) = self.vcpus.take_report() {
                    return Ok(Some(Served::Ended(Exit::Crashed(report))));
                }
            }
            Token::Statistics => {
                // A wake-up only; the count does not matter.
                let _ = self.statistics.0.read();
                match self.vcpus.statistics() {
                    Ok(counted) => tracing::info!("KVM counted {counted:?}"),
                    Err(error) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot read KVM's counters"
                    ),
                }
            }
            // A quiesced guest's request is served when and where the guest resumes.
            Token::Power if self.quiesced.is_some() => self.power.hold(),
            Token::Power => match self.power.take() {
                Some(PowerRequest::Off) => return Ok(Some(Served::Ended(Exit::PoweredOff))),
                Some(PowerRequest::Reset) => return Ok(Some(Served::Reset)),
                None => {}
            },
            Token::Request => {
                self.serve_requests();
                if self.hand_over.is_some() {
                    return Ok(Some(Served::Ended(Exit::HandedOver)));
                }
                if self.outgoing == OutgoingState::Departed {
                    return Ok(Some(Served::Ended(Exit::Moved)));
                }
            }
            Token::Ejected => self.take_ejected(),
            Token::Throttle => self.throttle_turn(),
            Token::Check => {
                self.check_timer.take();
                if self.watches_rings {
                    self.sample_rings();
                }
                self.check_removals();
            }
            Token::ConsoleInput => {
                if self.pump_input(true) == Pumped::Leave {
                    return Ok(Some(Served::Ended(Exit::Stopped)));
                }
                self.console_output
                    .input_read(&mut self.input, &self.events);
            }
            Token::ConsoleRoom => {
                // A wake-up only: there is room, whatever the count.
                let _ = self.serial.input_space().read();
                if self.pump_input(false) == Pumped::Leave {
                    return Ok(Some(Served::Ended(Exit::Stopped)));
                }
            }
            Token::ConsoleOutput => {
                self.console_output
                    .output(&self.serial, &mut self.input, &self.events)
                    .map_err(Error::failed("waiting for the console's output"))?;
            }
            Token::ConsoleWritable => {
                self.console_output
                    .writable(&self.serial, &mut self.input, &self.events)
                    .map_err(Error::failed("epoll_ctl"))?;
            }
            Token::ConsoleConnection => {
                self.console_output
                    .connection(&mut self.input, &self.events);
            }
            Token::Device { device, token } => {
                match self.device_manager.device(device) {
                    Some(one) => {
                        if one.process(token) {
                            self.begin_failover(device, "the device has failed");
                        }
                    }
                    // A function of the host, or a device that was removed after the kernel
                    // reported the event.
                    None => self.check_functions(),
                }
            }
        }
        Ok(None)
    }

    fn pump_input(&mut self, readable: bool) -> Pumped {
        if readable {
            self.input.readable(&*self.serial, &self.events)
        } else {
            self.input.room(&*self.serial, &self.events)
        }
    }
}
