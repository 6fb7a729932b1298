//! A guest that migrates from one process to another, each with its own vDPA device.

#[allow(dead_code, reason = "not every test is a soak scenario")]
mod cpu_load;
#[allow(dead_code, reason = "not every peer is a guest")]
pub(crate) mod echo;
#[allow(dead_code, reason = "not every test has a bad link")]
pub(crate) mod faults;
#[allow(dead_code, reason = "not every test is a soak scenario")]
pub(crate) mod soak;

use std::process::Command;
use std::time::{Duration, Instant};

use lab::api::{Answer, Client};
use lab::guest::{BellhopArguments, Guest};
use lab::temp_path::TempPath;
use serde_json::{Value, json};

/// How long a guest may take to notice a change; it is emulated twice.
pub(crate) const NOTICE: Duration = Duration::from_secs(30);
/// How long a migration may take.
pub(crate) const MIGRATION: Duration = Duration::from_secs(120);

/// `dirty_tracking` of a NIC in the API: its queues stay direct, or a thread relays them.
#[allow(dead_code, reason = "not every test is about the guest's IOMMU")]
pub(crate) const MAPPINGS: &str = "Mappings";
#[allow(dead_code, reason = "not every test is about the guest's IOMMU")]
pub(crate) const SHADOW_QUEUES: &str = "ShadowQueues";

/// The default limit of the downtime.
#[allow(dead_code, reason = "not every test is about the guest's IOMMU")]
pub(crate) const DOWNTIME: Duration = Duration::from_millis(300);

/// One end of a migration: its API, its listening address, and its vDPA device.
pub(crate) struct Host {
    api: TempPath,
    endpoint: TempPath,
    /// The options of its NIC, if it has one.
    vdpa: Option<String>,
}

impl Host {
    /// The NIC is called `nic`, and `path` is its device.
    #[allow(dead_code, reason = "not every test has NICs")]
    pub(crate) fn new(name: &str, path: &std::path::Path) -> Self {
        Self {
            vdpa: Some(format!("id=nic,path={}", path.display())),
            ..Self::without_nic(name)
        }
    }

    /// An end whose guest has no NIC.
    pub(crate) fn without_nic(name: &str) -> Self {
        Self {
            api: TempPath::new(&format!("{name}.api")),
            endpoint: TempPath::new(&format!("{name}.move")),
            vdpa: None,
        }
    }

    /// Appends options to the NIC, such as `iommu=on`.
    #[allow(dead_code, reason = "not every test has some")]
    pub(crate) fn nic_options(mut self, options: &str) -> Self {
        self.vdpa = self.vdpa.map(|vdpa| format!("{vdpa},{options}"));
        self
    }

    /// The options of the NIC.
    #[allow(dead_code, reason = "not every test restores a snapshot")]
    pub(crate) fn vdpa(&self) -> &str {
        self.vdpa.as_deref().unwrap_or_default()
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.api.path())
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix:{}", self.endpoint.text())
    }

    /// Boots the guest here.
    #[track_caller]
    pub(crate) fn boot(&self, arguments: BellhopArguments) -> Guest {
        let arguments = arguments.argument("--api-socket", self.api.text());
        let arguments = match &self.vdpa {
            Some(vdpa) => arguments.argument("--vdpa", vdpa),
            None => arguments,
        };
        Guest::start(&arguments).unwrap()
    }

    /// Starts a process that waits for a guest.
    #[track_caller]
    pub(crate) fn wait(&self) -> Guest {
        self.wait_as(|_| {})
    }

    /// Like [`Host::wait`], with a modified command.
    #[track_caller]
    #[allow(dead_code, reason = "not every test changes it")]
    pub(crate) fn wait_as(&self, change: impl FnOnce(&mut Command)) -> Guest {
        let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
        command
            .args(["run", "--receive", &self.endpoint()])
            .args(["--api-socket", self.api.text()]);
        if let Some(vdpa) = &self.vdpa {
            command.args(["--vdpa", vdpa]);
        }
        change(&mut command);
        let guest = Guest::wait_for(command).unwrap();
        let started = Instant::now();
        while !self.endpoint.path().exists() || self.client().get("/v1/vm/migration").is_err() {
            assert!(started.elapsed() < NOTICE, "{}", guest.console());
            std::thread::sleep(Duration::from_millis(10));
        }
        guest
    }

    /// Requests the machine here to migrate to `destination`.
    #[track_caller]
    #[allow(dead_code, reason = "not every test acts while it moves")]
    pub(crate) fn send(&self, destination: &Self, more: Value) {
        self.send_to(&destination.endpoint(), more);
    }

    /// Like [`Host::send`], to any address.
    #[track_caller]
    #[allow(dead_code, reason = "not every test acts while it moves")]
    pub(crate) fn send_to(&self, endpoint: &str, more: Value) {
        self.post(endpoint, more, 202);
    }

    /// Sends a dry run of a migration to `destination`.
    #[track_caller]
    #[allow(dead_code, reason = "not every test asks before it moves")]
    pub(crate) fn try_out(&self, destination: &Self, more: Value) -> Value {
        let mut wanted = more;
        wanted["dry_run"] = true.into();
        self.post(&destination.endpoint(), wanted, 200)
    }

    #[track_caller]
    #[allow(dead_code, reason = "for those above")]
    fn post(&self, endpoint: &str, more: Value, status: u16) -> Value {
        let answer = self.try_post(endpoint, more).unwrap();
        assert_eq!(answer.status, status, "{}", answer.body);
        answer.body
    }

    fn try_post(&self, endpoint: &str, more: Value) -> lab::Result<Answer> {
        let mut wanted = json!({ "destination": endpoint });
        for (key, value) in more.as_object().unwrap() {
            wanted[key] = value.clone();
        }
        let body = json!({ "send": wanted });
        self.client().ask("POST", "/v1/vm/migration", Some(&body))
    }

    /// The answer of the guest here. Without one, it shows the machine's reports of itself and its
    /// NIC.
    #[track_caller]
    #[allow(dead_code, reason = "not every test asks so much of it")]
    pub(crate) fn answer(&self, answer: lab::Result<Value>) -> Value {
        answer.unwrap_or_else(|error| {
            let error = lab::error::report(&error);
            panic!("{error}\n{}", self.account())
        })
    }

    /// The machine's reports of itself and its NIC.
    #[allow(dead_code, reason = "not every test asks so much of it")]
    pub(crate) fn account(&self) -> String {
        let says = |path| self.client().get(path).unwrap_or_default();
        let (machine, nic) = (says("/v1/vm"), says("/v1/vm/nics/nic"));
        format!("the machine: {machine}\nits NIC: {nic}")
    }

    /// Checks how the writes of the NIC here are found while memory is copied, and that its queues
    /// are relayed only if they must be.
    #[track_caller]
    fn assert_tracking(&self, guest: &Guest, tracking: &str) {
        let started = Instant::now();
        loop {
            let nic = self.client().get("/v1/vm/nics/nic").unwrap();
            let relayed = threads(guest.pid()).contains("relay\n");
            let now = &nic["device"]["dirty_tracking"];
            if now.is_null() {
                let status = self.client().get("/v1/vm/migration").unwrap();
                assert_ne!(status["phase"], "Stayed", "{status}\n{}", guest.console());
                assert!(started.elapsed() < MIGRATION, "{nic}\n{status}");
                continue;
            }
            assert_eq!(now, tracking, "{nic}");
            // The thread may begin a moment after the answer.
            if relayed == (tracking == SHADOW_QUEUES) {
                return;
            }
            assert!(started.elapsed() < NOTICE, "{relayed}: {nic}");
        }
    }

    /// The result of the migration of the machine here, whose guest this is.
    #[track_caller]
    pub(crate) fn ended(&self, guest: &mut Guest) -> Value {
        self.try_ended().unwrap_or_else(|error| gone(guest, &error))
    }

    #[track_caller]
    fn try_ended(&self) -> lab::Result<Value> {
        let started = Instant::now();
        loop {
            let status = self.client().get("/v1/vm/migration")?;
            if ["Moved", "Stayed", "Indeterminate"]
                .iter()
                .any(|phase| status["phase"] == *phase)
            {
                return Ok(status);
            }
            assert!(started.elapsed() < MIGRATION, "{status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Panics for a source that does not answer, with the reason from its console.
#[track_caller]
fn gone(guest: &mut Guest, error: &lab::error::Error) -> ! {
    let exit = guest.wait_exit(NOTICE);
    let console = guest.console();
    let fault = lab::emulator::marked(&console);
    panic!("the source does not answer ({error}), and ended with {exit:?}\n{console}{fault}")
}

/// Migrates a guest; returns it at its destination, with the source's status.
#[track_caller]
#[allow(dead_code, reason = "scenarios compare all memory")]
pub(crate) fn move_guest(guest: Guest, from: &Host, to: &Host) -> (Guest, Value) {
    move_guest_as(guest, from, to, json!({}))
}

/// Like [`move_guest`], with the options in `more`.
#[track_caller]
#[allow(dead_code, reason = "not every test says how")]
pub(crate) fn move_guest_as(guest: Guest, from: &Host, to: &Host, more: Value) -> (Guest, Value) {
    let waiting = to.wait();
    move_to_waiting_as(guest, waiting, from, to, more)
}

/// Like [`move_guest`]: the destination compares all memory, and meanwhile `tracking` is how the
/// source finds what the NIC writes. The guest stops when the rest fits into `downtime`.
#[track_caller]
#[allow(dead_code, reason = "not every test is about the guest's IOMMU")]
pub(crate) fn move_guest_verified(
    guest: Guest,
    from: &Host,
    to: &Host,
    tracking: &str,
    downtime: Duration,
) -> (Guest, Value) {
    let waiting = to.wait();
    let downtime_ms = u64::try_from(downtime.as_millis()).unwrap();
    let more = json!({ "verify_memory": true, "downtime_ms": downtime_ms });
    from.send(to, more);
    from.assert_tracking(&guest, tracking);
    arrive(guest, waiting, from, to)
}

/// The names of a process's threads, one per line.
fn threads(pid: u32) -> String {
    let tasks = lab::files::list(format!("/proc/{pid}/task").as_ref()).unwrap();
    // A thread may end meanwhile.
    let names = tasks
        .iter()
        .map(|task| lab::files::read_text(&task.join("comm")));
    names.filter_map(Result::ok).collect()
}

/// Like [`move_guest`], to a process that already waits.
#[track_caller]
#[allow(dead_code, reason = "not every test has a process wait first")]
pub(crate) fn move_to_waiting(
    guest: Guest,
    waiting: Guest,
    from: &Host,
    to: &Host,
) -> (Guest, Value) {
    move_to_waiting_as(guest, waiting, from, to, json!({}))
}

/// Like [`move_to_waiting`], with the options in `more`.
#[track_caller]
#[allow(dead_code, reason = "for those above")]
pub(crate) fn move_to_waiting_as(
    mut guest: Guest,
    waiting: Guest,
    from: &Host,
    to: &Host,
    more: Value,
) -> (Guest, Value) {
    let asked = from.try_post(&to.endpoint(), more);
    let answer = asked.unwrap_or_else(|error| gone(&mut guest, &error));
    assert_eq!(answer.status, 202, "{}", answer.body);
    arrive(guest, waiting, from, to)
}

/// Waits until the guest is at its destination.
#[track_caller]
fn arrive(mut guest: Guest, mut waiting: Guest, from: &Host, to: &Host) -> (Guest, Value) {
    let status = from.ended(&mut guest);
    assert_eq!(
        status["phase"],
        "Moved",
        "{status}\n{}\n{}",
        guest.console(),
        waiting.console()
    );
    let exit = guest.wait_exit(NOTICE).unwrap();
    assert_eq!(exit.code(), Some(7), "{exit}: {}", guest.console());
    waiting.comes_from(guest).unwrap();
    let there = to.client().get("/v1/vm/migration").unwrap();
    assert_eq!(there["phase"], "Moved", "{there}");
    let machine = to.client().get("/v1/vm").unwrap();
    assert_eq!(
        machine["state"],
        "Running",
        "{machine}\n{}",
        waiting.console()
    );
    (waiting, status)
}
