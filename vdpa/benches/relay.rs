//! `cargo bench -p vdpa --bench relay`: the cost of the relays per element, without a kernel. Guest
//! and device only move their indices.
//!
//! Only the passes are timed, not guest and device between them. Each element is a chain of one
//! writable buffer, without EVENT_IDX. Behind an IOMMU each page of RAM has its own mapping. The
//! figure is the median of several rounds.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vdpa::device::{VringAddresses, VringBase};
use vdpa::iotlb::Access;
use vdpa::iova::{DeviceAddress, IovaRange, PAGE_SIZE};
use vdpa::memory::{AddressSpace, DeviceMemory, GuestMemory, Mode, Piece, SharedBuffer};
use vdpa::relay::{FullShadow, PASS_LIMIT, Svq, UsedShadow};
use vdpa::ring::split::GuestRing;
use vdpa::ring::{PackedLayout, RingFormat, SplitLayout, packed};
use vm_memory::{Bytes, GuestAddress};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SIZE: u16 = PASS_LIMIT;
const RAM: usize = 4 << 20;
const BUFFERS: u64 = 0x10_0000;
const BUFFER: u32 = 2048;
/// I/O virtual address of the private memory.
const PRIVATE: u64 = 1 << 40;
const LAPS: u32 = 1000;
const ROUNDS: usize = 9;

const ADDRESSES: VringAddresses = VringAddresses {
    descriptor: DeviceAddress(0),
    driver: DeviceAddress(0x4000),
    device: DeviceAddress(0x8000),
};

/// Guest RAM, with the same addresses behind an IOMMU.
fn ram(iommu: bool) -> Result<DeviceMemory> {
    let ram = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), RAM)])?);
    if !iommu {
        return Ok(ram.into());
    }
    let space = AddressSpace::new(IovaRange::ALL);
    space.change(|space| -> Result<()> {
        space.set_mode(Mode::Mapped);
        for gpa in (0..u64::try_from(RAM)?).step_by(4096) {
            let page = IovaRange::from_size(gpa, PAGE_SIZE).ok_or("a page has a size")?;
            let access = Access::ReadWrite;
            space.map(page, Piece { gpa, access })?;
        }
        Ok(())
    })?;
    Ok(DeviceMemory::behind(ram, Arc::new(space)))
}

/// Guest RAM with a ring whose entry i names descriptor i.
fn guest(iommu: bool) -> Result<DeviceMemory> {
    let memory = ram(iommu)?;
    for index in 0..SIZE {
        let number = u64::from(index);
        let at = ADDRESSES.descriptor + 16 * number;
        let buffer = BUFFERS + u64::from(BUFFER) * number;
        memory.write_obj(buffer.to_le(), GuestAddress(at.0))?;
        memory.write_obj(BUFFER.to_le(), GuestAddress(at.0 + 8))?;
        // VIRTQ_DESC_F_WRITE
        memory.write_obj(2u16.to_le(), GuestAddress(at.0 + 12))?;
        let entry = ADDRESSES.driver + 4 + 2 * number;
        memory.write_obj(index.to_le(), GuestAddress(entry.0))?;
    }
    Ok(memory)
}

/// The device's side: the rings that it reads and writes.
struct Device<'a> {
    private: &'a SharedBuffer,
    /// Offset of the used ring in `private`.
    used: u64,
    /// Offset of the avail ring in `private`; `None`: entry i names i.
    avail: Option<u64>,
}

impl Device<'_> {
    /// Completes one lap; `index` is the used index before it.
    fn complete(&self, index: u16) -> Result<()> {
        for position in 0..SIZE {
            let slot = u64::from(position);
            let head = match self.avail {
                Some(avail) => self
                    .private
                    .load_u16(avail + 4 + 2 * slot, Ordering::Acquire)?,
                None => position,
            };
            let [h0, h1] = head.to_le_bytes();
            let element = [h0, h1, 0, 0, 64, 0, 0, 0];
            self.private.write(self.used + 4 + 8 * slot, &element)?;
        }
        let index = index.wrapping_add(SIZE);
        self.private
            .store_u16(index, self.used + 2, Ordering::Release)?;
        Ok(())
    }
}

/// Time spent in passes for [`LAPS`] laps of [`SIZE`] elements.
fn laps(relay: &mut dyn Svq, memory: &DeviceMemory, device: &Device<'_>) -> Result<Duration> {
    let (mut index, mut spent) = (0u16, Duration::ZERO);
    for _ in 0..LAPS {
        let avail = index.wrapping_add(SIZE);
        memory.ram().store(
            avail.to_le(),
            GuestAddress(ADDRESSES.driver.0 + 2),
            Ordering::Release,
        )?;
        let begin = Instant::now();
        relay.pass(memory)?;
        spent += begin.elapsed();
        device.complete(index)?;
        let begin = Instant::now();
        let pass = relay.pass(memory)?;
        spent += begin.elapsed();
        if pass.used != SIZE {
            return Err(format!("a pass relayed {} of {SIZE} elements", pass.used).into());
        }
        index = avail;
    }
    Ok(spent)
}

fn used_shadow(iommu: bool) -> Result<Duration> {
    let memory = guest(iommu)?;
    let ring = GuestRing::new(memory.clone(), SIZE, ADDRESSES, false)?;
    let private = Arc::new(SharedBuffer::new(UsedShadow::memory_size(SIZE), PRIVATE)?);
    let mut queue = UsedShadow::new(ring, Arc::clone(&private), 0, false, false, 0)?;
    let device = Device {
        private: &private,
        used: 0,
        avail: None,
    };
    laps(&mut queue, &memory, &device)
}

fn full_shadow(iommu: bool) -> Result<Duration> {
    let memory = guest(iommu)?;
    let ring = GuestRing::new(memory.clone(), SIZE, ADDRESSES, false)?;
    let layout = SplitLayout::new(SIZE)?;
    let private = Arc::new(SharedBuffer::new(layout.size(), PRIVATE)?);
    let base = VringBase::initial(false);
    let mut queue = FullShadow::new(
        ring.into(),
        base,
        Arc::clone(&private),
        SIZE,
        0,
        false,
        base,
    )?;
    let addresses = queue.addresses();
    let device = Device {
        private: &private,
        used: addresses.device.0 - PRIVATE,
        avail: Some(addresses.driver.0 - PRIVATE),
    };
    laps(&mut queue, &memory, &device)
}

/// A packed ring: both sides write all descriptors of one lap.
fn full_shadow_packed(iommu: bool) -> Result<Duration> {
    let memory = ram(iommu)?;
    let ring = packed::GuestRing::new(memory.clone(), SIZE, ADDRESSES, false)?;
    let layout = PackedLayout::new(SIZE)?;
    let private = Arc::new(SharedBuffer::new(layout.size(), PRIVATE)?);
    let start = VringBase::initial(true);
    let shared = Arc::clone(&private);
    let mut queue = FullShadow::new(ring.into(), start, shared, SIZE, 0, false, start)?;
    let entries = queue.addresses().descriptor.0 - PRIVATE;
    let mut spent = Duration::ZERO;
    for lap in 0..LAPS {
        // Wrap counter 1 in the first lap. VIRTQ_DESC_F_WRITE, AVAIL and USED.
        let wrap = lap.is_multiple_of(2);
        let available = 2 | if wrap { 1u16 << 7 } else { 1 << 15 };
        let used = 2 | if wrap { 1u16 << 7 | 1 << 15 } else { 0 };
        for index in 0..SIZE {
            let number = u64::from(index);
            let at = ADDRESSES.descriptor + 16 * number;
            let buffer = BUFFERS + u64::from(BUFFER) * number;
            memory.ram().write_obj(buffer.to_le(), GuestAddress(at.0))?;
            memory
                .ram()
                .write_obj(BUFFER.to_le(), GuestAddress(at.0 + 8))?;
            memory
                .ram()
                .write_obj(index.to_le(), GuestAddress(at.0 + 12))?;
            memory.ram().store(
                available.to_le(),
                GuestAddress(at.0 + 14),
                Ordering::Release,
            )?;
        }
        let begin = Instant::now();
        queue.pass(&memory)?;
        spent += begin.elapsed();
        for index in 0..SIZE {
            let at = entries + 16 * u64::from(index);
            private.write(at + 8, &64u32.to_le_bytes())?;
            private.store_u16(used, at + 14, Ordering::Release)?;
        }
        let begin = Instant::now();
        let pass = queue.pass(&memory)?;
        spent += begin.elapsed();
        if pass.used != SIZE {
            return Err(format!("a pass relayed {} of {SIZE} elements", pass.used).into());
        }
    }
    Ok(spent)
}

fn main() -> Result<()> {
    for (name, format, run) in [
        (
            "used-shadow",
            RingFormat::Split,
            used_shadow as fn(bool) -> Result<Duration>,
        ),
        ("shadowed", RingFormat::Split, full_shadow),
        ("shadowed", RingFormat::Packed, full_shadow_packed),
    ] {
        for (iommu, suffix) in [(false, ""), (true, ", behind an IOMMU")] {
            let mut rounds = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                rounds.push(run(iommu)?);
            }
            rounds.sort();
            let median = rounds.get(ROUNDS / 2).copied().unwrap_or_default();
            let per_element = median.as_secs_f64() * 1e9 / (f64::from(LAPS) * f64::from(SIZE));
            println!("{name:<11} {per_element:>8.1} ns per element ({format}{suffix})");
        }
    }
    Ok(())
}
