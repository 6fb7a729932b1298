//! Consoles.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use bellhop_common::client::Address;
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
fn a_console_goes_on_after_the_end_of_input_and_ends_with_the_machine() {
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
fn a_console_needs_a_machine_that_runs_on_this_host() {
    let arguments = parse::<console::Arguments>(&["web"]).unwrap();
    let which = |node: &str| parse::<NodeArguments>(&["--node", node]).unwrap();
    let made_up = MadeUp::default().answer(200, &stopped());
    let error = console::execute(&arguments, &which(HERE), &made_up.node()).unwrap_err();
    assert!(error.to_string().contains("does not run"));
    let error = console::execute(&arguments, &which(ELSEWHERE), &made_up.node()).unwrap_err();
    assert!(error.to_string().contains("ssh -t"));
    assert_eq!(*which(HERE).address(), Address::Socket(HERE.into()));
}
