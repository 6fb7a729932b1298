//! A machine without a terminal: its serial console on a Unix socket and in a log file.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::api::Client;
use lab::guest::BellhopArguments;
use lab::notice::{Kind, notice};
use lab::process::die_with_parent;
use lab::sim::require_lab;
use lab::vmm_process::cost;
use serde_json::{Value, json};
use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// How long a guest may take to boot, or to answer; it is emulated twice.
const SILENCE: Duration = Duration::from_secs(120);
/// How often a boot is tried: an emulated processor sometimes loses one.
const ATTEMPTS: usize = 3;

/// A machine with a console on a socket.
struct Machine {
    child: Child,
    directory: PathBuf,
    api: Client,
}

impl Machine {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let at = |file: &str| directory.join(file);
        let mut command = BellhopArguments::small().unwrap().command();
        command
            .arg("--console-socket")
            .arg(at("console"))
            .arg("--console-log")
            .arg(at("log"))
            .arg("--api-socket")
            .arg(at("api"))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let child = die_with_parent(&mut command).spawn().unwrap();
        let api = Client::new(&at("api"));
        Self {
            child,
            directory,
            api,
        }
    }

    /// Starts a machine, waits until its guest is ready, and connects a client to its console.
    fn booted(name: &str) -> (Self, Console) {
        for attempt in 1..=ATTEMPTS {
            let machine = Self::start(name);
            let mut console = machine.connect();
            match console.until("@lab ready", SILENCE) {
                Ok(()) => return (machine, console),
                Err(said) => notice(
                    Kind::Retried,
                    format!("boot {attempt} of {ATTEMPTS} with a console socket: {said}"),
                ),
            }
        }
        panic!("the guest does not boot");
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.file("log")).unwrap()).into_owned()
    }

    fn connect(&self) -> Console {
        connect(&self.file("console"))
    }

    fn wait_exit(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < SILENCE);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Connects once the console listens.
fn connect(socket: &Path) -> Console {
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Console::new(stream),
            Err(error) => assert!(start.elapsed() < SILENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A client of a console.
struct Console {
    stream: UnixStream,
    said: String,
}

impl Console {
    fn new(stream: UnixStream) -> Self {
        stream
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        Self {
            stream,
            said: String::new(),
        }
    }

    /// Reads until `words` appear; later output stays in the buffer. The error is the whole output,
    /// if they do not appear or the console ends.
    fn until(&mut self, words: &str, limit: Duration) -> Result<(), String> {
        let start = Instant::now();
        while !self.said.contains(words) {
            if start.elapsed() > limit || !self.read() {
                return Err(self.said.clone());
            }
        }
        Ok(())
    }

    /// Reads the available output; `false` at the end.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.said
                    .push_str(&String::from_utf8_lossy(&bytes[..count]));
                true
            }
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Sends the guest a command; returns its answer.
    fn command(&mut self, line: &str) -> Value {
        self.said.clear();
        self.stream
            .write_all(format!("{line}\n").as_bytes())
            .unwrap();
        let start = Instant::now();
        loop {
            let lines = self.said.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let answer = lines.lines().find_map(|line| line.strip_prefix("@lab "));
            if let Some(answer) = answer {
                return serde_json::from_str(answer.trim()).unwrap();
            }
            assert!(start.elapsed() < SILENCE && self.read(), "{}", self.said);
        }
    }
}

#[test]
fn a_guest_is_used_through_a_socket() {
    require_lab().unwrap();
    let (mut machine, mut console) = Machine::booted("console");
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(machine.file("console")), 0o600);
    assert_eq!(mode(machine.file("log")), 0o600);
    assert!(console.command("info")["cpus_online"].is_u64());

    // A second client receives the name of the process that holds the console.
    let mut second = machine.connect();
    let own = format!("process {} uses this console", std::process::id());
    second.until(&own, SILENCE).unwrap();
    while second.read() {}

    // Input that is typed before the VMM reads it is not lost, and a later client sees earlier
    // output.
    console.stream.write_all(b"info\n").unwrap();
    drop(console);
    let answers = |text: &str| text.matches("cpus_online").count();
    let start = Instant::now();
    // The first answer is in `ready`.
    while answers(&machine.log()) < 3 {
        assert!(start.elapsed() < SILENCE, "{}", machine.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut console = machine.connect();
    console.until("@lab ready", SILENCE).unwrap();
    let start = Instant::now();
    while answers(&console.said) < 3 {
        assert!(
            start.elapsed() < SILENCE && console.read(),
            "{}",
            console.said
        );
    }

    // A reset keeps the client and the descriptors.
    let before = cost(machine.child.id()).unwrap();
    console.said.clear();
    machine.api.done("POST", "/v1/vm/reset", None).unwrap();
    console.until("@lab ready", SILENCE).unwrap();
    assert!(console.command("info")["cpus_online"].is_u64());
    // Idle workers end: vmm, api and vcpu0 stay.
    let start = Instant::now();
    loop {
        let after = cost(machine.child.id()).unwrap();
        if after.threads == 3 && after.descriptors <= before.descriptors {
            break;
        }
        assert!(start.elapsed() < SILENCE, "{before:?} {after:?}");
        std::thread::sleep(Duration::from_millis(100));
    }

    // The log has everything, including the last output.
    console.stream.write_all(b"poweroff\n").unwrap();
    assert_eq!(machine.wait_exit(), Some(0));
    while console.read() {}
    let log = machine.log();
    assert_eq!(log.matches("@lab ready").count(), 2, "{log}");
    assert!(!machine.file("console").exists());
    assert!(!machine.file("api").exists());
}

#[test]
fn a_client_that_never_reads_does_not_stall_the_guest() {
    require_lab().unwrap();
    let (mut machine, mut console) = Machine::booted("console-deaf");
    // More than a socket and the history hold: each answer has some hundred bytes.
    let mut asked = 0;
    let size = || fs::metadata(machine.file("log")).unwrap().len();
    let begin = size();
    let start = Instant::now();
    while size() < begin + 40_000 {
        console.stream.write_all(b"info\ndmesg\n").unwrap();
        asked += 1;
        std::thread::sleep(Duration::from_millis(50));
        assert!(start.elapsed() < SILENCE, "{asked}");
    }
    // A whole boot with the kernel's messages also passes.
    machine.api.done("POST", "/v1/vm/reset", None).unwrap();
    while machine.log().matches("@lab ready").count() < 2 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(start.elapsed() < SILENCE * 2);
    }
    // The client still has the console, and its input arrives.
    console.said.clear();
    while !console.said.contains("@lab ready") {
        assert!(console.read());
    }
    let metrics = machine.api.get("/v1/metrics").unwrap();
    let metrics = metrics.as_str().unwrap();
    assert!(
        metrics.contains("bellhop_console_lost_bytes_total{to=\"log\"} 0"),
        "{metrics}"
    );
    let stopped = json!({ "state": "Stopped" });
    machine.api.done("PATCH", "/v1/vm", Some(&stopped)).unwrap();
    assert_eq!(machine.wait_exit(), Some(0));
}

#[test]
fn a_log_on_a_full_disk_does_not_stall_the_guest() {
    require_lab().unwrap();
    let directory = std::env::temp_dir().join(format!("lab-full-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    rustix::mount::mount(
        "none",
        &directory,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        c"size=8k",
    )
    .unwrap();
    let mut command = BellhopArguments::small()
        .unwrap()
        .cmdline("loglevel=7")
        .command();
    let socket = std::env::temp_dir().join(format!("lab-full-{}.socket", std::process::id()));
    command
        .arg("--console-socket")
        .arg(&socket)
        .arg("--console-log")
        .arg(directory.join("log"))
        .stdin(Stdio::null());
    let mut child = die_with_parent(&mut command)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut console = connect(&socket);
    let booted = console.until("@lab ready", SILENCE * 2);
    let logged = fs::read(directory.join("log")).unwrap();
    if booted.is_ok() {
        console.stream.write_all(b"poweroff\n").unwrap();
    } else {
        child.kill().unwrap();
    }
    let mut errors = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut errors)
        .unwrap();
    child.wait().unwrap();
    rustix::mount::unmount(&directory, rustix::mount::UnmountFlags::empty()).unwrap();
    booted.unwrap();
    assert!(
        logged.len() <= 8192 && console.said.len() > 8192,
        "{}",
        logged.len()
    );
    assert!(
        console
            .said
            .starts_with(&String::from_utf8_lossy(&logged)[..1000])
    );
    let told = errors.matches("cannot write the console's log").count();
    assert_eq!(told, 1, "{errors}");
}

#[test]
fn an_unusable_console_is_refused_before_the_start() {
    require_lab().unwrap();
    let directory = std::env::temp_dir().join(format!("lab-odd-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("file");
    fs::write(&file, "mine").unwrap();
    let said = |arguments: &[&str]| {
        let mut command = BellhopArguments::small().unwrap().command();
        let output = command.args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let path = file.to_str().unwrap();
    let socket = directory.join("socket");
    let socket = socket.to_str().unwrap();
    assert!(said(&["--console-socket", path]).contains("not a socket"));
    assert!(said(&["--console-log", path]).contains("--console-socket"));
    let null = said(&["--console-socket", socket, "--console-log", "/dev/null"]);
    assert!(null.contains("not a regular file"), "{null}");
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    fs::remove_dir_all(&directory).unwrap();
}
