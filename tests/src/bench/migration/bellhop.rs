//! Bellhop's guest, which migrates from one process to another and back.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::traffic::wait_until;
use super::{Move, Vmm};
use crate::api::Client;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::sim::SimDevice;
use crate::temp_path::TempPath;

/// How long an action that is instant without emulation may take.
const NOTICE: Duration = Duration::from_secs(60);
/// How long a migration may take.
const LIMIT: Duration = Duration::from_secs(180);
/// The polling interval. Each poll costs the measured process a little.
const LOOK: Duration = Duration::from_millis(10);

/// Traffic between two swaps.
const REST: Duration = Duration::from_millis(500);

/// One end of a migration.
#[derive(Debug)]
struct End {
    api: TempPath,
    endpoint: TempPath,
    device: SimDevice,
}

impl End {
    fn new(name: &str, mac: &str) -> Result<Self> {
        Ok(Self {
            api: TempPath::new(&format!("{name}-api")),
            endpoint: TempPath::new(&format!("{name}-move")),
            device: SimDevice::net(name, mac, 1500)?,
        })
    }

    fn client(&self) -> Client {
        Client::new(self.api.path())
    }

    fn endpoint(&self) -> String {
        format!("unix:{}", self.endpoint.path().display())
    }

    fn nic(&self) -> String {
        format!("id=nic,path={}", self.device.path().display())
    }

    /// Starts a process that waits for a guest.
    fn wait(&self, program: &Path) -> Result<Guest> {
        let mut command = Command::new(program);
        command
            .args(["run", "--receive", &self.endpoint()])
            .args(["--vdpa", &self.nic()])
            .arg("--api-socket")
            .arg(self.api.path());
        let guest = Guest::wait_for(command)?;
        wait_until("the process that is to receive", NOTICE, LOOK, || {
            Ok(self.endpoint.path().exists() && self.client().get("/v1/vm/migration").is_ok())
        })?;
        Ok(guest)
    }
}

/// A guest and its two ends. See the module.
#[derive(Debug)]
pub(super) struct Bellhop {
    // Dropped before its devices: an open device cannot be deleted.
    guest: Guest,
    program: PathBuf,
    ends: [End; 2],
    /// The device that the NIC is swapped to.
    spare: SimDevice,
    /// The index of the guest's current end.
    at: usize,
}

impl Bellhop {
    /// Boots the lab's guest.
    ///
    /// # Errors
    /// A device or the VMM is missing; those of [`Guest::start`].
    pub(super) fn start(mac: &str) -> Result<Self> {
        let program = std::env::var_os("BELLHOP")
            .map(PathBuf::from)
            .ok_or_else(|| Error::missing("BELLHOP is not set", "run it with `cargo lab bench`"))?;
        let ends = [End::new("move-a", mac)?, End::new("move-b", mac)?];
        let spare = SimDevice::net("move-c", mac, 1500)?;
        let arguments = BellhopArguments::small()?
            .argument("--vdpa", &ends[0].nic())
            .argument("--api-socket", ends[0].api.text());
        let guest = Guest::start(&arguments)?;
        Ok(Self {
            program,
            ends,
            spare,
            at: 0,
            guest,
        })
    }

    /// Swaps the NIC to another device and back to its own. Returns the times around each swap.
    ///
    /// # Errors
    /// The API refuses.
    pub(super) fn swap(&mut self) -> Result<Vec<(Instant, Instant)>> {
        let end = &self.ends[self.at];
        let mut swaps = Vec::new();
        for device in [&self.spare, &end.device] {
            let began = Instant::now();
            let body = json!({ "path": device.path() });
            end.client().done("PATCH", "/v1/vm/nics/nic", Some(&body))?;
            swaps.push((began, Instant::now()));
            std::thread::sleep(REST);
        }
        Ok(swaps)
    }

    /// Upgrades the VMM to the same program. Returns the times around the upgrade.
    ///
    /// # Errors
    /// The API refuses, or the program does not resume the guest.
    pub(super) fn upgrade(&mut self) -> Result<Vec<(Instant, Instant)>> {
        let client = self.ends[self.at].client();
        let before = client.get("/v1/vm")?["upgrades"].as_u64().unwrap_or(0);
        let began = Instant::now();
        let body = json!({ "program": self.program });
        client.done("POST", "/v1/vm/upgrade", Some(&body))?;
        wait_until("the upgrade", NOTICE, LOOK, || {
            // The API is away for a moment.
            match client.get("/v1/vm") {
                Ok(vm) if vm["upgrade_error"].is_string() => {
                    Err(Error::invalid("the upgrade", vm.to_string()))
                }
                Ok(vm) => Ok(vm["upgrades"].as_u64() > Some(before)),
                Err(_) => Ok(false),
            }
        })?;
        Ok(vec![(began, Instant::now())])
    }

    /// Switches the guest off.
    ///
    /// # Errors
    /// Those of [`Guest::power_off`].
    pub(super) fn power_off(self) -> Result<()> {
        self.guest.power_off().map(|_| ())
    }
}

impl Vmm for Bellhop {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn migrate(&mut self) -> Result<Move> {
        let (from, to) = (&self.ends[self.at], &self.ends[1 - self.at]);
        let mut waiting = to.wait(&self.program)?;
        let client = from.client();
        let began = Instant::now();
        client.done(
            "POST",
            "/v1/vm/migration",
            Some(&json!({ "send": { "destination": to.endpoint() } })),
        )?;
        let (mut last_seen, mut status) = (began, Value::Null);
        wait_until("Bellhop's migration", LIMIT, LOOK, || {
            let before = Instant::now();
            status = client.get("/v1/vm/migration")?;
            match status["phase"].as_str() {
                Some("Offer" | "Join" | "Copy") => {
                    last_seen = before;
                    Ok(false)
                }
                Some("Moved") => Ok(true),
                Some("Stop" | "Ready" | "Go" | "Done") => Ok(false),
                _ => Err(Error::invalid("Bellhop's migration", status.to_string())),
            }
        })?;
        let moved = Instant::now();
        std::mem::swap(&mut self.guest, &mut waiting);
        self.at = 1 - self.at;
        waiting.wait_exit(NOTICE)?;
        let number = |name: &str| {
            status[name]
                .as_f64()
                .ok_or_else(|| Error::invalid(status.to_string(), format!("it has no {name}")))
        };
        Ok(Move {
            began,
            stops: (last_seen, moved),
            before: last_seen,
            moved,
            own_downtime: number("downtime_ms")?,
            said: status,
        })
    }
}
