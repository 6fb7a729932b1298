use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::{ProptestConfig, any, prop_assert, proptest};
use vdpa::iotlb::Access;
use vdpa::iova::{IovaRange, PAGE_SIZE};
use vdpa::memory::{AddressSpace, Mode, Piece as Target};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::super::backend::SharedMemory;
use super::super::userspace_queue::driver::{
    BUFFERS, Buffer, Driver, RAM, memory, readable, writable,
};
use super::*;
pub(super) use super::{COMPLETION, KICK};

/// A file that is deleted when the value is dropped.
pub(super) struct TempFile(PathBuf);

impl TempFile {
    pub(super) fn new(content: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bellhop-block-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, content).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(super) const SECTORS: u64 = 2048;
pub(super) const SIZE: u16 = 256;
pub(super) const HEADER: u64 = BUFFERS;
pub(super) const STATUS: u64 = BUFFERS + 0x800;
/// Data lies on both sides of the boundary between the two regions.
const DATA: u64 = RAM as u64 / 2 - 0x1000;

struct Rig {
    block: Block,
    driver: Driver,
    file: TempFile,
}

fn pattern() -> Vec<u8> {
    (0..SECTORS * 512)
        .map(|at| ((at * 7 + at / 512) % 256).try_into().unwrap())
        .collect()
}

fn rig_with(read_only: bool, features: u64) -> Rig {
    let memory = memory();
    rig_over(Arc::clone(&memory).into(), &memory, read_only, features)
}

fn rig_over(memory: DeviceMemory, ram: &SharedMemory, read_only: bool, features: u64) -> Rig {
    let file = TempFile::new(&pattern());
    let driver = Driver::new(ram, SIZE);
    let disk = Disk::open(file.path(), read_only).unwrap();
    let mut block = Block::new(disk, "disk0", memory).unwrap();
    assert_eq!(block.events(&[Arc::clone(&driver.kick)]).len(), 2);
    let features = block.features() & features;
    block.negotiate(features).unwrap();
    block.activate(driver.activation(features)).unwrap();
    Rig {
        block,
        driver,
        file,
    }
}

fn rig() -> Rig {
    rig_with(false, u64::MAX)
}

/// Waits for the completion eventfd, like the event loop.
pub(super) fn completes(block: &Block) -> bool {
    let mut event = libc::pollfd {
        fd: block.engine.completion_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: `event` is one valid pollfd for the call.
    unsafe { libc::poll(&raw mut event, 1, 10_000) == 1 }
}

impl Rig {
    /// Adds a request with header and status at `slot` of their areas.
    fn add(&mut self, slot: u64, kind: u32, sector: u64, data: &[Buffer]) -> u16 {
        let header = HEADER + 16 * slot;
        self.driver.write(header, kind);
        self.driver.write(header + 4, 0u32);
        self.driver.write(header + 8, sector);
        self.driver.write(STATUS + slot, 0xffu8);
        let mut buffers = vec![readable(header, 16)];
        buffers.extend(data);
        buffers.push(writable(STATUS + slot, 1));
        self.driver.add(&buffers)
    }

    /// Runs the device until it has returned a chain.
    fn wait(&mut self) -> (u32, u32) {
        self.block.process(KICK);
        loop {
            if let Some(used) = self.driver.take_used() {
                return used;
            }
            assert!(completes(&self.block), "the request never completes");
            self.block.process(COMPLETION);
        }
    }

    fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        let head = self.add(0, kind, sector, data);
        let (id, len) = self.wait();
        assert_eq!(id, u32::from(head));
        (self.driver.read(STATUS), len)
    }
}

#[test]
fn a_disk_behind_an_iommu_reaches_only_mapped_pages() {
    let data = BUFFERS + 0x1_0000;
    let at = |number: u64| data + number * PAGE_SIZE;
    let ram = memory();
    let space = AddressSpace::new(IovaRange::ALL);
    space.change(|space| {
        space.set_mode(Mode::Mapped);
        for page in (0..RAM as u64).step_by(4096) {
            // Two pages of data are swapped, one is read-only and one not mapped.
            let (gpa, access) = match page {
                _ if page == at(0) => (at(1), Access::ReadWrite),
                _ if page == at(1) => (at(0), Access::ReadWrite),
                _ if page == at(2) => (page, Access::ReadOnly),
                _ if page == at(3) => continue,
                _ => (page, Access::ReadWrite),
            };
            let range = IovaRange::from_size(page, PAGE_SIZE).unwrap();
            space.map(range, Target { gpa, access }).unwrap();
        }
    });
    let own = Arc::new(AddressSpace::new(IovaRange::ALL));
    let memory = DeviceMemory::behind(Arc::clone(&ram), own);
    let mut rig = rig_over(memory, &ram, false, u64::MAX);
    let disk = rig.block.translated().unwrap();
    disk.enter(&Arc::new(space)).unwrap();
    let read = rig.request(VIRTIO_BLK_T_IN, 0, &[writable(data, 0x2000)]);
    assert_eq!(read, (0, 0x2001));
    assert_eq!(rig.driver.bytes(at(1), 0x1000), pattern()[..0x1000]);
    assert_eq!(rig.driver.bytes(at(0), 0x1000), pattern()[0x1000..0x2000]);
    rig.driver.clean();
    rig.request(VIRTIO_BLK_T_IN, 0, &[writable(data, 0x200)]);
    assert!(rig.driver.dirty(at(1)) && !rig.driver.dirty(at(0)));

    rig.driver.fill(at(2), &[7; 0x200]);
    let written = rig.request(VIRTIO_BLK_T_OUT, 8, &[readable(at(2), 0x200)]);
    assert_eq!(written, (0, 1));
    let content = std::fs::read(rig.file.path()).unwrap();
    assert_eq!(content[8 * 512..9 * 512], [7; 512]);

    // The next page is not mapped.
    let across = [readable(at(3) - 0x100, 0x200)];
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 8, &across), (1, 1));
    rig.driver.clean();
    let across = [writable(at(1), 0x200), writable(at(3) - 0x100, 0x200)];
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 8, &across), (1, 1));
    for page in 0..4 {
        assert!(!rig.driver.dirty(at(page)), "{page}");
    }
    // Nor is the header.
    let buffers = [readable(at(3), 16), writable(STATUS, 1)];
    rig.driver.add(&buffers);
    rig.wait();
    assert_eq!(rig.driver.read::<u8>(STATUS), 1);
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    // A status byte that is not mapped leaves no way to answer.
    rig.driver.write(HEADER, VIRTIO_BLK_T_GET_ID);
    let buffers = [readable(HEADER, 16), writable(at(3), 1)];
    rig.driver.add(&buffers);
    assert!(rig.block.process(KICK).needs_reset);
}

#[test]
fn describes_itself() {
    let mut rig = rig();
    let mut config = [0u8; CONFIG_LEN];
    rig.block.read_config(0, &mut config);
    assert_eq!(config[..8], SECTORS.to_le_bytes());
    assert_eq!(config[12..16], 126u32.to_le_bytes());
    assert_eq!(config[20..24], 512u32.to_le_bytes());
    let mut beyond = [7u8; 8];
    rig.block.read_config(u32::MAX, &mut beyond);
    assert_eq!(beyond, [0; 8]);
    rig.block.write_config(0, &[0xff; 36]);
    let mut again = [0u8; CONFIG_LEN];
    rig.block.read_config(0, &mut again);
    assert_eq!(again, config);
    assert_eq!(rig.block.features() & (1 << VIRTIO_BLK_F_RO), 0);
    assert_ne!(
        rig_with(true, u64::MAX).block.features() & (1 << VIRTIO_BLK_F_RO),
        0
    );
}

#[test]
fn refuses_bad_ids() {
    let file = TempFile::new(&[0; 512]);
    for id in ["", "a b", "123456789012345678901", "ü", "a\0"] {
        let disk = Disk::open(file.path(), false).unwrap();
        let error = Block::new(disk, id, memory()).unwrap_err();
        assert!(error.to_string().starts_with("the disk id"), "{error}");
    }
}

#[test]
fn reads_and_marks_the_kernels_writes_dirty() {
    let mut rig = rig();
    rig.driver.clean();
    // Two segments; the second one crosses the boundary of the memory regions.
    let data = [writable(DATA - 0x1000, 512), writable(DATA + 0x800, 0x1000)];
    assert_eq!(
        rig.request(VIRTIO_BLK_T_IN, 3, &data),
        (0, 512 + 0x1000 + 1)
    );
    let expected = &pattern()[3 * 512..];
    assert_eq!(rig.driver.bytes(DATA - 0x1000, 512), expected[..512]);
    assert_eq!(
        rig.driver.bytes(DATA + 0x800, 0x1000),
        expected[512..0x1200]
    );
    for page in [DATA - 0x1000, DATA, DATA + 0x1000, STATUS] {
        assert!(rig.driver.dirty(page), "{page:#x}");
    }
    assert!(!rig.driver.dirty(DATA + 0x2000));
    assert!(rig.driver.interrupted());
}

#[test]
fn writes_reach_the_file() {
    for features in [u64::MAX, !(1 << VIRTIO_BLK_F_FLUSH)] {
        let mut rig = rig_with(false, features);
        rig.driver.fill(DATA, &[0xa5; 0x2000]);
        rig.driver.clean();
        let data = [readable(DATA + 0x200, 512), readable(DATA + 0x800, 0x1000)];
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 8, &data), (0, 1));
        assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
        // Memory that the device only read is not dirty.
        assert!(!rig.driver.dirty(DATA));
        let mut expected = pattern();
        expected[8 * 512..8 * 512 + 0x1200].fill(0xa5);
        assert_eq!(std::fs::read(rig.file.path()).unwrap(), expected);
        let back = [writable(DATA + 0x4000, 512)];
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, 8, &back), (0, 513));
        assert_eq!(rig.driver.bytes(DATA + 0x4000, 512), [0xa5; 512]);
    }
}

#[test]
fn identifies_itself_and_knows_its_limits() {
    let mut rig = rig();
    assert_eq!(
        rig.request(VIRTIO_BLK_T_GET_ID, 0, &[writable(DATA, 20)]),
        (0, 21)
    );
    assert_eq!(&rig.driver.bytes(DATA, 6), b"disk0\0");
    // A short buffer gets a part of it, in pieces if necessary.
    let pieces = [writable(DATA + 0x100, 2), writable(DATA + 0x200, 1)];
    assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, &pieces), (0, 4));
    assert_eq!(&rig.driver.bytes(DATA + 0x200, 2), b"s\0");
    // DISCARD was not offered.
    assert_eq!(rig.request(11, 0, &[readable(DATA, 16)]), (2, 1));
    for (sector, len) in [
        (SECTORS, 512),
        (SECTORS - 1, 1024),
        (u64::MAX, 512),
        (1 << 55, 512),
    ] {
        assert_eq!(
            rig.request(VIRTIO_BLK_T_IN, sector, &[writable(DATA, len)]),
            (1, 1)
        );
        assert_eq!(
            rig.request(VIRTIO_BLK_T_OUT, sector, &[readable(DATA, len)]),
            (1, 1)
        );
    }
    assert_eq!(std::fs::read(rig.file.path()).unwrap(), pattern());
}

#[test]
fn read_only_refuses_writes() {
    let mut rig = rig_with(true, u64::MAX);
    let data = [readable(DATA, 512)];
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, &data), (1, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    assert_eq!(
        rig.request(VIRTIO_BLK_T_IN, 0, &[writable(DATA, 512)]),
        (0, 513)
    );
    assert_eq!(std::fs::read(rig.file.path()).unwrap(), pattern());
}

#[test]
fn an_image_that_shrinks_is_an_error() {
    let mut rig = rig();
    let file = File::options().write(true).open(rig.file.path()).unwrap();
    file.set_len(512 + 100).unwrap();
    // The existing part is read, and the rest fails.
    let (status, _) = rig.request(VIRTIO_BLK_T_IN, 0, &[writable(DATA, 2048)]);
    assert_eq!(status, 1);
    assert!(rig.driver.dirty(DATA));
    assert_eq!(
        rig.request(VIRTIO_BLK_T_IN, 0, &[writable(DATA, 512)]),
        (0, 513)
    );
    assert_eq!(rig.block.io_errors(), Some(1));
}

#[test]
fn a_request_without_a_status_byte_breaks_the_queue() {
    let mut rig = rig();
    rig.driver.add(&[readable(HEADER, 16)]);
    assert!(rig.block.process(KICK).needs_reset);
    let data = [writable(DATA, 512)];
    rig.add(0, VIRTIO_BLK_T_IN, 0, &data);
    assert!(!rig.block.process(KICK).needs_reset);
    assert_eq!(rig.driver.take_used(), None);
    // A status byte outside memory has the same effect.
    let mut rig = rig_with(false, u64::MAX);
    rig.driver
        .add(&[readable(HEADER, 16), writable(RAM as u64, 1)]);
    assert!(rig.block.process(KICK).needs_reset);
}

#[test]
fn many_at_once() {
    let mut rig = rig();
    let count = 80;
    for slot in 0..count {
        let data = [writable(DATA - 0x8000 + slot * 512, 512)];
        rig.add(slot, VIRTIO_BLK_T_IN, slot, &data);
    }
    for _ in 0..count {
        rig.wait();
    }
    let len = usize::try_from(count).unwrap();
    assert_eq!(
        rig.driver.bytes(DATA - 0x8000, len * 512),
        pattern()[..len * 512]
    );
    assert_eq!(rig.driver.bytes(STATUS, len), vec![0; len]);
    assert_eq!(rig.block.engine.in_flight(), 0);
}

/// A device whose reads never complete: its disk is a pipe without writes.
fn stuck() -> (Block, Driver, File) {
    let ram = memory();
    stuck_over(Arc::clone(&ram).into(), &ram)
}

pub(super) fn stuck_over(memory: DeviceMemory, ram: &SharedMemory) -> (Block, Driver, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let driver = Driver::new(ram, SIZE);
    let disk = Disk::for_test(File::from(reader), SECTORS);
    let mut block = Block::new(disk, "stuck", memory).unwrap();
    block.events(&[Arc::clone(&driver.kick)]);
    let features = block.features();
    block.activate(driver.activation(features)).unwrap();
    (block, driver, File::from(writer))
}

/// A pipe cannot be synced, so a flush that syncs fails.
#[test]
fn a_flush_that_cannot_sync_is_an_error() {
    let (mut block, mut driver, _writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_FLUSH);
    driver.write(STATUS, 0xffu8);
    driver.add(&[readable(HEADER, 16), writable(STATUS, 1)]);
    block.process(KICK);
    while driver.take_used().is_none() {
        assert!(completes(&block), "the flush never completes");
        block.process(COMPLETION);
    }
    assert_eq!(driver.bytes(STATUS, 1), [1]);
}

/// CVE-2026-45782 of another VMM: I/O completed after a reset.
#[test]
fn reset_with_io_in_flight_leaves_nothing_behind() {
    let (mut block, mut driver, mut writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    let buffers = [
        readable(HEADER, 16),
        writable(DATA, 512),
        writable(STATUS, 1),
    ];
    for _ in 0..10 {
        driver.add(&buffers);
    }
    block.process(KICK);
    assert_eq!(block.engine.in_flight(), 10);
    driver.clean();
    // From another thread than the submitting one, like a vCPU.
    let block = std::thread::spawn(move || {
        block.reset();
        block
    });
    let mut block = block.join().unwrap();
    assert_eq!(block.engine.in_flight(), 0);
    // Data that arrives now must not reach the guest.
    writer.write_all(&[0x5a; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(block.process(COMPLETION), Outcome::default());
    assert_eq!(block.process(KICK), Outcome::default());
    assert_eq!(driver.bytes(DATA, 512), [0; 512]);
    assert_eq!(driver.take_used(), None);
    assert!(!driver.dirty(driver.addresses.device.0));
}

/// A request that hangs in its storage, with its buffers.
fn hung() -> (Block, Driver, File) {
    let (mut block, mut driver, writer) = stuck();
    block.engine.is_hung = true;
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    driver.add(&[
        readable(HEADER, 16),
        writable(DATA, 512),
        writable(STATUS, 1),
    ]);
    block.process(KICK);
    (block, driver, writer)
}

#[test]
fn a_reset_of_a_hung_disk_returns_and_ends_when_the_storage_answers() {
    let (mut block, mut driver, mut writer) = hung();
    let begin = Instant::now();
    block.reset();
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert!(block.is_resetting());
    assert!(!block.await_reset(Duration::from_millis(1)));
    let features = block.features();
    block.activate(driver.activation(features)).unwrap_err();
    // Only a part of the sector arrives; the rest is not read.
    writer.write_all(&[0x5a; 100]).unwrap();
    while block.is_resetting() {
        assert!(completes(&block), "the reset never ends");
        assert_eq!(block.process(COMPLETION), Outcome::default());
    }
    // From here on the memory is the driver's.
    driver.fill(DATA, &[0x11; 512]);
    writer.write_all(&[0x5a; 4096]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    block.process(COMPLETION);
    assert_eq!(driver.bytes(DATA, 512), [0x11; 512]);
    assert_eq!(driver.take_used(), None);
    block.activate(driver.activation(features)).unwrap();
}

#[test]
fn a_hung_disk_is_not_saved_and_continues() {
    let (mut block, mut driver, mut writer) = hung();
    let error = block.save().unwrap_err().to_string();
    assert!(error.contains("has not answered 1 requests"), "{error}");
    writer.write_all(&[7; 512]).unwrap();
    assert!(completes(&block));
    block.process(COMPLETION);
    assert_eq!(driver.take_used(), Some((0, 513)));
    block.save().unwrap();
}

#[test]
fn a_hung_disk_is_closed_when_its_storage_answers() {
    let (block, driver, writer) = hung();
    let begin = Instant::now();
    drop(block);
    assert!(begin.elapsed() < Duration::from_secs(5));
    // The kernel may still write there.
    assert!(engine::hung_disks() > 0);
    let users = Arc::strong_count(&driver.memory);
    drop(writer);
    while engine::hung_disks() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(Arc::strong_count(&driver.memory), users - 1);
}

#[test]
fn a_limited_disk_begins_requests_when_its_timer_expires() {
    let file = TempFile::new(&pattern());
    let mut driver = Driver::new(&memory(), SIZE);
    let disk = Disk::open(file.path(), false).unwrap();
    let mut block = Block::new(disk, "disk0", Arc::clone(&driver.memory)).unwrap();
    let limits = RateLimits {
        requests: NonZeroU64::new(10),
        burst: Duration::from_millis(1),
        ..RateLimits::default()
    };
    block.limit(limits).unwrap();
    let events = block.events(&[Arc::clone(&driver.kick)]);
    assert_eq!(events[2].token, LIMIT);
    let features = block.features();
    block.activate(driver.activation(features)).unwrap();
    driver.write(HEADER, VIRTIO_BLK_T_GET_ID);
    let buffers = [
        readable(HEADER, 16),
        writable(DATA, 20),
        writable(STATUS, 1),
    ];
    for _ in 0..4 {
        driver.add(&buffers);
    }
    let begin = Instant::now();
    block.process(KICK);
    let mut used = 0;
    while used < 4 {
        // Not all at once, whatever wakes it.
        block.process(KICK);
        while driver.take_used().is_some() {
            used += 1;
        }
        assert!(used <= 1 + begin.elapsed().as_millis() / 99, "{used}");
        let mut event = libc::pollfd {
            fd: events[2].fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `event` is one valid pollfd for the call.
        if used < 4 && unsafe { libc::poll(&raw mut event, 1, 10_000) } == 1 {
            block.process(LIMIT);
        }
    }
    assert!(begin.elapsed() >= Duration::from_millis(290));
    block.reset();
    assert_eq!(block.process(LIMIT), Outcome::default());
}

#[test]
fn late_data_wakes_the_event_loop() {
    let (mut block, mut driver, mut writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    let buffers = [
        readable(HEADER, 16),
        writable(DATA, 512),
        writable(STATUS, 1),
    ];
    driver.add(&buffers);
    block.process(KICK);
    assert_eq!(driver.take_used(), None);
    driver.clean();
    // In two parts: the first one is a short read that continues.
    for part in [[1; 200].as_slice(), &[2; 312]] {
        writer.write_all(part).unwrap();
        assert!(completes(&block));
        block.process(COMPLETION);
    }
    assert_eq!(driver.take_used(), Some((0, 513)));
    assert_eq!(driver.read::<u8>(STATUS), 0);
    assert_eq!(driver.bytes(DATA + 198, 4), [1, 1, 2, 2]);
    assert!(driver.dirty(DATA));
    assert!(driver.interrupted());
}

#[test]
fn dropping_with_io_in_flight_waits_for_it() {
    let (mut block, mut driver, _writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    driver.add(&[
        readable(HEADER, 16),
        writable(DATA, 512),
        writable(STATUS, 1),
    ]);
    block.process(KICK);
    assert_eq!(block.engine.in_flight(), 1);
    drop(block);
}

#[test]
fn requests_in_flight_are_bounded() {
    let (mut block, mut driver, _writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    let buffers = [
        readable(HEADER, 16),
        writable(DATA, 512),
        writable(STATUS, 1),
    ];
    // The driver reuses descriptors without waiting (CVE-2016-5403).
    for _ in 0..2000 {
        driver.add(&buffers);
        block.process(KICK);
    }
    assert_eq!(block.engine.in_flight(), rings::DEPTH as usize);

    // Limited also by bytes: each request reads 10 MiB into the same memory.
    let (mut block, mut driver, _writer) = stuck();
    driver.write(HEADER, VIRTIO_BLK_T_IN);
    block.engine = Engine::new(
        Disk::for_test(File::open("/dev/null").unwrap(), 1 << 20),
        block.memory.clone(),
        rings::take().unwrap(),
    );
    let mut buffers = vec![readable(HEADER, 16)];
    buffers.extend([writable(0x8_0000, 0x8_0000); 20]);
    buffers.push(writable(STATUS, 1));
    for _ in 0..10 {
        driver.add(&buffers);
    }
    let limits = Limits {
        sectors: 1 << 20,
        read_only: false,
        max_bytes: 1 << 30,
    };
    let queue = block.active.as_mut().unwrap().queue().unwrap();
    let mut begun = 0;
    while block.engine.has_room() {
        let request = next_request(queue, &block.memory, &limits)
            .unwrap()
            .unwrap();
        begin(&mut block.engine, queue, &block.memory, &block.id, request).unwrap();
        begun += 1;
    }
    assert_eq!(begun, 7);
}

#[test]
fn saves_what_it_reported_and_continues() {
    let mut rig = rig();
    let data = [writable(DATA, 512)];
    rig.request(VIRTIO_BLK_T_IN, 1, &data);
    // Submitted, possibly not completed: the save waits and reports.
    let second = rig.add(1, VIRTIO_BLK_T_IN, 2, &data);
    rig.block.process(KICK);
    let state = rig.block.save().unwrap();
    if let Some((id, _)) = rig.driver.take_used() {
        assert_eq!(id, u32::from(second));
    }
    assert_eq!(rig.driver.read::<u8>(STATUS + 1), 0);
    // Not processed yet: the restored device does it.
    rig.add(2, VIRTIO_BLK_T_IN, 4, &data);
    rig.block.process(KICK);
    assert_eq!(rig.driver.read::<u8>(STATUS + 2), 0xff);

    let features = rig.block.features();
    rig.block
        .restore(&state, rig.driver.activation(features))
        .unwrap();
    rig.wait();
    assert_eq!(rig.driver.read::<u8>(STATUS + 2), 0);
    assert_eq!(rig.driver.bytes(DATA, 512), pattern()[4 * 512..5 * 512]);

    // A disk of another size, or another kind of device.
    rig.block.reset();
    let smaller = TempFile::new(&[0; 512]);
    let disk = Disk::open(smaller.path(), false).unwrap();
    let mut other = Block::new(disk, "disk0", Arc::clone(&rig.driver.memory)).unwrap();
    let error = other
        .restore(&state, rig.driver.activation(features))
        .unwrap_err();
    assert!(error.to_string().contains("2048 sectors"));
    let mut renamed = state.clone();
    renamed.name = "virtio-rng".to_owned();
    assert!(
        rig.block
            .restore(&renamed, rig.driver.activation(features))
            .is_err()
    );
    for len in 0..state.payload.len() {
        let mut short = state.clone();
        short.payload.truncate(len);
        let activation = rig.driver.activation(features);
        assert!(rig.block.restore(&short, activation).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn hostile_states_are_harmless(
        sectors in proptest::prelude::prop_oneof![proptest::prelude::Just(SECTORS), any::<u64>()],
        payload in proptest::collection::vec(any::<u8>(), 0..24),
    ) {
        let mut rig = rig();
        rig.block.reset();
        let mut bytes = postcard::to_stdvec(&sectors).unwrap();
        bytes.extend(payload);
        let state = SavedState {
            name: STATE_NAME.to_owned(),
            version: STATE_VERSION,
            payload: bytes,
        };
        let features = rig.block.features();
        if rig.block.restore(&state, rig.driver.activation(features)).is_ok() {
            prop_assert!(sectors == SECTORS);
            rig.block.process(KICK);
        }
    }

    #[test]
    fn arbitrary_requests_are_harmless(
        requests in proptest::collection::vec(
            (0..14u32, any::<u64>(), any::<bool>(), 0..0x1000u32, 0..RAM as u64),
            1..20,
        ),
        ring in proptest::collection::vec(any::<u8>(), 0..0x400),
    ) {
        let mut rig = rig();
        for (slot, (kind, sector, small, len, address)) in (0..).zip(requests) {
            let sector = if small { sector % SECTORS } else { sector };
            // Data may overlap the rings themselves.
            rig.add(slot, kind, sector, &[writable(address.min(RAM as u64 - 0x1000), len)]);
        }
        rig.driver.fill(0x1000, &ring);
        for _ in 0..3 {
            rig.block.process(KICK);
            rig.block.process(COMPLETION);
        }
        rig.block.reset();
        prop_assert!(rig.block.engine.in_flight() == 0);
        prop_assert!(std::fs::metadata(rig.file.path()).unwrap().len() == SECTORS * 512);
    }
}
