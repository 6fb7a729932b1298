//! A guest whose NIC `nic` is swapped from one vDPA device to another, through the API of its
//! machine.

#[path = "../live/mod.rs"]
mod live;

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::sim::SimDevice;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// A running machine.
pub(crate) struct Vm {
    pub(crate) guest: Guest,
    client: Client,
}

impl Vm {
    /// `options` are those of `--vdpa`, with a leading comma.
    pub(crate) fn start(
        arguments: BellhopArguments,
        name: &str,
        device: &SimDevice,
        options: &str,
    ) -> Self {
        let file = format!("lab-swap-{name}-{}.socket", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let nic = format!("path={},id=nic{options}", device.path().display());
        let arguments = arguments
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.to_str().unwrap())
            .argument("--log-level", "info")
            .silence(Duration::from_secs(120));
        Self {
            guest: Guest::start(&arguments).unwrap(),
            client: Client::new(&socket),
        }
    }

    fn ask(&self, body: &Value) -> lab::api::Answer {
        let answer = self.client.ask("PATCH", "/v1/vm/nics/nic", Some(body));
        answer.unwrap()
    }

    /// Swaps the NIC to `to`. The device that it leaves is free afterwards.
    #[track_caller]
    pub(crate) fn swap(&self, from: &SimDevice, to: &SimDevice) {
        live::swap_nic(&self.client, to.path());
        File::options()
            .read(true)
            .write(true)
            .open(from.path())
            .unwrap();
    }

    /// Requests the device that the NIC already has: nothing changes.
    #[track_caller]
    pub(crate) fn stays(&self, device: &SimDevice) {
        let answer = self.ask(&json!({ "path": device.path() }));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.body["path"], json!(device.path()), "{}", answer.body);
    }

    /// Requests a swap that must be refused with this error; the NIC keeps its device.
    #[track_caller]
    pub(crate) fn refused(&self, body: &Value, status: u16, code: &str, words: &str) {
        let refused = self.is_refused(body, status, code, words);
        assert!(refused, "{body}");
    }

    /// Requests a swap that may be refused with this error. Returns true if it was.
    #[track_caller]
    pub(crate) fn is_refused(&self, body: &Value, status: u16, code: &str, words: &str) -> bool {
        let before = self.nic()["path"].clone();
        let answer = self.ask(body);
        println!("{body}: {}", answer.body);
        if answer.status == 200 {
            return false;
        }
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(answer.body["code"], code, "{}", answer.body);
        assert!(answer.body.to_string().contains(words), "{}", answer.body);
        assert_eq!(self.nic()["path"], before);
        true
    }

    /// Sets the device at this path as the backup of the NIC's device.
    #[track_caller]
    pub(crate) fn set_backup(&self, backup: &Path) {
        let answer = self.ask(&json!({ "backup": backup }));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.body["backup"], json!(backup), "{}", answer.body);
    }

    /// Waits for the result of the NIC's failover; returns the NIC.
    #[track_caller]
    pub(crate) fn failed_over(&self) -> Value {
        let begin = Instant::now();
        loop {
            let nic = self.nic();
            let state = nic["last_failover"]["state"].as_str();
            if state.is_some_and(|state| state != "UnderWay") {
                println!("failover after {:?}: {nic}", begin.elapsed());
                return nic;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{nic}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn nic(&self) -> Value {
        self.client.get("/v1/vm/nics/nic").unwrap()
    }

    /// The machine's log lines about the time without a device, one per swap.
    pub(crate) fn gaps(&self) -> Vec<String> {
        let console = self.guest.console();
        let said = console.lines().filter_map(|line| {
            let (_, rest) = line.split_once("gap=")?;
            Some(rest.split_whitespace().next()?.to_owned())
        });
        said.collect()
    }

    #[track_caller]
    pub(crate) fn power_off(self) {
        assert!(self.guest.power_off().unwrap().success());
    }
}
