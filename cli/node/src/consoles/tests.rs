//! Consoles against fake processes.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::*;

/// The console's socket of a fake process.
struct Process {
    directory: PathBuf,
    listener: UnixListener,
}

impl Process {
    fn new(name: &str) -> Self {
        let name = format!("bellhop-consoles-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        Self {
            listener: UnixListener::bind(directory.join("s")).unwrap(),
            directory,
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("s")
    }

    /// The next connection, to which it sends this first.
    async fn accept(&self, first: &[u8]) -> UnixStream {
        let (mut stream, _) = self.listener.accept().await.unwrap();
        stream.write_all(first).await.unwrap();
        stream
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn web() -> VmName {
    "web".parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn clients_share_one_connection_which_ends_with_the_last() {
    let process = Process::new("share");
    let consoles = Consoles::default();
    let (name, socket) = (web(), process.socket());
    let (first, mut stream) =
        tokio::join!(consoles.attach(&name, &socket), process.accept(b"booted"));
    let first = first.unwrap();
    let second = consoles.attach(&name, &socket).await.unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    // The process's last output is history.
    let (output, position) = second.output(true);
    assert_eq!(output.borrow().read(position, 100), (0, b"booted".to_vec()));
    let (output, position) = second.output(false);
    assert_eq!(output.borrow().read(position, 100), (0, Vec::new()));
    second.write(b"ls").await.unwrap();
    let mut typed = [0; 2];
    stream.read_exact(&mut typed).await.unwrap();
    assert_eq!(&typed, b"ls");
    drop((first, second));
    assert_eq!(stream.read(&mut typed).await.unwrap(), 0);
    // At once, the next client connects anew.
    let (again, _stream) = tokio::join!(consoles.attach(&name, &socket), process.accept(b""));
    again.unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_client_writes_until_another_takes_its_place() {
    let process = Process::new("write");
    let consoles = Consoles::default();
    let (name, socket) = (web(), process.socket());
    let (console, _stream) = tokio::join!(consoles.attach(&name, &socket), process.accept(b""));
    let console = console.unwrap();
    let mut first = console.claim("uid 1", false).unwrap();
    let refused = console.claim("uid 2", false).unwrap_err();
    assert_eq!(refused.answer().1, "console_in_use");
    assert!(refused.to_string().contains("uid 1"), "{refused}");
    let second = console.claim("uid 2", true).unwrap();
    assert_eq!(first.try_recv().unwrap(), "uid 2");
    drop(first);
    console.claim("uid 3", false).unwrap_err();
    // One that has left needs no force.
    drop(second);
    console.claim("uid 3", false).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_process_may_be_away_or_serve_another_program() {
    let process = Process::new("refuse");
    let consoles = Consoles::default();
    let (name, socket) = (web(), process.socket());
    let line = b"[bellhop: process 7 uses this console; try again when it has left]\r\n";
    let refusing = async { drop(process.accept(line).await) };
    let (refused, ()) = tokio::join!(consoles.attach(&name, &socket), refusing);
    let refused = refused.unwrap_err();
    assert_eq!(refused.answer().1, "console_in_use");
    assert!(
        refused
            .to_string()
            .starts_with("process 7 uses this console"),
        "{refused}"
    );
    let ending = async { drop(process.accept(b"bye").await) };
    let (refused, ()) = tokio::join!(consoles.attach(&name, &socket), ending);
    assert_eq!(refused.unwrap_err().answer().1, "ending");
    drop(process);
    let refused = consoles.attach(&name, &socket).await.unwrap_err();
    assert_eq!(refused.answer().1, "not_running");
}

#[test]
fn clients_have_places() {
    let consoles = Consoles::default();
    let mut held = Vec::new();
    // Each leaves places for those behind it.
    for (role, read_only, count) in [
        (Role::Read, true, CLIENTS_MAX / 2),
        (Role::Admin, true, CLIENTS_MAX / 4),
        (Role::Admin, false, CLIENTS_MAX / 4),
    ] {
        held.extend((0..count).map(|_| consoles.place(role, read_only).unwrap()));
        let refused = consoles.place(role, read_only).unwrap_err();
        assert_eq!(refused.answer().1, "too_many_readers");
    }
    drop(held);
    assert!(consoles.place(Role::Read, true).is_ok());
}

proptest! {
    #[test]
    fn output_keeps_its_end(
        writes in prop::collection::vec(0..100_000usize, 0..9),
        position in 0..600_000u64,
        most in 0..20_000usize,
    ) {
        let mut output = Output::default();
        let mut model = Vec::new();
        for (number, count) in writes.into_iter().enumerate() {
            let bytes = vec![u8::try_from(number).unwrap(); count];
            output.append(&bytes);
            model.extend(bytes);
        }
        prop_assert!(output.kept.len() <= KEPT);
        let at = usize::try_from(position).unwrap();
        let begin = model.len().saturating_sub(KEPT);
        let kept = model.get(at.max(begin)..).unwrap_or_default();
        let bytes: Vec<u8> = kept.iter().take(most).copied().collect();
        let wanted = (begin.saturating_sub(at) as u64, bytes);
        prop_assert_eq!(output.read(position, most), wanted);
    }
}
