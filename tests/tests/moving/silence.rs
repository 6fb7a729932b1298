//! A link that carries a migration until all of the stopped guest has been sent but its last word, and from then on nothing.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};

use super::{Host, Place};

/// Bytes of a frame's header; its kind is at 0, the length of its payload at 4 (`vmm::migration::protocol`).
const HEADER: usize = 16;
const STATE_END: u16 = 9;

/// Where a source connects instead of the destination.
pub(crate) struct SilentLink {
    place: Place,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl SilentLink {
    /// In front of `destination`, which waits already; for one connection.
    #[track_caller]
    pub(crate) fn to(destination: &Host) -> Self {
        let place = Place::new("silent.move");
        let listener = UnixListener::bind(place.text()).unwrap();
        let there = destination.endpoint.text().to_owned();
        let thread = thread::spawn(move || {
            let (source, _) = listener.accept()?;
            carry(source, &UnixStream::connect(there)?)
        });
        Self {
            place,
            thread: Some(thread),
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix:{}", self.place.text())
    }

    /// After both ends have given up.
    #[track_caller]
    pub(crate) fn end(mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

/// Returns when the source has hung up; the destination learns of it only then.
fn carry(mut source: UnixStream, destination: &UnixStream) -> io::Result<()> {
    let (mut answers, mut back) = (destination.try_clone()?, source.try_clone()?);
    let backwards = thread::spawn(move || io::copy(&mut answers, &mut back));
    let mut there = destination;
    let mut silent = false;
    let mut frame = Vec::new();
    loop {
        let mut header = [0; HEADER];
        match source.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
        let [k0, k1, _, _, l0, l1, l2, l3, ..] = header;
        silent |= u16::from_le_bytes([k0, k1]) == STATE_END;
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        frame.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        source.read_exact(&mut frame)?;
        if !silent {
            there.write_all(&header)?;
            there.write_all(&frame)?;
        }
    }
    destination.shutdown(Shutdown::Both)?;
    // It may have wanted to say something to a source that is gone.
    let _ = backwards.join();
    Ok(())
}
