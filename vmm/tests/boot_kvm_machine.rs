//! Whole machines against a real `/dev/kvm`, with PVH kernels of a few instructions. Fails with a
//! message without KVM.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use vmm::ErrorKind;
use vmm::config::{CpuBaseline, RingWatch, VmConfig};
use vmm::console::{Console, ConsoleInput, ConsoleRead, TerminalConsole};
use vmm::machine::{Exit, Machine, Origin, Snapshot, StopHandle};
use vmm::vcpu::VcpuFailure;

/// A file in the temporary directory, removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("bellhop-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// 32-bit instructions.
mod asm {
    pub(crate) fn out(port: u16, value: u8) -> Vec<u8> {
        let [low, high] = port.to_le_bytes();
        vec![0x66, 0xba, low, high, 0xb0, value, 0xee] // mov dx; mov al; out dx, al
    }
    pub(crate) fn say(text: &[u8]) -> Vec<u8> {
        text.iter().flat_map(|byte| out(0x3f8, *byte)).collect()
    }
    pub(crate) fn power_off() -> Vec<u8> {
        [out(0x600, 0x34), SPIN.to_vec()].concat()
    }
    pub(crate) fn reset() -> Vec<u8> {
        [out(0x602, 1), SPIN.to_vec()].concat()
    }
    pub(crate) fn keyboard_reset() -> Vec<u8> {
        [out(0x64, 0xfe), SPIN.to_vec()].concat()
    }
    /// Prints `len` bytes of its memory.
    pub(crate) fn say_memory(address: u32, len: u32) -> Vec<u8> {
        let mut code = vec![0xbe]; // mov esi, address
        code.extend(address.to_le_bytes());
        code.push(0xb9); // mov ecx, len
        code.extend(len.to_le_bytes());
        // mov dx, 0x3f8; lodsb; out dx, al; loop to the lodsb
        code.extend([0x66, 0xba, 0xf8, 0x03, 0xac, 0xee, 0xe2, 0xfc]);
        code
    }
    /// Prints a register of a CPUID leaf: 0 EAX, 1 ECX, 2 EDX, 3 EBX.
    pub(crate) fn say_cpuid(leaf: u32, register: u8) -> Vec<u8> {
        let mut code = vec![0xb8]; // mov eax, leaf
        code.extend(leaf.to_le_bytes());
        // xor ecx, ecx; cpuid; mov eax, register; mov dx, 0x3f8
        code.extend([0x31, 0xc9, 0x0f, 0xa2, 0x89, 0xc0 | register << 3]);
        code.extend([0x66, 0xba, 0xf8, 0x03]);
        code.extend([0xee, 0xc1, 0xe8, 8].repeat(4)); // out dx, al; shr eax, 8
        code
    }
    pub(crate) const SPIN: &[u8] = &[0xeb, 0xfe];
    pub(crate) const CRASH: &[u8] = &[0x0f, 0x0b]; // ud2: no handlers, a triple fault
}

/// An ELF with a PVH note whose code is at 1 MiB.
fn kernel(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    const NOTE: u64 = 64 + 2 * 56;
    const CODE: u64 = 0x100;
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for half in [2u16, 62] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1u32.to_le_bytes());
    for word in [BASE, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let len = code.len() as u64;
    for (kind, offset, address, size) in [(1u32, CODE, BASE, len), (4, NOTE, 0, 20)] {
        elf.extend(kind.to_le_bytes());
        elf.extend(7u32.to_le_bytes());
        for word in [offset, address, address, size, size, 4] {
            elf.extend(word.to_le_bytes());
        }
    }
    for word in [4u32, 4, 18] {
        elf.extend(word.to_le_bytes()); // name, descriptor, XEN_ELFNOTE_PHYS32_ENTRY
    }
    elf.extend(b"Xen\0");
    elf.extend(u32::try_from(BASE).unwrap().to_le_bytes());
    elf.resize(usize::try_from(CODE).unwrap(), 0);
    elf.extend(code);
    elf
}

fn config(kernel: &Temporary, cpus: u64) -> VmConfig {
    VmConfig {
        kernel: kernel.0.clone(),
        initramfs: None,
        cmdline: "console=ttyS0".to_owned(),
        cpus: cpus.try_into().unwrap(),
        cpu: vmm::config::CpuBaseline::default(),
        cpu_affinity: vmm::config::CpuAffinity::default(),
        memory: "64M".parse().unwrap(),
        vdpa: Vec::new(),
        disks: Vec::new(),
        ring_watch: RingWatch::default(),
        vfio: Vec::new(),
        iommu: None,
    }
}

struct Keyboard(PipeReader);

impl AsFd for Keyboard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ConsoleInput for Keyboard {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        Ok(match self.0.read(buffer)? {
            0 => ConsoleRead::Closed,
            count if buffer[..count].contains(&1) => ConsoleRead::Leave,
            count => ConsoleRead::Bytes(count),
        })
    }
}

fn silent() -> (Console, PipeReader) {
    let (reader, writer) = io::pipe().unwrap();
    let console = Console::Terminal(TerminalConsole {
        input: None,
        output: OwnedFd::from(writer),
    });
    (console, reader)
}

fn machine(config: &VmConfig, console: Console, stop: &StopHandle) -> Machine {
    Machine::new(config, console, stop)
        .expect("this test needs a working /dev/kvm; `cargo lab test` provides one")
}

/// Runs to the end; returns the exit and the guest's output.
fn run(code: &[u8], name: &str, cpus: u64) -> (Exit, Vec<u8>) {
    let kernel = Temporary::new(name, &kernel(code));
    let (console, mut output) = silent();
    let stop = StopHandle::new().unwrap();
    let mut machine = machine(&config(&kernel, cpus), console, &stop);
    let exit = machine.run().unwrap();
    drop(machine);
    let mut said = Vec::new();
    output.read_to_end(&mut said).unwrap();
    (exit, said)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn prints_hello_and_powers_off() {
    for cpus in [1, 4] {
        let code = [asm::say(b"hello\n"), asm::power_off()].concat();
        let (exit, said) = run(&code, &format!("hello{cpus}"), cpus);
        assert_eq!((exit, &said[..]), (Exit::PoweredOff, &b"hello\n"[..]));
    }
}

#[test]
fn a_triple_fault_ends_the_run_as_a_crash() {
    let code = [asm::say(b"oh"), asm::CRASH.to_vec()].concat();
    let (exit, said) = run(&code, "crash", 2);
    let Exit::Crashed(report) = exit else {
        panic!("{exit:?}");
    };
    assert_eq!(
        (report.index, report.failure),
        (0, VcpuFailure::TripleFault)
    );
    assert_eq!(said, b"oh");
}

/// Counts at 5 MiB, which no power-on overwrites; resets until the count is 25.
fn reboots(reset: Vec<u8>) -> Vec<u8> {
    let mut code = asm::say(b".");
    code.extend([0xff, 0x05, 0, 0, 0x50, 0]); // inc dword [0x500000]
    code.extend([0x83, 0x3d, 0, 0, 0x50, 0, 25]); // cmp dword [0x500000], 25
    code.extend([0x7d, u8::try_from(reset.len()).unwrap()]); // jge over the reset
    code.extend(reset);
    code.extend(asm::power_off());
    code
}

#[test]
fn reboots_in_place_and_leaks_nothing() {
    for (name, reset) in [("acpi", asm::reset()), ("i8042", asm::keyboard_reset())] {
        let kernel = Temporary::new(name, &kernel(&reboots(reset)));
        let disk = Temporary::new(&format!("{name}.img"), &[0; 4096]);
        let mut config = config(&kernel, 2);
        let image = format!("path={}", disk.0.display());
        config.disks.push(image.parse().unwrap());
        let (console, output) = silent();
        let stop = StopHandle::new().unwrap();
        let mut machine = machine(&config, console, &stop);
        let resources = machine.resources();
        // Other tests open and close descriptors meanwhile: check only those of this machine.
        assert_eq!((resources.memory_slots, resources.doorbells), (1, 0));
        assert_eq!(machine.run().unwrap(), Exit::PoweredOff);
        assert_eq!(machine.resources(), resources);
        // A second run is the same as a reset.
        assert_eq!(machine.run().unwrap(), Exit::PoweredOff);
        assert_eq!(machine.resources(), resources);
        drop(machine);
        let said = io::read_to_string(output).unwrap();
        assert_eq!(said.len(), 26);
    }
}

#[test]
fn dropping_a_machine_closes_everything() {
    // In a process of its own, where no other test opens descriptors.
    const CHILD: &str = "BELLHOP_TEST_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        // Its output stays here: the test runner must not count the child's results.
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "dropping_a_machine_closes_everything"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        let errors = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{said}\n{errors}");
        assert!(said.contains("1 passed"), "{said}");
        return;
    }
    let round = || run(&reboots(asm::reset()), "descriptors", 3);
    round(); // opens everything that is opened once per process
    let before = descriptors();
    for _ in 0..3 {
        assert_eq!(round().0, Exit::PoweredOff);
    }
    assert_eq!(descriptors(), before);
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert!(threads <= 3, "{threads} threads are left");
}

#[test]
fn stops_from_another_thread_and_stays_stopped() {
    let kernel = Temporary::new("spin", &kernel(asm::SPIN));
    let (console, _output) = silent();
    let stop = StopHandle::new().unwrap();
    let mut machine = machine(&config(&kernel, 4), console, &stop);
    let asker = stop.clone();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        asker.stop();
    });
    assert_eq!(machine.run().unwrap(), Exit::Stopped);
    thread.join().unwrap();
    // The stop request persists.
    let start = Instant::now();
    assert_eq!(machine.run().unwrap(), Exit::Stopped);
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// Echoes the serial port until it reads a `q`.
fn echo() -> Vec<u8> {
    let mut code = vec![
        0x66, 0xba, 0xfd, 0x03, // mov dx, 0x3fd
        0xec, 0xa8, 0x01, 0x74, 0xfb, // in al, dx; test al, 1; jz back
        0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, // mov dx, 0x3f8; in al, dx; out dx, al
        0x3c, b'q', 0x75, 0xeb, // cmp al, 'q'; jne start
    ];
    code.extend(asm::power_off());
    code
}

#[test]
fn console_input_reaches_the_guest_complete() {
    let kernel = Temporary::new("echo", &kernel(&echo()));
    let (keyboard, mut typist) = io::pipe().unwrap();
    let (screen, output) = io::pipe().unwrap();
    let console = Console::Terminal(TerminalConsole {
        input: Some(Box::new(Keyboard(keyboard))),
        output: OwnedFd::from(output),
    });
    let stop = StopHandle::new().unwrap();
    let mut machine = machine(&config(&kernel, 1), console, &stop);
    let mut text: Vec<u8> = (0..20_000u32).map(|i| b'A' + (i % 26) as u8).collect();
    text.push(b'q');
    let typed = text.clone();
    let typist = thread::spawn(move || typist.write_all(&typed).map(|()| typist));
    // The screen is not read until the end: its pipe is smaller than the text, so output has to
    // wait too.
    let reader = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        let mut screen = File::from(OwnedFd::from(screen));
        let mut seen = Vec::new();
        screen.read_to_end(&mut seen).unwrap();
        seen
    });
    assert_eq!(machine.run().unwrap(), Exit::PoweredOff);
    drop(machine);
    typist.join().unwrap().unwrap();
    assert_eq!(reader.join().unwrap(), text);
}

#[test]
fn leaving_the_console_stops_a_deaf_guest() {
    let kernel = Temporary::new("deaf", &kernel(asm::SPIN));
    let (keyboard, mut typist) = io::pipe().unwrap();
    let (_output, output) = io::pipe().unwrap();
    let console = Console::Terminal(TerminalConsole {
        input: Some(Box::new(Keyboard(keyboard))),
        output: output.into(),
    });
    let stop = StopHandle::new().unwrap();
    let mut machine = machine(&config(&kernel, 1), console, &stop);
    typist.write_all(&[b'x'; 1000]).unwrap();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        typist.write_all(&[1]).unwrap();
        typist
    });
    assert_eq!(machine.run().unwrap(), Exit::Stopped);
    thread.join().unwrap();
}

#[test]
fn bad_files_are_errors_with_nothing_left() {
    let stop = StopHandle::new().unwrap();
    let not_a_kernel = Temporary::new("text", b"this is not a kernel");
    let (console, _output) = silent();
    let mut machine = machine(&config(&not_a_kernel, 1), console, &stop);
    let error = machine.run().unwrap_err();
    assert!(
        error.to_string().starts_with("cannot boot the kernel"),
        "{error}"
    );
    // After the file is corrected, the machine runs.
    std::fs::write(&not_a_kernel.0, kernel(&asm::power_off())).unwrap();
    assert_eq!(machine.run().unwrap(), Exit::PoweredOff);

    let mut bad_disk = config(&not_a_kernel, 1);
    let image = "/nonexistent/disk.img,readonly=on";
    bad_disk.disks.push(image.parse().unwrap());
    let (console, _output) = silent();
    let error = Machine::new(&bad_disk, console, &stop).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unusable, "{error}");
}

/// Prints its generation ID. After a notification of a change, acknowledges it, and prints whether
/// the notification is still pending and the ID again.
fn generation() -> Vec<u8> {
    const AT: u32 = 0xf_f000;
    let mut code = asm::say_memory(AT, 16);
    // mov dx, 0x630; in al, dx; test al, 1; jz back
    code.extend([0x66, 0xba, 0x30, 0x06, 0xec, 0xa8, 0x01, 0x74, 0xfb]);
    // mov al, 1; out dx, al; in al, dx; mov dx, 0x3f8; out dx, al
    code.extend([0xb0, 0x01, 0xee, 0xec, 0x66, 0xba, 0xf8, 0x03, 0xee]);
    code.extend(asm::say_memory(AT, 16));
    code.extend(asm::power_off());
    code
}

#[test]
fn each_guest_of_a_snapshot_gets_another_generation_id() {
    let kernel = Temporary::new("generation", &kernel(&generation()));
    let directory = std::env::temp_dir().join(format!("bellhop-generation-{}", std::process::id()));
    let (console, mut output) = silent();
    let stop = StopHandle::new().unwrap();
    let mut machine = machine(&config(&kernel, 1), console, &stop);
    let (handle, snapshot) = (machine.handle(), directory.clone());
    let saver = thread::spawn(move || {
        let mut id = [0; 16];
        output.read_exact(&mut id).unwrap();
        handle.snapshot(&snapshot).unwrap();
        stop.stop();
        id
    });
    assert_eq!(machine.run().unwrap(), Exit::Stopped);
    drop(machine);
    let mut ids = vec![saver.join().unwrap()];
    for _ in 0..2 {
        let (console, mut output) = silent();
        let origin = Origin::Snapshot(Box::new(Snapshot::open(&directory).unwrap()));
        let mut machine = Machine::bring_up(&origin, console, &StopHandle::new().unwrap()).unwrap();
        assert_eq!(machine.run().unwrap(), Exit::PoweredOff);
        drop(machine);
        let mut said = Vec::new();
        output.read_to_end(&mut said).unwrap();
        let (told, id) = said.split_first().unwrap();
        assert_eq!((*told, id.len()), (0, 16));
        ids.push(id.try_into().unwrap());
    }
    std::fs::remove_dir_all(&directory).unwrap();
    let [first, second, third] = ids[..] else {
        panic!("{ids:?}");
    };
    assert!(
        first != second && second != third && first != third,
        "{ids:x?}"
    );
}

#[test]
fn a_guest_of_a_baseline_is_shown_that_and_no_more() {
    let code = [
        asm::say_cpuid(1, 1),
        asm::say_cpuid(7, 3),
        asm::say_cpuid(0xd, 0),
        asm::say_cpuid(0x8000_0008, 0),
        asm::power_off(),
    ];
    let kernel = Temporary::new("baseline", &kernel(&code.concat()));
    let mut config = config(&kernel, 2);
    config.cpu = CpuBaseline::V2;
    let (console, mut output) = silent();
    let mut machine = machine(&config, console, &StopHandle::new().unwrap());
    assert_eq!(machine.run().unwrap(), Exit::PoweredOff);
    drop(machine);
    let mut said = Vec::new();
    output.read_to_end(&mut said).unwrap();
    let said: Vec<u32> = said
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    // SSE3, SSSE3, CX16, SSE4.1, SSE4.2, x2APIC, POPCNT, TSC deadline, hypervisor; TSC_ADJUST; no
    // XSAVE; 39 and 48 bits.
    let bits = [0, 9, 13, 19, 20, 21, 23, 24, 31];
    let features = bits.iter().fold(0_u32, |all, bit| all | 1 << bit);
    assert_eq!(said, [features, 2, 0, 0x3027], "{said:x?}");
}
