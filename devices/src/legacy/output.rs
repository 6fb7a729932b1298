//! Buffers the serial port's output so that it never blocks a vCPU.
//!
//! `OutputBuffer` keeps the bytes that the writer does not take now. [`PolledWriter`] makes a
//! writer that would block return an error instead. It does so without O_NONBLOCK, which would
//! change the file for every process that shares it (the shell, for one).

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum number of waiting bytes.
pub const CAPACITY: usize = 256 * 1024;

/// Bytes passed to a [`PolledWriter`] at once. A pipe that polls writable takes up to PIPE_BUF
/// (4,096) bytes without blocking; a terminal has room for less.
const CHUNK: usize = 256;

/// A writer over a file that may block; it returns [`io::ErrorKind::WouldBlock`] instead of
/// blocking.
#[derive(Debug)]
pub struct PolledWriter<F>(F);

impl<F: AsFd + Write> PolledWriter<F> {
    /// Wraps `file`, whose flags stay unchanged.
    pub fn new(file: F) -> Self {
        Self(file)
    }
}

impl<F: AsFd + Write> Write for PolledWriter<F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let fd = self.0.as_fd();
        let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
        // POLLERR and POLLHUP count as ready: the write then reports the error.
        if poll(&mut fds, Some(&Timespec::default()))? == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let (now, _) = data.split_at(data.len().min(CHUNK));
        self.0.write(now)
    }

    fn flush(&mut self) -> io::Result<()> {
        // `write` does not buffer, so nothing is left to flush. A buffering writer must not be
        // wrapped.
        Ok(())
    }
}

/// Bytes on their way to a writer.
pub(crate) struct OutputBuffer {
    writer: Box<dyn Write + Send>,
    waiting: VecDeque<u8>,
    lost: u64,
    /// The writer has failed for good; output is dropped from then on.
    failed: bool,
}

vdpa::opaque_debug! {
    OutputBuffer, this =>
    waiting: this.waiting.len(),
    lost: this.lost,
    failed: this.failed,
}

impl OutputBuffer {
    pub(crate) fn new(writer: Box<dyn Write + Send>) -> Self {
        Self {
            writer,
            waiting: VecDeque::new(),
            lost: 0,
            failed: false,
        }
    }

    /// Whether there is no room for another byte.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= CAPACITY
    }

    /// Whether everything was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of lost bytes: written by the guest to a full port, or to a broken
    /// writer.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Writes waiting bytes, as far as the writer takes them.
    pub(crate) fn write_out(&mut self) {
        while !self.waiting.is_empty() {
            let (front, _) = self.waiting.as_slices();
            match self.writer.write(front) {
                Ok(0) => return self.fail(&io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.waiting.drain(..count.min(self.waiting.len()));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.fail(&error),
            }
        }
        match self.writer.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => self.fail(&error),
            _ => {}
        }
        // An idle console holds no memory after a burst.
        self.waiting.shrink_to(4096);
    }

    fn fail(&mut self, error: &io::Error) {
        if !self.failed {
            tracing::warn!(%error, "the console's output is gone; dropping the guest's output");
        }
        self.failed = true;
        self.lose(self.waiting.len());
        self.waiting.clear();
    }

    fn lose(&mut self, count: usize) {
        self.lost = self
            .lost
            .saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
    }
}

/// The UART's side: takes everything, never fails, never blocks.
impl Write for OutputBuffer {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.failed {
            self.lose(data.len());
        } else {
            let room = CAPACITY.saturating_sub(self.waiting.len());
            let (kept, lost) = data.split_at(data.len().min(room));
            if !lost.is_empty() {
                if self.lost == 0 {
                    tracing::warn!("the console's output is too slow; dropping the guest's output");
                }
                self.lose(lost.len());
            }
            self.waiting.extend(kept);
            self.write_out();
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    #[test]
    fn a_full_pipe_does_not_block() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (mut reader, writer) = (File::from(reader), File::from(writer));
        let mut writer = PolledWriter::new(writer);
        let mut written = 0;
        let error = loop {
            match writer.write(&[b'x'; 1000]) {
                Ok(count) => written += count,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(written >= 4096);
        reader.read_exact(&mut vec![0; written]).unwrap();
        assert!(writer.write(b"y").is_ok());
    }

    #[test]
    fn a_closed_pipe_loses_but_does_not_fail() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        let writer = PolledWriter::new(File::from(writer));
        let mut buffer = OutputBuffer::new(Box::new(writer));
        buffer.write_all(b"one").unwrap();
        buffer.write_all(b"two").unwrap();
        assert_eq!(buffer.lost(), 6);
        assert!(buffer.is_empty());
    }
}
