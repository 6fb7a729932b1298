//! `bellhop top` on a pseudo-terminal, with a daemon whose VMs are stopped: it needs no KVM.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "api_serve/daemon.rs"]
#[allow(dead_code, reason = "it is for other tests, too")]
mod daemon;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command};
use std::time::Duration;

use daemon::{Daemon, asm, program};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::json;

/// How long output may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Xterm's alternate screen, and the main one with a cursor.
const ENTERED: &str = "\x1b[?1049h";
const LEFT: &str = "\x1b[?25h\x1b[?1049l";
/// The kernel resets a terminal when the leader of its session ends, so the shell waits.
const SHELL: &str = "\"$@\"; echo \"ended: $?.\"; read -r line";

/// A terminal: the user's end, and the program's.
struct Terminal {
    user: File,
    program: File,
}

impl Terminal {
    fn new() -> Self {
        let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let name = ptsname(&user, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let program = rustix::fs::open(&*name, flags, Mode::empty()).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 100,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&user, size).unwrap();
        Self {
            user: user.into(),
            program: program.into(),
        }
    }

    /// Starts a shell with this terminal that runs `bellhop top` in the foreground.
    fn top(&self, daemon: &Daemon) -> Child {
        let side = || self.program.try_clone().unwrap();
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "sh", "-c", SHELL, "sh"])
            .arg(program())
            .args(["top", "--node"])
            .arg(daemon.api.socket());
        command.stdin(side()).stdout(side()).stderr(side());
        command.spawn().unwrap()
    }

    /// The output up to these words.
    #[track_caller]
    fn shows(&mut self, words: &str) -> String {
        let mut shown = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&shown).into_owned();
            if text.contains(words) {
                return text;
            }
            let limit = Timespec::try_from(PATIENCE).unwrap();
            let mut fds = [PollFd::new(&self.user, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{text:?}");
            let mut buffer = [0; 4096];
            let count = self.user.read(&mut buffer).unwrap();
            shown.extend_from_slice(&buffer[..count]);
        }
    }

    fn mode(&self) -> Termios {
        tcgetattr(&self.program).unwrap()
    }
}

#[test]
fn top_draws_on_a_terminal_and_restores_it() {
    let daemon = Daemon::start("top");
    let mut vm = daemon.machine(asm::IDLE);
    vm["spec"]["state"] = json!("Stopped");
    daemon.api.expect(201, "PUT", "/v1/vms/web", &vm);
    let mut terminal = Terminal::new();
    let before = format!("{:?}", terminal.mode());
    let mut shell = terminal.top(&daemon);

    let shown = terminal.shows("web   Stopped");
    assert!(shown.starts_with(ENTERED), "{shown:?}");
    assert!(shown.contains("VMs: 1, running: 0"), "{shown:?}");
    let raw = terminal.mode().local_modes;
    assert!(!raw.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    // A key selects the first VM, and a change of the node appears without a key.
    terminal.user.write_all(b"\x1b[B").unwrap();
    terminal.shows("\x1b[7mweb");
    daemon.api.expect(201, "PUT", "/v1/vms/db", &vm);
    terminal.shows("db    Stopped");

    terminal.user.write_all(b"q").unwrap();
    let shown = terminal.shows("ended: 0.");
    assert!(shown.contains(LEFT), "{shown:?}");
    assert_eq!(format!("{:?}", terminal.mode()), before);
    terminal.user.write_all(b"\n").unwrap();
    assert!(shell.wait().unwrap().success());
}
