//! Consoles.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use vmm::console::{ConsoleInput, ConsoleRead};

use super::super::console::{End, connect};
use super::*;

/// Fake standard input: a socket, whose bytes are forwarded unchanged except `X`, which is the
/// escape.
struct Typed(UnixStream);

impl AsFd for Typed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ConsoleInput for Typed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        let count = (&self.0).read(buffer)?;
        Ok(if buffer[..count].contains(&b'X') {
            ConsoleRead::Leave
        } else if count == 0 {
            ConsoleRead::Closed
        } else {
            ConsoleRead::Bytes(count)
        })
    }
}

#[test]
fn a_console_passes_bytes_on_until_one_end_leaves() {
    let (mut keyboard, typed) = UnixStream::pair().unwrap();
    let (mut guest, stream) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut output = Vec::new();
        let end = connect(Some(Typed(typed)), &stream, &mut output).unwrap();
        (end, output)
    });
    keyboard.write_all(b"ls\r").unwrap();
    let mut got = [0; 3];
    guest.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"ls\r");
    guest.write_all(b"file\r\n").unwrap();
    // The output arrives before the user's escape.
    std::thread::sleep(Duration::from_millis(200));
    keyboard.write_all(b"X").unwrap();
    let (end, output) = thread.join().unwrap();
    assert_eq!((end, output.as_slice()), (End::Left, &b"file\r\n"[..]));
    assert_eq!(guest.read(&mut got).unwrap(), 0);
}

#[test]
fn a_console_continues_after_the_end_of_input_and_ends_with_the_vm() {
    let (mut keyboard, typed) = UnixStream::pair().unwrap();
    let (mut guest, stream) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut output = Vec::new();
        let end = connect(Some(Typed(typed)), &stream, &mut output).unwrap();
        (end, output)
    });
    // More than the socket's buffer, to a guest that does not read yet.
    let script = vec![b'a'; 1 << 20];
    let writer = std::thread::spawn(move || keyboard.write_all(&script).map(|()| drop(keyboard)));
    std::thread::sleep(Duration::from_millis(200));
    let mut got = vec![0; 1 << 20];
    guest.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == b'a'));
    writer.join().unwrap().unwrap();
    guest.write_all(b"bye").unwrap();
    drop(guest);
    let (end, output) = thread.join().unwrap();
    assert_eq!((end, output.as_slice()), (End::Closed, &b"bye"[..]));
}

#[test]
fn the_end_of_a_console_has_a_reason() {
    let console = |fake: &FakeDaemon, words: &[&str]| {
        let arguments = parse::<console::Arguments>(words).unwrap();
        console::execute(&arguments, &fake.node())
    };
    // The VM ends.
    let fake = FakeDaemon::default()
        .answer(101, &json!("bye\n"))
        .answer(200, &running(7))
        .answer(200, &stopped());
    let code = console(&fake, &["web", "--read-only"]).unwrap();
    assert_eq!(code, Code::Success);
    let path = "GET /v1/vms/web/console";
    let vm = "GET /v1/vms/web".to_owned();
    let opened = format!("{path}?read_only=true&history=true");
    assert_eq!(fake.asked(), [opened, vm.clone(), vm]);
    // Another client takes the console.
    let taken = [(fake::CLOSE_CODE, "1008")];
    let fake = FakeDaemon::default().answer_with(101, &taken, &json!(""));
    let error = console(&fake, &["web", "--read-only"]).unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert!(error.to_string().ends_with("made up"), "{error}");
    // Another client writes.
    let fake = refuses("console_in_use");
    let error = console(&fake, &["web", "--take"]).unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    let asked = format!("{path}?take=true&history=true");
    assert_eq!(fake.asked(), [asked]);

    let fake = FakeDaemon::default().answer(200, &json!("booted\n"));
    let code = console(&fake, &["web", "--log"]).unwrap();
    assert_eq!(code, Code::Success);
    let asked = ["GET /v1/vms/web/logs/console?tail=100000"];
    assert_eq!(fake.asked(), asked);
    for words in [
        &["web", "--take", "--read-only"][..],
        &["web", "--log", "--take"],
        &["web", "--escape", "ab"],
    ] {
        assert!(parse::<console::Arguments>(words).is_err(), "{words:?}");
    }
}
