//! Connections to a daemon on another host through `ssh`.
//!
//! Owns the child process of each connection. Must not know HTTP.
//!
//! ```text
//!   client ──socket pair──> ssh ssh://HOST bellhop node proxy ──> socket of the daemon there
//! ```
//! The user needs to reach HOST with ssh, and there the socket. Keys, jump hosts and shared
//! connections are those of ssh_config.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;

use bellhop_api::address::{Address, SOCKET};

/// The variable that replaces `ssh` by another program.
const PROGRAM: &str = "BELLHOP_SSH";

/// Opens a connection to the daemon at `address`.
pub(super) fn connect(address: &Address) -> io::Result<UnixStream> {
    let Address::Ssh { host, socket } = address else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let program = std::env::var_os(PROGRAM).unwrap_or_else(|| "ssh".into());
    let socket = socket.as_deref().unwrap_or(Path::new(SOCKET));
    open(command(&program, host, socket))
}

/// `Address` admits no character that a shell interprets.
fn command(program: &OsStr, host: &str, socket: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("-T").arg(format!("ssh://{host}"));
    command
        .args(["bellhop", "node", "proxy", "--node"])
        .arg(socket);
    command
}

/// Starts a command with the other end of the connection as its standard input and output.
fn open(mut command: Command) -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    command.stdin(OwnedFd::from(theirs.try_clone()?));
    command.stdout(OwnedFd::from(theirs));
    // The error's own kind would look like a missing daemon.
    let mut child = command.spawn().map_err(|error| {
        let program = command.get_program().display();
        io::Error::other(format!("cannot start {program}: {error}"))
    })?;
    // It ends when the connection does.
    thread::spawn(move || child.wait());
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn a_command_carries_both_directions() {
        let mut command = Command::new("sh");
        command.args(["-c", "read line; echo \"got $line\"; cat"]);
        let mut stream = open(command).unwrap();
        stream.write_all(b"a\nb").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "got a\nb");
        let error = open(Command::new("/nonexistent/ssh")).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot start /nonexistent/ssh: "),
            "{error}"
        );
    }

    #[test]
    fn the_words_are_those_of_the_address() {
        let command = command("ssh".as_ref(), "me@node2:22", Path::new("/run/b/s"));
        let words: Vec<&OsStr> = command.get_args().collect();
        let wanted = [
            "-T",
            "ssh://me@node2:22",
            "bellhop",
            "node",
            "proxy",
            "--node",
            "/run/b/s",
        ];
        assert_eq!(words, wanted);
    }
}
