//! Pages of devices as memory slots against a real `/dev/kvm`. The pages belong to a file and are
//! mapped for writes only, like a device's page in the kernel. KVM treats a guest's read of either
//! alike. Fails with a message without KVM.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use devices::hypervisor::{DeviceMappings, DevicePages};
use support::asm::{self, HALT_FOR_EVER, join};
use support::{MMIO, PATIENCE, PORT, Rig};
use vmm::kvm::device_mappings::KvmDeviceMappings;
use vmm::vcpu::{FaultHandler, VcpuFailure};

/// Pages of a file, mapped write-only.
#[derive(Debug)]
struct Page {
    address: *mut libc::c_void,
    size: usize,
    file: File,
}

// SAFETY: the pointer is only ever unmapped, by the last owner.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn new() -> Arc<Self> {
        Self::several(1)
    }

    fn several(count: usize) -> Arc<Self> {
        let size = count * 4096;
        let path = std::env::temp_dir().join(format!(
            "bellhop-doorbell-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(size as u64).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        Arc::new(Self {
            address,
            size,
            file,
        })
    }

    fn word(&self) -> u16 {
        self.word_at(0)
    }

    fn word_at(&self, offset: u64) -> u16 {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        u16::from_le_bytes(bytes)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping has no user any more.
        unsafe { libc::munmap(self.address, self.size) };
    }
}

// SAFETY: one mapping of this size, which stays as long as the value lives.
unsafe impl DevicePages for Page {
    fn host_address(&self) -> u64 {
        self.address.addr() as u64
    }

    fn size(&self) -> u64 {
        self.size as u64
    }
}

/// Unmaps the doorbell at [`MMIO`] when the guest faults on it.
#[derive(Debug)]
struct Remedy {
    mappings: Arc<KvmDeviceMappings>,
    helps: AtomicBool,
    /// Another thread unmaps it before the handler does.
    late: AtomicBool,
    asked: AtomicUsize,
}

impl FaultHandler for Remedy {
    fn generation(&self) -> u64 {
        self.mappings.unmapped_count()
    }

    fn memory_fault(&self, address: Option<u64>) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst);
        assert!(address.is_none_or(|address| address & !0xfff == u64::from(MMIO)));
        if !self.helps.load(Ordering::SeqCst) {
            return false;
        }
        let took = self.mappings.unmap(MMIO.into()).is_ok();
        took && !self.late.load(Ordering::SeqCst)
    }
}

fn rig(code: &[u8]) -> (Rig, Arc<KvmDeviceMappings>, Arc<Remedy>) {
    let mut made = None;
    let rig = Rig::with_faults(1, code, |vm, slots| {
        let mappings = Arc::new(KvmDeviceMappings::new(vm.fd().clone(), slots.clone()));
        let remedy = Arc::new(Remedy {
            mappings: mappings.clone(),
            helps: AtomicBool::new(true),
            late: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
        });
        made = Some((mappings, remedy.clone()));
        remedy
    });
    let (mappings, remedy) = made.unwrap();
    (rig, mappings, remedy)
}

/// Prints the byte at [`MMIO`].
fn read_and_say() -> Vec<u8> {
    let [low, high] = MMIO.to_le_bytes();
    vec![0xa0, low, high, 0xe6, PORT] // mov al, [MMIO]; out PORT, al
}

#[test]
fn a_store_reaches_the_page_and_no_thread() {
    let (rig, mappings, remedy) = rig(&join(&[
        &asm::store(MMIO, 0x1234),
        &asm::out(PORT, b'.'),
        HALT_FOR_EVER,
    ]));
    let page = Page::new();
    let bell = vdpa::eventfd::new().unwrap();
    for round in 1..=3 {
        // First the eventfd, so that KVM has cached the absence of memory there; then, without a
        // gap, the page, and back.
        mappings.attach(MMIO.into(), &bell).unwrap();
        rig.vcpus.resume();
        rig.port.take(1);
        rig.vcpus.pause();
        assert_eq!((bell.read().unwrap(), page.word()), (1, 0));

        mappings.map(MMIO.into(), page.clone()).unwrap();
        mappings.detach(MMIO.into(), &bell).unwrap();
        let taken = mappings.map(MMIO.into(), page.clone()).unwrap_err();
        assert_eq!(taken.kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!((mappings.count(), mappings.mapped_count()), (0, 1));
        rig.restart();
        rig.vcpus.resume();
        rig.port.take(1);
        rig.vcpus.pause();
        assert!(bell.read().is_err());
        assert_eq!(page.word(), 0x1234);

        mappings.unmap(MMIO.into()).unwrap();
        assert!(mappings.unmap(MMIO.into()).is_err());
        assert_eq!(mappings.unmapped_count(), round);
        assert_eq!(Arc::strong_count(&page), 1, "the page is let go");
        page.file.write_all_at(&[0; 2], 0).unwrap();
        rig.restart();
    }
    assert!(rig.mmio.is_empty(), "no store exited");
    assert_eq!(remedy.asked.load(Ordering::SeqCst), 0);
    assert_eq!(rig.slots.count(), 1);
}

#[test]
fn stores_reach_each_of_several_pages() {
    const PAGES: u16 = 3;
    let last = MMIO + PAGES * 0x1000 - 2;
    let (rig, mappings, remedy) = rig(&join(&[
        &asm::store(MMIO, 1),
        &asm::store(MMIO + 0x1000, 2),
        &asm::store(last, 3),
        &asm::out(PORT, b'.'),
        HALT_FOR_EVER,
    ]));
    let pages = Page::several(PAGES.into());
    mappings.map(MMIO.into(), pages.clone()).unwrap();
    // In the middle, and across the end.
    for (offset, count) in [(0x1000, 1), (0x2000, 2)] {
        let address = u64::from(MMIO) + offset;
        mappings.map(address, Page::several(count)).unwrap_err();
    }
    rig.vcpus.resume();
    rig.port.take(1);
    rig.vcpus.pause();
    let offsets = [0, 0x1000, u64::from(last - MMIO)];
    assert_eq!(offsets.map(|offset| pages.word_at(offset)), [1, 2, 3]);
    assert!(rig.mmio.is_empty(), "no store exited");

    // All of them leave the guest at once.
    mappings.unmap(MMIO.into()).unwrap();
    pages.file.write_all_at(&[0; 0x3000], 0).unwrap();
    rig.restart();
    rig.vcpus.resume();
    rig.port.take(1);
    rig.vcpus.pause();
    assert_eq!(rig.mmio.take(1), [(0, vec![1, 0])]);
    assert_eq!(offsets.map(|offset| pages.word_at(offset)), [0; 3]);
    assert_eq!(Arc::strong_count(&pages), 1, "the pages are let go");
    assert_eq!(remedy.asked.load(Ordering::SeqCst), 0);
    assert_eq!(rig.slots.count(), 1);
}

#[test]
fn a_read_takes_the_page_away_and_is_tried_again() {
    for late in [false, true] {
        let (rig, mappings, remedy) = rig(&join(&[
            &read_and_say(),
            &asm::store(MMIO, 7),
            &asm::out(PORT, b'.'),
            HALT_FOR_EVER,
        ]));
        remedy.late.store(late, Ordering::SeqCst);
        let page = Page::new();
        mappings.map(MMIO.into(), page.clone()).unwrap();
        rig.vcpus.resume();
        // The recorder behind the page answers the read, and takes the store.
        assert_eq!(rig.port.take_bytes(2), [0x5a, b'.']);
        assert_eq!(rig.mmio.take(1), [(0, vec![7, 0])]);
        assert_eq!(remedy.asked.load(Ordering::SeqCst), 1);
        assert_eq!(page.word(), 0);
        assert_eq!(rig.vcpus.take_report(), None);
    }
}

#[test]
fn a_read_without_a_remedy_ends_the_vcpu() {
    let (rig, mappings, remedy) = rig(&join(&[&read_and_say(), HALT_FOR_EVER]));
    remedy.helps.store(false, Ordering::SeqCst);
    mappings.map(MMIO.into(), Page::new()).unwrap();
    rig.vcpus.resume();
    let start = Instant::now();
    let report = loop {
        if let Some(report) = rig.vcpus.take_report() {
            break report;
        }
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    };
    assert!(
        matches!(report.failure, VcpuFailure::MemoryFault { .. }),
        "{report}"
    );
    assert_eq!(remedy.asked.load(Ordering::SeqCst), 1, "no endless loop");
}

#[test]
fn exits_are_counted_while_the_vcpu_runs() {
    let code = join(&[
        &asm::out(PORT, b'.').repeat(50),
        &asm::out(PORT, b'!'),
        &[0xeb, 0xfe],
    ]);
    let rig = Rig::new(1, &code);
    let before = rig.vcpus.statistics().unwrap();
    rig.vcpus.resume();
    rig.port.take(51);
    let after = rig.vcpus.statistics().unwrap();
    let exits = after["exits"] - before["exits"];
    assert!(exits >= 51, "{exits} exits for 51 port accesses");
    assert!(after["io_exits"] - before["io_exits"] >= 51, "{after:?}");
}
