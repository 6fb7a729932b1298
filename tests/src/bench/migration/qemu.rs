//! QEMU's guest, which migrates from one process to another and back.
//!
//! Its NIC is a plain `vhost-vdpa` one: QEMU puts shadow virtqueues under it when a migration
//! begins, while Bellhop shadows used rings.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::super::peer::{self, Nic};
use super::traffic::wait_until;
use super::{Move, Vmm};
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::qmp::Qmp;
use crate::sim::SimDevice;
use crate::temp_path::TempPath;

const SILENCE: Duration = Duration::from_secs(60);
const NOTICE: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(10);

/// The uncertainty, by the guest's clock, of the moment at which QEMU reports that it stopped.
const STOP: Duration = Duration::from_millis(3);

/// One end of a migration.
#[derive(Debug)]
struct End {
    monitor: TempPath,
    incoming: TempPath,
    device: SimDevice,
}

impl End {
    fn new(name: &str, mac: &str) -> Result<Self> {
        Ok(Self {
            monitor: TempPath::new(&format!("{name}-qmp")),
            incoming: TempPath::new(&format!("{name}-move")),
            device: SimDevice::net(name, mac, 1500)?,
        })
    }

    fn connect(&self) -> Result<Qmp> {
        let mut stream = None;
        wait_until("QEMU's monitor", NOTICE, LOOK, || {
            stream = UnixStream::connect(self.monitor.path()).ok();
            Ok(stream.is_some())
        })?;
        let stream = stream.ok_or_else(|| Error::invalid("QEMU's monitor", "it is not there"))?;
        Qmp::new(stream)
    }
}

/// A guest and its two ends. See the module.
#[derive(Debug)]
pub(super) struct Qemu {
    // Dropped before its devices: an open device cannot be deleted.
    guest: Guest,
    program: PathBuf,
    arguments: BellhopArguments,
    mac: String,
    ends: [End; 2],
    at: usize,
    monitor: Qmp,
}

impl Qemu {
    /// Boots the lab's guest.
    ///
    /// # Errors
    /// [`Error::Missing`] without QEMU; those of [`Guest::start_command`].
    pub(super) fn start(mac: &str) -> Result<Self> {
        let program = peer::qemu()?;
        let arguments = BellhopArguments::small()?;
        let ends = [End::new("qemu-a", mac)?, End::new("qemu-b", mac)?];
        let nic = Nic {
            device: ends[0].device.path(),
            mac,
            shadowed: false,
            iommu: false,
        };
        let monitor = ends[0].monitor.path();
        let command = || peer::movable(&program, &arguments, nic, monitor, None);
        let guest = Guest::start_command(command, SILENCE)?;
        let monitor = ends[0].connect()?;
        Ok(Self {
            program,
            arguments,
            mac: mac.to_owned(),
            ends,
            at: 0,
            guest,
            monitor,
        })
    }

    /// Switches the guest off.
    ///
    /// # Errors
    /// Those of [`Guest::power_off`].
    pub(super) fn power_off(self) -> Result<()> {
        self.guest.power_off().map(|_| ())
    }
}

impl Vmm for Qemu {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn migrate(&mut self) -> Result<Move> {
        let to = &self.ends[1 - self.at];
        to.monitor.clear();
        to.incoming.clear();
        let nic = Nic {
            device: to.device.path(),
            mac: &self.mac,
            shadowed: false,
            iommu: false,
        };
        let incoming = Some(to.incoming.path());
        let command = peer::movable(
            &self.program,
            &self.arguments,
            nic,
            to.monitor.path(),
            incoming,
        );
        let mut guest = Guest::wait_for(command)?;
        let mut monitor = to.connect()?;
        monitor.execute("query-status", &json!({}))?;
        let source = &mut self.monitor;
        source.take_events();
        let began = Instant::now();
        source.execute(
            "migrate",
            &json!({ "uri": format!("unix:{}", to.incoming.path().display()) }),
        )?;
        let (mut last_seen, mut status) = (began, Value::Null);
        wait_until("QEMU's migration", LIMIT, LOOK, || {
            let before = Instant::now();
            status = source.execute("query-migrate", &json!({}))?;
            match status["status"].as_str() {
                Some("setup" | "active" | "device" | "pre-switchover") => {
                    last_seen = before;
                    Ok(false)
                }
                Some("completed") => Ok(true),
                _ => Err(Error::invalid("QEMU's migration", status.to_string())),
            }
        })?;
        wait_until("QEMU's guest at the destination", NOTICE, LOOK, || {
            Ok(monitor.execute("query-status", &json!({}))?["running"] == true)
        })?;
        let moved = Instant::now();
        // QEMU's event may follow the answer that reports completion.
        source.execute("query-status", &json!({}))?;
        let stopped = event(&source.take_events(), "STOP")?;
        std::mem::swap(&mut self.guest, &mut guest);
        self.monitor = monitor;
        self.at = 1 - self.at;
        let number = |name: &str| {
            status[name]
                .as_f64()
                .ok_or_else(|| Error::invalid(status.to_string(), format!("it has no {name}")))
        };
        let earliest = |time: Instant| time.checked_sub(STOP).unwrap_or(time);
        Ok(Move {
            began,
            stops: (earliest(stopped), stopped + STOP),
            before: earliest(stopped),
            moved,
            own_downtime: number("downtime")?,
            said: status,
        })
    }
}

/// The time of an event, as QEMU reports it.
fn event(events: &[Value], name: &str) -> Result<Instant> {
    let missing = || Error::invalid("QEMU's monitor", format!("it told no {name}: {events:?}"));
    let event = events
        .iter()
        .find(|event| event["event"] == name)
        .ok_or_else(missing)?;
    let number = |field: &str| event["timestamp"][field].as_u64().ok_or_else(missing);
    let since_epoch =
        Duration::from_secs(number("seconds")?) + Duration::from_micros(number("microseconds")?);
    let ago = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH + since_epoch)
        .unwrap_or_default();
    Instant::now().checked_sub(ago).ok_or_else(missing)
}
