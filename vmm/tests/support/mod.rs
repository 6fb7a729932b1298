//! A VM without devices for tests that need `/dev/kvm`. It has 32 KiB of RAM, a recorder on a port
//! and on an address, and real-mode programs of a few bytes.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::bus::{Bus, BusDevice};
use kvm_bindings::{kvm_regs, kvm_sregs};
use parking_lot::{Condvar, Mutex};
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::memory_slots::MemorySlots;
use vmm::kvm::{Hypervisor, PlatformAddresses, Vm};
use vmm::vcpu::{Buses, FaultHandler, Vcpus};

/// Start address of programs.
pub(crate) const CODE: u64 = 0x1000;
/// End of the guest's memory.
pub(crate) const RAM_SIZE: usize = 0x8000;
/// The recorder's port.
pub(crate) const PORT: u8 = 0x10;
/// The recorder's address: not memory.
pub(crate) const MMIO: u16 = 0x9000;
/// Nothing here takes longer, even on an emulated processor.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Records writes as (offset, bytes); reads return 0x5a.
#[derive(Default)]
pub(crate) struct Recorder {
    writes: Mutex<Vec<(u64, Vec<u8>)>>,
    changed: Condvar,
}

impl BusDevice for Recorder {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0x5a);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.writes.lock().push((offset, data.to_vec()));
        self.changed.notify_all();
    }
}

impl Recorder {
    /// Waits until there are `count` writes and takes all of them.
    pub(crate) fn take(&self, count: usize) -> Vec<(u64, Vec<u8>)> {
        let mut writes = self.writes.lock();
        let wanted = |writes: &mut Vec<_>| writes.len() < count;
        let result = self.changed.wait_while_for(&mut writes, wanted, PATIENCE);
        assert!(
            !result.timed_out(),
            "{} of {count} writes came: {writes:x?}",
            writes.len()
        );
        std::mem::take(&mut writes)
    }

    /// Waits like [`Recorder::take`] and returns the written bytes only.
    pub(crate) fn take_bytes(&self, count: usize) -> Vec<u8> {
        self.take(count).into_iter().flat_map(|(_, b)| b).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.lock().is_empty()
    }

    /// Delays writes for `time`, and calls `begun` when the delay starts.
    pub(crate) fn hold(&self, time: Duration, begun: impl FnOnce()) {
        let _writes = self.writes.lock();
        begun();
        std::thread::sleep(time);
    }
}

/// Fields drop in this order: vCPUs first.
pub(crate) struct Rig {
    pub(crate) vcpus: Vcpus,
    pub(crate) port: Arc<Recorder>,
    pub(crate) mmio: Arc<Recorder>,
    pub(crate) memory: GuestMemory,
    pub(crate) slots: Arc<MemorySlots>,
    pub(crate) vm: Vm,
}

impl Rig {
    /// A VM with `code` at [`CODE`], parked before its first instruction.
    pub(crate) fn new(cpus: u8, code: &[u8]) -> Self {
        Self::with_faults(cpus, code, |_, _| Arc::new(()))
    }

    /// Like [`Rig::new`], with a handler for memory faults.
    pub(crate) fn with_faults(
        cpus: u8,
        code: &[u8],
        faults: impl FnOnce(&Vm, &Arc<MemorySlots>) -> Arc<dyn FaultHandler>,
    ) -> Self {
        let hypervisor = Hypervisor::open()
            .expect("this test needs a working /dev/kvm; `cargo lab test` provides one");
        let platform = PlatformAddresses {
            identity_map: 0xfffb_c000,
            tss: 0xfffb_d000,
        };
        let vm = hypervisor.create_vm(platform, cpus).unwrap();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), RAM_SIZE)]).unwrap();
        let slots = Arc::new(MemorySlots::new(vm.fd().clone()));
        slots.add_ram(&memory).unwrap();
        let (port, mmio) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
        let buses = Buses {
            io: Arc::new(Bus::new()),
            mmio: Arc::new(Bus::new()),
        };
        buses.io.insert(PORT.into(), 1, port.clone()).unwrap();
        buses.mmio.insert(MMIO.into(), 0x100, mmio.clone()).unwrap();
        let faults = faults(&vm, &slots);
        let cpuid = hypervisor.supported_cpuid().unwrap();
        let vcpus = Vcpus::new(&hypervisor, &vm, cpus, &cpuid, &[], &buses, &faults).unwrap();
        let rig = Self {
            vcpus,
            port,
            mmio,
            memory,
            slots,
            vm,
        };
        rig.load(CODE, code);
        rig.restart();
        rig
    }

    pub(crate) fn load(&self, address: u64, code: &[u8]) {
        self.memory
            .write_slice(code, GuestAddress(address))
            .unwrap();
    }

    /// Resets the paused vCPUs and sets the boot processor to [`CODE`], in real mode.
    pub(crate) fn restart(&self) {
        self.vcpus.reset().unwrap();
        let regs = kvm_regs {
            rip: CODE,
            rsp: 0x7000,
            rflags: 2,
            ..Default::default()
        };
        self.vcpus.set_entry(&regs, flat).unwrap();
    }

    pub(crate) fn word(&self, address: u64) -> u32 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    /// Waits until the word at `address` is no longer `value`; returns the new one.
    pub(crate) fn wait_change(&self, address: u64, value: u32) -> u32 {
        let start = Instant::now();
        loop {
            let now = self.word(address);
            if now != value {
                return now;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "word at {address:#x} stays {value}; report: {:?}",
                self.vcpus.take_report()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn flat(sregs: &mut kvm_sregs) {
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        segment.base = 0;
        segment.selector = 0;
    }
}

/// Real-mode instructions, for programs as lists of them.
pub(crate) mod asm {
    pub(crate) fn join(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }
    pub(crate) fn out(port: u8, value: u8) -> [u8; 4] {
        [0xb0, value, 0xe6, port] // mov al, value; out port, al
    }
    pub(crate) fn wrmsr(index: u32, high: u32, low: u32) -> Vec<u8> {
        let mut code = vec![0x66, 0xb9]; // mov ecx, index
        code.extend(index.to_le_bytes());
        code.extend([0x66, 0xba]); // mov edx, high
        code.extend(high.to_le_bytes());
        code.extend([0x66, 0xb8]); // mov eax, low
        code.extend(low.to_le_bytes());
        code.extend([0x0f, 0x30]);
        code
    }
    /// Switches the local APIC to x2APIC mode and enables it.
    pub(crate) fn x2apic() -> Vec<u8> {
        let mut code = vec![0x66, 0xb9, 0x1b, 0, 0, 0]; // mov ecx, IA32_APIC_BASE
        code.extend([0x0f, 0x32, 0x0d, 0x00, 0x0c, 0x0f, 0x30]); // rdmsr; or ax, 0xc00; wrmsr
        code.extend(wrmsr(0x80f, 0, 0x1ff)); // spurious vector 0xff, enabled
        code
    }
    /// mov word [address], value
    pub(crate) fn store(address: u16, value: u16) -> Vec<u8> {
        let mut code = vec![0xc7, 0x06];
        code.extend(address.to_le_bytes());
        code.extend(value.to_le_bytes());
        code
    }
    pub(crate) const HLT: &[u8] = &[0xf4];
    pub(crate) const CLI: &[u8] = &[0xfa];
    pub(crate) const STI: &[u8] = &[0xfb];
    pub(crate) const IRET: &[u8] = &[0xcf];
    /// hlt; jmp to the hlt
    pub(crate) const HALT_FOR_EVER: &[u8] = &[0xf4, 0xeb, 0xfd];
}
