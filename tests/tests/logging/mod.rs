//! A guest whose machine begins and ends to record what its device writes, while frames flow.
//!
//! The machine is `lab-machine`, whose socket takes `dirty-log on` and `dirty-log off`.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use lab::endurance::cycles;
use lab::guest::{BellhopArguments, Guest};
use serde_json::Value;

/// Far more than anything here takes.
const SILENCE: Duration = Duration::from_secs(120);

/// How long frames flow before and after each change.
const WHILE: Duration = Duration::from_millis(50);

/// What a guest may do meanwhile: the driver reset under its flood.
pub(crate) const REBIND: &str = "rebind-flooded 1 0";

/// How often a log begins and ends: with a default run, each kind of change comes once or twice.
pub(crate) fn rounds() -> u32 {
    cycles().unwrap().max(5) + 1
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

    /// The doorbells that the guest has now.
    pub(crate) fn doorbells(&self) -> u64 {
        self.ask("resources")["mapped_doorbells"].as_u64().unwrap()
    }

    /// Waits until so many threads poll relays: one that ends is still listed for a moment.
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

    /// Does something while the guest floods its network; how many frames it sent. That may be none: how much an
    /// emulated guest does in a tenth of a second is chance.
    #[track_caller]
    fn flooded(&mut self, work: impl FnOnce(&mut Self)) -> u64 {
        self.guest.command("flood-on 128").unwrap();
        thread::sleep(WHILE);
        work(self);
        thread::sleep(WHILE);
        let flooded = self.guest.command("flood-off").unwrap();
        assert_eq!(flooded["corrupt"], 0, "{flooded}");
        flooded["tx"].as_u64().unwrap()
    }

    /// Begins and ends the log `rounds` times under a flood. `traffic` is checked after each change, and `between`
    /// is what the guest does while the log is on, in each round.
    #[track_caller]
    pub(crate) fn log_under_traffic(
        &mut self,
        rounds: u32,
        mut traffic: impl FnMut(&mut Guest),
        mut between: impl FnMut(u32, &mut Self),
    ) {
        let mut sent = 0;
        for round in 0..rounds {
            sent += self.flooded(|machine| {
                machine.ask("dirty-log on");
            });
            self.relay_threads_are(1);
            traffic(&mut self.guest);
            self.guest.command("flood-on 128").unwrap();
            between(round, self);
            self.guest.command("flood-off").unwrap();
            traffic(&mut self.guest);
            sent += self.flooded(|machine| {
                machine.ask("dirty-log off");
            });
            traffic(&mut self.guest);
        }
        assert!(sent > 0, "no log began or ended under a flood");
    }

    #[track_caller]
    pub(crate) fn end(mut self) {
        let log = self.guest.command("dmesg").unwrap();
        assert_eq!(log["errors"], 0, "{log}");
        assert!(self.guest.power_off().unwrap().success());
        let _ = std::fs::remove_file(&self.socket);
    }
}
