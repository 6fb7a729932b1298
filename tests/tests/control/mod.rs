//! A machine whose NICs a test plugs and unplugs (`lab-machine`), and its control socket.

use lab::guest::{BellhopArguments, Guest};
use lab::sim::SimDevice;
use serde_json::Value;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) const SILENCE: Duration = Duration::from_secs(120);

/// How long a guest may take to find or to release a NIC; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// The control socket of a machine.
pub(crate) struct Control(PathBuf);

impl Control {
    pub(crate) fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("lab-{name}-{}.socket", std::process::id())))
    }

    fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(&self.0) {
                Ok(stream) => return stream,
                Err(error) => assert!(start.elapsed() < SILENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ask(&self, line: &str) -> Value {
        let mut stream = self.connect();
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        // Reads to the end: then the machine has closed its side, and its descriptor no longer
        // counts.
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    #[track_caller]
    pub(crate) fn ok(&self, line: &str) -> Value {
        let answer = self.ask(line);
        assert!(answer.get("error").is_none(), "{line}: {answer}");
        answer
    }

    #[track_caller]
    pub(crate) fn refused(&self, line: &str) -> String {
        let answer = self.ask(line);
        match &answer["error"] {
            Value::String(error) => error.clone(),
            _ => panic!("{line}: {answer}"),
        }
    }

    pub(crate) fn plug(&self, device: &SimDevice, id: &str) -> Value {
        let nic = self.ok(&format!("plug path={},id={id}", device.path().display()));
        assert_eq!(nic["state"], "plugged", "{nic}");
        nic
    }

    pub(crate) fn is_unplugged(&self, nic: &Value, limit: Duration) -> bool {
        let line = format!("wait-unplugged {} {}", nic["serial"], limit.as_millis());
        self.ok(&line)["unplugged"] == true
    }

    #[track_caller]
    pub(crate) fn unplug(&self, id: &str) {
        let nic = self.ok(&format!("unplug {id}"));
        assert_eq!(nic["state"], "unplug-requested", "{nic}");
        assert!(self.is_unplugged(&nic, NOTICE), "{nic}");
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn machine(arguments: BellhopArguments, control: &Control) -> BellhopArguments {
    arguments
        .program(Path::new(env!("CARGO_BIN_EXE_lab-machine")))
        .silence(SILENCE)
        .argument("--control", &control.0.display().to_string())
}

pub(crate) fn start(name: &str) -> (Control, Guest) {
    let control = Control::new(name);
    let guest = Guest::start(&machine(BellhopArguments::small().unwrap(), &control)).unwrap();
    (control, guest)
}

/// Checks that no process has the device open.
#[track_caller]
pub(crate) fn is_free(device: &SimDevice) {
    File::options()
        .read(true)
        .write(true)
        .open(device.path())
        .unwrap();
}
