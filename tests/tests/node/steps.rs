//! Shows each step of a daemon before it is done, and holds it there (`bellhop serve
//! --step-observer`).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The socket on which a daemon's steps are shown.
#[derive(Debug)]
pub(crate) struct Steps {
    listener: UnixListener,
    path: PathBuf,
}

/// The steps of one daemon.
#[derive(Debug)]
pub(crate) struct Shown(BufReader<UnixStream>);

impl Steps {
    /// Listens on a socket of this name.
    pub(crate) fn listen(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        Self {
            listener: UnixListener::bind(path).unwrap(),
            path: path.to_owned(),
        }
    }

    /// The socket.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the daemon's connection.
    pub(crate) fn accept(&self) -> Shown {
        Shown(BufReader::new(self.listener.accept().unwrap().0))
    }
}

impl Shown {
    /// The next step, which waits; `None` once the daemon is gone.
    pub(crate) fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(1..) => Some(line.trim_end().to_owned()),
            _ => None,
        }
    }

    /// True if a step waits.
    pub(crate) fn is_there(&mut self) -> bool {
        let stream = self.0.get_ref();
        stream.set_nonblocking(true).unwrap();
        let there = !self.0.fill_buf().unwrap_or_default().is_empty();
        self.0.get_ref().set_nonblocking(false).unwrap();
        there
    }

    /// Releases the step.
    pub(crate) fn resume(&mut self) {
        // The daemon may be gone.
        let _ = self.0.get_mut().write_all(b"\n");
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
