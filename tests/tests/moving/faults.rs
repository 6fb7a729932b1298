//! A link that carries a migration up to a certain message and then fails as links do.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};

use super::{Host, TempPath};

/// Bytes of a frame's header. Its kind is at 0, the length of its payload at 4
/// (`vmm::migration::protocol`).
const HEADER: usize = 16;

/// Messages, by their numbers in `vmm::migration::protocol`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
#[allow(dead_code, reason = "not every test has a fault at each")]
pub(crate) enum Kind {
    Hello = 1,
    Accept = 2,
    Pages = 5,
    RoundEnd = 7,
    State = 8,
    StateEnd = 9,
    Ready = 10,
    Go = 11,
    Done = 12,
}

/// The fault that hits the first message of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "not every test has each fault")]
pub(crate) enum Fault {
    /// It is lost, with everything after it in its direction.
    Silent,
    /// Both connections close before it.
    CutBefore,
    /// Both close after half of it.
    CutInside,
    /// Both close directly after it.
    CutBehind,
    /// One of its bits is flipped.
    Damaged,
}

/// The address that a source connects to instead of the destination.
pub(crate) struct FaultyLink {
    place: TempPath,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl FaultyLink {
    /// A link to `destination`, which already waits, for one connection.
    #[track_caller]
    pub(crate) fn to(destination: &Host, kind: Kind, fault: Fault) -> Self {
        let place = TempPath::new("faulty.move");
        let listener = UnixListener::bind(place.text()).unwrap();
        let there = destination.endpoint.text().to_owned();
        let thread = thread::spawn(move || {
            let (source, _) = listener.accept()?;
            let destination = UnixStream::connect(there)?;
            let (answers, back) = (destination.try_clone()?, source.try_clone()?);
            let backwards = thread::spawn(move || carry(answers, &back, kind, fault));
            let there = carry(source, &destination, kind, fault);
            // Both directions have returned when both ends have closed.
            backwards
                .join()
                .map_err(|_| io::Error::other("the way back panicked"))??;
            there
        });
        Self {
            place,
            thread: Some(thread),
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix:{}", self.place.text())
    }

    /// Waits until both ends have given up.
    #[track_caller]
    pub(crate) fn end(mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

/// Carries one direction. It returns when the sender has closed; only then does the receiver learn
/// of it.
fn carry(mut from: UnixStream, to: &UnixStream, kind: Kind, fault: Fault) -> io::Result<()> {
    let mut silent = false;
    let mut done = false;
    let mut frame = Vec::new();
    while read_frame(&mut from, &mut frame)? {
        let [k0, k1, ..] = frame[..] else { break };
        let at = !done && u16::from_le_bytes([k0, k1]) == kind as u16;
        done |= at;
        let cut = at && [Fault::CutBefore, Fault::CutInside, Fault::CutBehind].contains(&fault);
        let mut passes = frame.len();
        if at {
            match fault {
                Fault::Silent => silent = true,
                Fault::CutBefore => passes = 0,
                Fault::CutInside => passes /= 2,
                Fault::CutBehind => {}
                Fault::Damaged => frame[passes - 1] ^= 0x10,
            }
        }
        // A receiver that has already closed takes no more.
        if !silent && sent(to, &frame[..passes]).is_err() {
            break;
        }
        if cut {
            from.shutdown(Shutdown::Both)?;
        }
    }
    // An already closed connection is no error.
    let _ = to.shutdown(Shutdown::Both);
    Ok(())
}

fn sent(mut to: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)
}

/// False at the end.
fn read_frame(from: &mut UnixStream, frame: &mut Vec<u8>) -> io::Result<bool> {
    frame.resize(HEADER, 0);
    let whole = from.read_exact(frame).and_then(|()| {
        let [l0, l1, l2, l3] = frame[4..8] else {
            return Err(ErrorKind::InvalidData.into());
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        frame.resize(HEADER + length, 0);
        from.read_exact(&mut frame[HEADER..])
    });
    match whole {
        Ok(()) => Ok(true),
        // A killed end closes in the middle of a frame.
        Err(error)
            if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&error.kind()) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
