//! The machine of an incoming migration, as [`crate::migration::receive`] drives it.
//!
//! Owns how a machine is built from the source's description, and when it runs. It must not know
//! the protocol. All input comes from another host and is not trusted.
//!
//! ```text
//!   HELLO ─ prepare ─> built, memory mapped by its devices   refused before: await another source
//!                                                            refused later, as unfit: process ends
//!   state ─ restore ─> vCPUs, board; devices stopped
//!   GO    ─ run ─────> devices and vCPUs run, NICs are announced
//! ```

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::thread;

use vdpa::causes::in_one_line;
use vmm_sys_util::eventfd::EventFd;

use super::compat::{self, Document, Here, MemoryMax};
use super::{Direction, Migration, MigrationEnd, ReceiveConfig, load_tls};
use crate::config::{DeviceSource, VmConfig};
use crate::console::{Console, TerminalConsole};
use crate::event_loop::{EventLoop, Ready, Token};
use crate::kvm::saved::ClockPolicy;
use crate::machine::build::Given;
use crate::machine::error::SnapshotError;
use crate::machine::parts::Machine;
use crate::machine::saved::SavedMachine;
use crate::machine::signals::StopHandle;
use crate::memory;
use crate::migration::destination::Go;
use crate::migration::endpoint::{Endpoint, Listener};
use crate::migration::protocol::{Hello, RamRange, Refusal};
use crate::migration::{
    self, DestinationMachine, MigrationError, Outcome, RamImage, ReceiveOptions,
};
use crate::sandbox::seccomp;
use crate::snapshot::directory::STATE_FILE_MAX;
use crate::snapshot::format::Sections;
use crate::snapshot::memory_image::{MemoryDigest, PageSums};
use crate::{Error, ErrorKind};

/// A machine that is expected.
#[derive(Debug)]
pub struct Arriving {
    listener: Listener,
    config: ReceiveConfig,
    migration: Migration,
}

impl Arriving {
    /// Listens for a source, on the socket `listening` if it is given.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(config: ReceiveConfig, listening: Option<OwnedFd>) -> Result<Self, Error> {
        let (pairing, files) = (config.pairing.as_ref(), config.tls.as_ref());
        let tls = load_tls(&config.listen, pairing, files, config.plaintext)?;
        Ok(Self {
            listener: match listening {
                Some(socket) => Listener::adopt(&config.listen, socket, tls)?,
                None => Listener::bind(&config.listen, tls)?,
            },
            migration: Migration::new(Direction::Receive, config.listen.clone()),
            config,
        })
    }

    /// Returns the migration, for observers.
    #[must_use]
    pub fn migration(&self) -> &Migration {
        &self.migration
    }

    /// Waits for a source and takes over its machine. The machine runs, or is quiesced if the
    /// guest's location is unknown.
    ///
    /// # Errors
    /// `NotArrived`: no machine arrived.
    pub(in crate::machine) fn receive(
        &self,
        console: Console,
        stop: &StopHandle,
    ) -> Result<Machine, Error> {
        let done = vdpa::eventfd::new().map_err(Error::failed("eventfd"))?;
        let incoming = IncomingMigration {
            arriving: self,
            console: Some(console),
            stop,
            machine: None,
            sums: None,
        };
        let received = thread::scope(|scope| {
            let waiter = thread::Builder::new().name("stop".to_owned());
            waiter
                .spawn_scoped(scope, || {
                    seccomp::enter(seccomp::Thread::Stop);
                    self.cancel_on_stop(stop, &done);
                })
                .map_err(Error::failed("starting a thread"))?;
            let received = self.take(incoming);
            // The only possible failure is a counter at its maximum, which is readable too.
            let _ = done.write(1);
            received
        });
        if let Err(error) = &received {
            self.migration.finish(MigrationEnd::Stayed {
                why: in_one_line(error),
            });
        }
        received
    }

    /// Cancels the migration when the machine is asked to stop.
    fn cancel_on_stop(&self, stop: &StopHandle, done: &EventFd) {
        let waited = EventLoop::new().and_then(|events| {
            events.add(stop.eventfd().as_raw_fd(), Token::Stop)?;
            events.add(done.as_raw_fd(), Token::Request)?;
            let mut ready = Ready::default();
            events.wait(&mut ready)?;
            Ok(ready.tokens().any(|token| token == Token::Stop))
        });
        match waited {
            Ok(true) => self.migration.cancel(),
            Ok(false) => {}
            Err(error) => tracing::warn!(
                %error,
                "cannot watch for a stop request during the migration"
            ),
        }
    }

    fn take(&self, mut incoming: IncomingMigration<'_>) -> Result<Machine, Error> {
        let options = ReceiveOptions {
            state_max: STATE_FILE_MAX,
            secret: self.config.pairing.as_ref().map(|pairing| pairing.secret),
            ..ReceiveOptions::default()
        };
        loop {
            let monitor = self.migration.monitor();
            let mut accept = || self.listener.accept();
            let pending = migration::greet(&mut accept, &options, monitor).map_err(not_arrived)?;
            let outcome =
                migration::receive_from(&mut incoming, pending, &mut accept, &options, monitor);
            match outcome {
                Outcome::Destination => {
                    self.migration.finish(MigrationEnd::Moved);
                    let machine = incoming.into_machine()?;
                    let functions = self.config.vfio.clone();
                    machine.handle().plug_primaries_soon(functions);
                    return Ok(machine);
                }
                Outcome::Source {
                    why: MigrationError::OnlyTried,
                    ..
                } => tracing::info!("a source made a trial; waiting for its machine"),
                // Nothing was begun: the real source may still come.
                Outcome::Source { why, .. }
                    if incoming.console.is_some() && !matches!(why, MigrationError::Cancelled) =>
                {
                    tracing::warn!(
                        error = &why as &dyn std::error::Error,
                        "no machine arrived over a connection; waiting for the next"
                    );
                }
                Outcome::Source { why, .. } => return Err(not_arrived(why)),
                Outcome::Indeterminate { why } => {
                    self.migration.finish(MigrationEnd::Indeterminate {
                        why: in_one_line(&why),
                    });
                    return incoming.into_machine();
                }
            }
        }
    }
}

/// A machine that is arriving.
struct IncomingMigration<'a> {
    arriving: &'a Arriving,
    /// Present until the machine is built.
    console: Option<Console>,
    stop: &'a StopHandle,
    /// Present once it is built, with the source's configuration.
    machine: Option<(Machine, VmConfig)>,
    /// The checksums of the received memory, if the source has them compared.
    sums: Option<Arc<PageSums>>,
}

impl IncomingMigration<'_> {
    fn into_machine(self) -> Result<Machine, Error> {
        self.machine
            .map(|(machine, _)| machine)
            .ok_or_else(|| not_arrived(MigrationError::Cancelled))
    }

    /// Takes the console: a second attempt has none.
    fn console(&mut self) -> Result<Console, Error> {
        self.console
            .take()
            .ok_or_else(|| not_arrived(MigrationError::Cancelled))
    }

    /// Builds the machine that the source describes, with this host's resources.
    fn build(
        &mut self,
        hello: &Hello,
        console: impl FnOnce(&mut Self) -> Result<Console, Error>,
    ) -> Result<Machine, Vec<Refusal>> {
        let config = &self.arriving.config;
        let mut document = Document::read(&hello.compat)?;
        document.prepare(&Here {
            nics: &config.vdpa,
            functions: &config.vfio,
            kernel: config.kernel.as_deref(),
            initramfs: config.initramfs.as_deref(),
            memory_max: self.memory_max()?,
            hugepages: config.hugepages,
            host_numa_node: config.host_numa_node,
            cpu_affinity: &config.cpu_affinity,
            // Only processes of this user can connect: the socket's mode is 0600.
            same_user: matches!(config.listen, Endpoint::Unix(_)),
        })?;
        let given = Given {
            slots: document.slots(),
            ram: None,
        };
        let machine = console(self)
            .and_then(|console| Machine::build(&document.config, &given, console, self.stop))
            .map_err(|error| vec![compat::unbuildable(&error)])?;
        let refusals = document.compare(&machine.vcpus, &machine.device_manager);
        if refusals.is_empty() {
            Ok(machine)
        } else {
            Err(refusals)
        }
    }

    /// Returns how much memory a source may take now.
    fn memory_max(&self) -> Result<MemoryMax, Vec<Refusal>> {
        let config = &self.arriving.config;
        match config.max_memory {
            Some(max) => Ok(MemoryMax::Given(max.bytes())),
            None => memory::free(config.hugepages, config.host_numa_node)
                .map(MemoryMax::Free)
                .map_err(Error::failed("reading how much memory is free"))
                .map_err(|error| vec![compat::unbuildable(&error)]),
        }
    }
}

fn not_arrived(why: MigrationError) -> Error {
    Error::new(ErrorKind::NotArrived, "no machine arrived").because(why)
}

/// A console for a machine that never runs.
fn no_console() -> Result<Console, Error> {
    let output = File::options().write(true).open("/dev/null");
    Ok(Console::Terminal(TerminalConsole {
        input: None,
        output: output.map_err(Error::failed("opening /dev/null"))?.into(),
    }))
}

impl DestinationMachine for IncomingMigration<'_> {
    fn prepare(&mut self, hello: &Hello) -> Result<RamImage, Vec<Refusal>> {
        let document = Document::read(&hello.compat)?;
        let machine = self.build(hello, Self::console)?;
        let ram = RamImage::new(&machine.ram);
        // Otherwise none of the guest's memory is mapped in the first moments after the downtime.
        let ram = match machine.vcpus.pre_fault() {
            Ok(Some(pre_fault)) => ram.mapped_by(pre_fault),
            Ok(None) => ram,
            Err(error) => return Err(vec![compat::unbuildable(&error)]),
        };
        // Computed while the guest runs: during the downtime, the guest would wait for a read of
        // all its memory.
        let ram = if document.announces_digest() {
            let sums = Arc::new(PageSums::zeros(ram.len()));
            self.sums = Some(Arc::clone(&sums));
            ram.summed_by(sums)
        } else {
            ram
        };
        self.machine = Some((machine, document.config));
        Ok(ram)
    }

    fn try_out(&mut self, hello: &Hello) -> Result<Vec<RamRange>, Vec<Refusal>> {
        // A device that is open belongs to its owner until it is closed (VHOST_SET_OWNER,
        // linux/vhost.h).
        let config = &self.arriving.config;
        let nics = config.vdpa.iter();
        let nics = nics.map(|nic| (&nic.source, format!("NIC {}", nic.name())));
        let functions = config.vfio.iter();
        let functions = functions.map(|one| (&one.source, format!("VFIO device {}", one.name())));
        let devices = nics.chain(functions);
        let once = devices.filter(|(source, _)| matches!(source, DeviceSource::Descriptor(_)));
        let refusals: Vec<Refusal> = once
            .map(|(_, device)| Refusal {
                what: format!("a trial with the {device}"),
                source: "requested".to_owned(),
                destination: "not possible (its device came as a descriptor, which serves one \
                              machine)"
                    .to_owned(),
                remedy: "migrate without a trial, or have the destination wait with its path: \
                         path=… or host=…"
                    .to_owned(),
            })
            .collect();
        if !refusals.is_empty() {
            return Err(refusals);
        }
        // Dropped at once, with everything that it opened.
        let machine = self.build(hello, |_| no_console())?;
        Ok(RamImage::new(&machine.ram).ranges())
    }

    fn take_early(&mut self, state: &[u8]) -> Result<(), migration::MachineError> {
        match &self.machine {
            Some((machine, _)) => Ok(machine.device_manager.load_early(state)?),
            None => Err("there is no machine for an early state".into()),
        }
    }

    fn restore(&mut self, mut state: &[u8]) -> Result<(), migration::MachineError> {
        let Some((machine, config)) = &mut self.machine else {
            return Err("there is no machine to restore".into());
        };
        let mut sections =
            Sections::read(&mut state, STATE_FILE_MAX).map_err(SnapshotError::from)?;
        let saved = SavedMachine::take(&mut sections)?;
        let digest: Option<MemoryDigest> = sections.take_optional().map_err(SnapshotError::from)?;
        sections.finish().map_err(SnapshotError::from)?;
        let digested = digest.as_ref().map(MemoryDigest::size);
        if !compat::same_machine(&saved.config, config) {
            return Err("the machine changed during the migration".into());
        }
        if let Some(digest) = digest {
            // Before this host writes to memory.
            match &self.sums {
                Some(sums) => digest.compare(&sums.digest())?,
                None => digest.verify(&machine.ram)?,
            }
        }
        machine.restore_held(saved, ClockPolicy::Advance)?;
        if let Some(bytes) = digested {
            tracing::info!(bytes, "memory verified");
        }
        Ok(())
    }

    fn run(&mut self, _go: Go) -> Result<(), migration::MachineError> {
        if self.stop.is_asked() {
            // The machine would end at once, together with the guest, which is intact at the
            // source.
            return Err("this process received a stop request before the guest ran".into());
        }
        let Some((machine, _)) = &mut self.machine else {
            return Err("there is no machine to run".into());
        };
        machine.unquiesce()?;
        machine.announce_all();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that sends its description and nothing else.
    #[test]
    fn a_terabyte_is_refused_before_anything_is_mapped() {
        let socket = std::env::temp_dir().join(format!("bellhop-arrival-{}", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        for (max, said) in [
            (r#""max_memory": "2G","#, "2 GiB by --max-memory"),
            ("", "are free"),
        ] {
            let config = format!(r#"{{{max} "listen": "unix:{}"}}"#, socket.display());
            let arriving = Arriving::new(serde_json::from_str(&config).unwrap(), None).unwrap();
            let stop = StopHandle::new().unwrap();
            let mut incoming = IncomingMigration {
                arriving: &arriving,
                console: None,
                stop: &stop,
                machine: None,
                sums: None,
            };
            let hello = Hello {
                secret: crate::migration::protocol::MigrationSecret::default(),
                connections: 1,
                ram: Vec::new(),
                compat: serde_json::json!({
                    "state_versions": crate::machine::state_versions(),
                    "config": { "kernel": "/k", "memory": { "size": "1T", "hugepages": "1G" } },
                    "cpuid": [],
                    "devices": [],
                }),
            };
            // If it reached KVM, the console or the memory, the refusal would name those.
            for refusals in [
                incoming.prepare(&hello).unwrap_err(),
                incoming.try_out(&hello).unwrap_err(),
            ] {
                let [refusal] = &refusals[..] else {
                    panic!("{refusals:?}");
                };
                assert_eq!(refusal.what, "the guest's memory");
                assert!(refusal.destination.contains(said), "{refusal}");
                assert!(refusal.remedy.contains("--max-memory"), "{refusal}");
            }
        }
    }
}
