//! A guest whose machine starts and stops logging its device's writes while frames flow.
//!
//! The machine is `lab-machine`, whose socket takes `dirty-log on` and `dirty-log off`. The flood
//! has a window, and each of its frames is sent back: the guest counts the lost ones.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use lab::endurance::cycles;
use lab::guest::{BellhopArguments, Guest};
use serde_json::Value;

/// Far longer than any step here takes.
const SILENCE: Duration = Duration::from_secs(120);

/// How long frames flow before and after each change.
const WHILE: Duration = Duration::from_millis(50);

/// What a guest may do meanwhile: reset the driver under its flood.
pub(crate) const REBIND: &str = "rebind-flooded 1 0";

/// How often a log begins and ends: with a default run, each kind of change comes once or twice.
pub(crate) fn rounds() -> u32 {
    cycles().unwrap().max(5) + 1
}

/// Frames of the flood that are in flight at once.
pub(crate) const WINDOW: u64 = 16;

/// No test here depends on the guest's memory size.
const MEMORY: &str = "128M";

/// The flood of a test, and how many of its frames may be lost.
pub(crate) struct Flood<'a> {
    /// The address of the echoing peer.
    pub(crate) to: &'a str,
    /// How many may be lost while the log begins or ends once.
    pub(crate) lost_by_log: u64,
    /// How many may be lost in one call of `between`.
    pub(crate) lost_between: u64,
}

/// How many frames this many resets of the device or its link may lose. The guest's driver or the
/// test requests the resets. Lost are the frames in flight, and those that the next run sends
/// before the NIC has its queues again.
pub(crate) const fn lost_by_resets(resets: u64) -> u64 {
    2 * WINDOW * resets
}

/// A guest that sends every frame back.
#[allow(dead_code, reason = "the simulator sends frames back itself")]
pub(crate) struct Echo(Guest);

#[allow(dead_code, reason = "the simulator sends frames back itself")]
impl Echo {
    pub(crate) fn start(device: &Path) -> Self {
        let arguments = BellhopArguments::small()
            .unwrap()
            .memory(MEMORY)
            .silence(SILENCE)
            .vdpa(device);
        let mut guest = Guest::start(&arguments).unwrap();
        guest.command("echo-on").unwrap();
        Self(guest)
    }

    #[track_caller]
    pub(crate) fn end(mut self) {
        let echoed = self.0.command("echo-off").unwrap();
        assert_eq!(echoed["corrupt"], 0, "{echoed}");
        assert!(self.0.power_off().unwrap().success());
    }
}

/// Sends checked frames to `mac`, which sends them back.
#[track_caller]
pub(crate) fn traffic(guest: &mut Guest, mac: &str) {
    const COUNT: u64 = 60;
    let line = format!("frames {COUNT} 590 {WINDOW} eth0 to {mac}");
    let answer = guest.command(&line).unwrap();
    lab::traffic::all_returned(&answer, COUNT).unwrap();
}

/// A machine and its socket.
pub(crate) struct Machine {
    socket: PathBuf,
    pub(crate) guest: Guest,
}

impl Machine {
    pub(crate) fn start(name: &str, device: &Path, processors: u32) -> Self {
        let name = format!("lab-{name}-{}.socket", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let arguments = BellhopArguments::small()
            .unwrap()
            .program(Path::new(env!("CARGO_BIN_EXE_lab-machine")))
            .silence(SILENCE)
            .processors(processors)
            .memory(MEMORY)
            .vdpa(device)
            .argument("--control", &socket.display().to_string());
        let guest = Guest::start(&arguments).unwrap();
        Self { socket, guest }
    }

    pub(crate) fn ask(&self, line: &str) -> Value {
        let begin = Instant::now();
        let mut stream = loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(begin.elapsed() < SILENCE, "{error}"),
            }
            thread::sleep(Duration::from_millis(10));
        };
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer.get("error").is_none(), "{line}: {answer}");
        answer
    }

    /// The number of doorbells that the guest has now.
    pub(crate) fn doorbells(&self) -> u64 {
        self.ask("resources")["mapped_doorbells"].as_u64().unwrap()
    }

    /// Waits until this many threads poll relays: one that ends is still listed for a moment.
    #[track_caller]
    pub(crate) fn relay_threads_are(&self, wanted: usize) {
        let begin = Instant::now();
        while self.relay_threads() != wanted {
            assert!(begin.elapsed() < SILENCE, "not {wanted} threads");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn relay_threads(&self) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.guest.pid())).unwrap();
        tasks
            .map_while(Result::ok)
            .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
            .filter(|name| name.trim() == "relay")
            .count()
    }

    /// Runs `work` while the guest floods `to`, which sends every frame back; returns how many it
    /// sent. At most `may_lose` of them may be lost.
    #[track_caller]
    pub(crate) fn flooded(&mut self, to: &str, may_lose: u64, work: impl FnOnce(&mut Self)) -> u64 {
        let line = format!("flood-on 300 {WINDOW} eth0 to {to}");
        self.guest.command(&line).unwrap();
        thread::sleep(WHILE);
        work(self);
        thread::sleep(WHILE);
        let flooded = self.guest.command("flood-off").unwrap();
        for wrong in ["corrupt", "duplicate"] {
            assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
        }
        let lost = flooded["lost"].as_u64().unwrap();
        assert!(lost <= may_lose, "at most {may_lose}: {flooded}");
        flooded["rx"].as_u64().unwrap()
    }

    /// Starts and stops the log `rounds` times under a flood. Traffic is checked after each change.
    /// In each round, `between` runs while the log is on, also under the flood.
    #[track_caller]
    pub(crate) fn log_under_traffic(
        &mut self,
        rounds: u32,
        flood: &Flood<'_>,
        mut between: impl FnMut(u32, &mut Self),
    ) {
        let to = flood.to;
        // The number of frames in one flood varies: the guest is emulated.
        let mut received = 0;
        for round in 0..rounds {
            received += self.flooded(to, flood.lost_by_log, |machine| {
                machine.ask("dirty-log on");
            });
            self.relay_threads_are(1);
            traffic(&mut self.guest, to);
            self.flooded(to, flood.lost_between, |machine| between(round, machine));
            traffic(&mut self.guest, to);
            received += self.flooded(to, flood.lost_by_log, |machine| {
                machine.ask("dirty-log off");
            });
            traffic(&mut self.guest, to);
        }
        assert!(received > 0, "no log began or ended under a flood");
    }

    #[track_caller]
    pub(crate) fn end(mut self) {
        let log = self.guest.command("dmesg").unwrap();
        assert_eq!(log["errors"], 0, "{log}");
        assert!(self.guest.power_off().unwrap().success());
        let _ = std::fs::remove_file(&self.socket);
    }
}
