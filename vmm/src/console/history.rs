//! The guest's last output: a ring between the vCPUs that write and later readers.
//!
//! Owns the bytes and their count. It must not know its readers: each has a position of its own, in
//! bytes since the start, and may fall behind.
//!
//! ```text
//!   vCPU ──> [ ....oldest ........................ newest ] end = bytes ever written
//!                     ^                  ^
//!                     a slow reader      a quick one: position == end
//! ```
//! A writer never waits: new bytes overwrite the oldest, and a reader that still needed them learns
//! how many it missed. The memory is reserved once, and pages become resident only when used.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

/// Bytes kept: how far a reader may fall behind.
pub(super) const CAPACITY: usize = 256 * 1024;

/// Result of [`History::read`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Bytes between the reader's position and the oldest available one.
    pub(super) lost: u64,
    /// Bytes copied.
    pub(super) count: usize,
    /// The position behind them.
    pub(super) next: u64,
}

#[derive(Debug)]
struct Ring {
    bytes: Box<[u8]>,
    /// Bytes ever written; the last of them are in `bytes`, at their number modulo [`CAPACITY`].
    end: u64,
    /// A reader has seen everything and waits for the eventfd.
    awaited: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct History {
    ring: Mutex<Ring>,
    written: EventFd,
}

/// The index of a byte in the ring.
fn place(position: u64) -> usize {
    // The remainder is less than a usize.
    usize::try_from(position % (CAPACITY as u64)).unwrap_or(0)
}

impl History {
    /// Starts empty.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            ring: Mutex::new(Ring {
                bytes: vec![0; CAPACITY].into_boxed_slice(),
                end: 0,
                awaited: true,
            }),
            written: vdpa::eventfd::new()?,
        }))
    }

    /// Readable when there is something new since [`History::acknowledge`].
    pub(super) fn written(&self) -> &EventFd {
        &self.written
    }

    /// Call this before the read that follows an event: later writes then signal again.
    pub(super) fn acknowledge(&self) {
        let mut ring = self.ring.lock();
        ring.awaited = true;
        // The count does not matter, only that it is cleared.
        let _ = self.written.read();
    }

    /// Clears the event without a read: writes do not signal until [`History::acknowledge`].
    pub(super) fn ignore(&self) {
        let _ = self.written.read();
    }

    /// Bytes ever written.
    pub(super) fn end(&self) -> u64 {
        self.ring.lock().end
    }

    /// Appends `bytes`, which overwrite the oldest.
    pub(super) fn push(&self, bytes: &[u8]) {
        let mut ring = self.ring.lock();
        let skipped = bytes.len().saturating_sub(CAPACITY);
        let mut rest = bytes.get(skipped..).unwrap_or_default();
        ring.end = ring.end.wrapping_add(skipped as u64);
        while !rest.is_empty() {
            let at = place(ring.end);
            let free = ring.bytes.get_mut(at..).unwrap_or_default();
            let count = free.len().min(rest.len());
            let (now, later) = rest.split_at(count);
            free.iter_mut().zip(now).for_each(|(to, from)| *to = *from);
            rest = later;
            ring.end = ring.end.wrapping_add(count as u64);
        }
        if std::mem::take(&mut ring.awaited) {
            // The only failure is a counter at its maximum, which is readable too.
            let _ = self.written.write(1);
        }
    }

    /// Copies bytes from `position` on, as far as they fit.
    pub(super) fn read(&self, position: u64, buffer: &mut [u8]) -> Chunk {
        let ring = self.ring.lock();
        let oldest = ring.end.saturating_sub(CAPACITY as u64);
        let from = position.clamp(oldest, ring.end);
        let at = place(from);
        let there = usize::try_from(ring.end - from).unwrap_or(usize::MAX);
        // Up to where the ring wraps: the next read returns the rest.
        let source = ring.bytes.get(at..).unwrap_or_default();
        let count = there.min(source.len()).min(buffer.len());
        buffer
            .iter_mut()
            .zip(source)
            .take(count)
            .for_each(|(to, from)| *to = *from);
        Chunk {
            lost: from.saturating_sub(position),
            count,
            next: from.saturating_add(count as u64),
        }
    }
}

/// The serial port's side: accepts everything at once.
#[derive(Debug)]
pub(super) struct HistoryWriter(pub(super) Arc<History>);

impl Write for HistoryWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.push(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(history: &History, mut position: u64) -> (u64, Vec<u8>) {
        let (mut lost, mut seen) = (0, Vec::new());
        let mut buffer = [0; 1000];
        loop {
            let chunk = history.read(position, &mut buffer);
            lost += chunk.lost;
            if chunk.count == 0 {
                return (lost, seen);
            }
            seen.extend(&buffer[..chunk.count]);
            position = chunk.next;
        }
    }

    #[test]
    fn output_is_replayed_and_dropped_bytes_are_counted() {
        let history = History::new().unwrap();
        history.push(b"one");
        assert!(history.written().read().is_ok());
        history.push(b"two");
        assert!(history.written().read().is_err(), "it was said already");
        assert_eq!(all(&history, 0), (0, b"onetwo".to_vec()));
        assert_eq!(all(&history, 3), (0, b"two".to_vec()));
        history.acknowledge();
        history.push(&vec![b'x'; CAPACITY]);
        assert!(history.written().read().is_ok());
        assert_eq!(all(&history, 2), (4, vec![b'x'; CAPACITY]));
        history.push(&vec![b'y'; 3 * CAPACITY + 5]);
        assert_eq!(history.end(), 6 + 4 * CAPACITY as u64 + 5);
        assert_eq!(all(&history, history.end() - 2), (0, b"yy".to_vec()));
        // Past the end: nothing.
        assert_eq!(all(&history, u64::MAX), (0, Vec::new()));
    }

    proptest! {
        #[test]
        fn it_is_the_end_of_all_that_was_written(
            writes in prop::collection::vec((any::<u8>(), 0..100_000usize), 0..12),
            position in 0..600_000u64,
        ) {
            let history = History::new().unwrap();
            let mut model = Vec::new();
            for (byte, count) in writes {
                let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(count).map(|n| n ^ byte).collect();
                history.push(&bytes);
                model.extend(bytes);
            }
            let position = position.min(model.len() as u64);
            let oldest = model.len().saturating_sub(CAPACITY) as u64;
            let from = position.max(oldest);
            let (lost, seen) = all(&history, position);
            prop_assert_eq!(lost, from - position);
            prop_assert!(seen == model[usize::try_from(from).unwrap()..]);
        }
    }
}
