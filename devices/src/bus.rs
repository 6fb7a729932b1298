//! Address decoding for port and memory-mapped I/O.
//!
//! A [`Bus`] owns the map from address ranges to devices. It must not know the type of a device,
//! nor who issues the access (a vCPU, a test, a fuzzer).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::Error;

/// A device that answers accesses at offsets inside a range of a [`Bus`].
///
/// Accesses come from any vCPU thread at any time, hence `&self`. `data` is 1, 2, 4 or 8 bytes,
/// little-endian as the guest sees it. An implementation must accept any other length without
/// panicking.
pub trait BusDevice: Send + Sync {
    /// Fills `data` with the value at `offset` from the range's base.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Takes a write of `data` at `offset` from the range's base.
    fn write(&self, offset: u64, data: &[u8]);
}

struct Range {
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// A map from disjoint address ranges to devices.
#[derive(Default)]
pub struct Bus {
    ranges: RwLock<BTreeMap<u64, Range>>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.ranges.read();
        f.debug_map()
            .entries(ranges.iter().map(|(base, range)| (base, range.len)))
            .finish()
    }
}

impl Bus {
    /// Creates an empty bus.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device at `base..base + len` (bytes).
    ///
    /// # Errors
    /// The range is empty or wraps, or overlaps another one.
    pub fn insert(&self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), Error> {
        let last = len
            .checked_sub(1)
            .and_then(|span| base.checked_add(span))
            .ok_or_else(|| Error::other(format!("range {base:#x}+{len:#x} is empty or wraps")))?;
        let mut ranges = self.ranges.write();
        if let Some((&other, range)) = ranges.range(..=last).next_back()
            && other + (range.len - 1) >= base
        {
            return Err(Error::other(format!(
                "range {base:#x}+{len:#x} overlaps the one at {other:#x}"
            )));
        }
        ranges.insert(base, Range { len, device });
        Ok(())
    }

    /// Removes the range that begins at `base`. Returns `true` if there was one.
    pub fn remove(&self, base: u64) -> bool {
        let mut ranges = self.ranges.write();
        ranges.remove(&base).is_some()
    }

    /// Returns the device that covers all of `address..address + len`, and the offset in it.
    fn find(&self, address: u64, len: usize) -> Option<(Arc<dyn BusDevice>, u64)> {
        let ranges = self.ranges.read();
        let (base, range) = ranges.range(..=address).next_back()?;
        let offset = address - base;
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        // The lock is dropped before the device runs: an access may change the map itself (a
        // configuration write moves a BAR).
        (end <= range.len).then(|| (Arc::clone(&range.device), offset))
    }

    /// Reads; returns all ones if no device answers, as on a real bus.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes; dropped if no device answers.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.find(address, data.len()) {
            device.write(offset, data);
        }
    }
}

#[cfg(test)]
mod tests {

    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, usize)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            self.0.lock().push((offset, data.len()));
            data.fill(0);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().push((offset, data.len()));
        }
    }

    #[test]
    fn refuses_bad_and_overlapping_ranges() {
        let bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x1000, 0x1000, device.clone()).unwrap();
        for (base, len) in [
            (0x1000, 0x1000),
            (0xfff, 2),
            (0x1fff, 1),
            (0, u64::MAX),
            (0x1800, 8),
        ] {
            let error = bus.insert(base, len, device.clone()).unwrap_err();
            assert!(error.to_string().ends_with("overlaps the one at 0x1000"));
        }
        for (base, len) in [(0, 0), (u64::MAX, 2)] {
            let error = bus.insert(base, len, device.clone()).unwrap_err();
            assert!(error.to_string().ends_with("is empty or wraps"));
        }
        bus.insert(u64::MAX, 1, device).unwrap();
    }

    #[test]
    fn dispatches_by_range_and_reads_ones_outside() {
        let bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x1000, 0x10, device.clone()).unwrap();
        let mut data = [0u8; 4];
        bus.read(0x100c, &mut data);
        assert_eq!(data, [0; 4]);
        // The access exceeds the end of the range: no device covers all of it.
        bus.read(0x100e, &mut data);
        assert_eq!(data, [0xff; 4]);
        bus.write(u64::MAX, &data);
        assert_eq!(*device.0.lock(), [(0xc, 4)]);
        assert!(bus.remove(0x1000));
        assert!(!bus.remove(0x1000));
        bus.read(0x100c, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
}
