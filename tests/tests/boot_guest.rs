//! Boot, processors, memory, and every way in which a guest ends or restarts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod crash_kernel;

use crash_kernel::CrashKernel;
use lab::guest::{BellhopArguments, CRASHED, Guest};
use lab::notice;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{Frames, exchange_counted};
use std::path::Path;
use std::time::Duration;

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:53:01";

/// How long a console may be silent while a guest boots; generous, because the lab may be emulated.
const SILENCE: Duration = Duration::from_secs(120);

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Boots with a NIC, checks the guest's view, sends frames, and powers off. The guest ends before
/// its NIC's device is removed: the kernel waits until the VMM has closed the device.
fn boots(arguments: BellhopArguments, processors: u32, check: fn(&mut Guest)) {
    let net = SimDevice::net("boot", MAC, 1400).unwrap();
    let arguments = arguments
        .processors(processors)
        .memory("256M")
        .silence(SILENCE)
        .vdpa(net.path());
    let mut guest = Guest::start(&arguments).unwrap();

    let ready = guest.ready();
    assert_eq!(ready["problems"], serde_json::json!([]));
    assert_eq!(ready["cpus_online"], processors);
    // The kernel keeps a part for itself.
    let memory = ready["memory_kib"].as_u64().unwrap();
    assert!((200 << 10..=256 << 10).contains(&memory), "{memory} KiB");
    let nic = &ready["nics"][0];
    assert_eq!(nic["name"], "eth0");
    assert_eq!(nic["mac"], MAC);
    assert_eq!(nic["mtu"], 1400);
    assert_eq!(nic["driver"], "virtio_net");
    check_topology(&mut guest, processors);

    let frames = Frames {
        count: 1000,
        size: 256,
        window: 32,
    };
    exchange_counted(&mut guest, "eth0", &net, &[frames]).unwrap();
    check(&mut guest);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// One package with as many cores as there are vCPUs, one thread each.
fn check_topology(guest: &mut Guest, processors: u32) {
    let seen = guest.command("processors").unwrap();
    assert_eq!(seen["online"], processors, "{seen}");
    assert_eq!(seen["listed"], processors, "{seen}");
    assert_eq!(seen["packages"], 1, "{seen}");
    assert_eq!(seen["cores"], processors, "{seen}");
    assert_eq!(seen["thread_groups"], processors, "{seen}");
    assert_eq!(seen["tsc_deadline_timer"], true, "{seen}");
    assert_eq!(seen["hypervisor"], true, "{seen}");
}

#[test]
fn the_small_kernel_boots_with_1_processor_and_has_random_numbers() {
    boots(BellhopArguments::small().unwrap(), 1, has_random_numbers);
}

/// With the oldest baseline, which has no XSAVE.
#[test]
fn the_small_kernel_boots_with_2_processors_of_x86_64_v2() {
    let arguments = BellhopArguments::small().unwrap();
    boots(arguments.argument("--cpu", "x86-64-v2"), 2, |guest| {
        let seen = guest.command("processors").unwrap();
        assert_eq!(seen["sse4_2"], true, "{seen}");
        assert_eq!(seen["xsave"], false, "{seen}");
    });
}

#[test]
fn the_small_kernel_boots_with_4_processors() {
    boots(BellhopArguments::small().unwrap(), 4, |_| {});
}

#[test]
fn the_stock_kernel_boots_and_reboots_with_2_processors() {
    boots(BellhopArguments::stock().unwrap(), 2, boots_again);
}

/// More than the host has. Not the 32 that a machine can have: while that many come up, nested
/// emulation loses one too often (a triple fault, or a hang).
#[test]
fn many_processors_come_up() {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(8)
        .memory("128M");
    let mut guest = Guest::start(&arguments.silence(SILENCE)).unwrap();
    check_topology(&mut guest, 8);
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

#[test]
fn memory_above_the_hole_below_4_gib_is_usable() {
    let arguments = BellhopArguments::small().unwrap().memory("3600M");
    let mut guest = Guest::start(&arguments).unwrap();
    let memory = guest.ready()["memory_kib"].as_u64().unwrap();
    assert!((3400 << 10..=3600 << 10).contains(&memory), "{memory} KiB");

    let checked = guest.command("memory-check 64").unwrap();
    assert_eq!(checked["wrong_mib"], 0, "{checked}");
    let above = checked["taken_above_4gib_kib"].as_u64().unwrap();
    // Free lists of each processor blur the count a little.
    assert!(above >= 60 << 10, "{checked}");
    let ends: Vec<u64> = checked["ram"]
        .as_array()
        .unwrap()
        .iter()
        .map(|range| range[1].as_u64().unwrap())
        .collect();
    // 3 GiB below the hole, the rest from 4 GiB on; the last byte counts.
    assert!(ends.contains(&(3 * GIB - 1)), "{checked}");
    assert_eq!(
        ends.last(),
        Some(&(4 * GIB + (3600 * MIB - 3 * GIB) - 1)),
        "{checked}"
    );
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// One process boots three times: after a reboot and after a panic. The number of its processors is
/// not a power of two.
#[test]
fn a_reboot_and_a_panic_boot_again_in_the_same_process() {
    let net = SimDevice::net("again", MAC, 1500).unwrap();
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(3)
        .memory("128M");
    let mut guest = Guest::start(&arguments.vdpa(net.path())).unwrap();
    check_topology(&mut guest, 3);
    for ending in ["reboot", "panic"] {
        guest.command(ending).unwrap();
        let ready = guest.wait_ready(SILENCE).unwrap();
        assert_eq!(ready["cpus_online"], 3, "after {ending}");
        assert_eq!(ready["nics"][0]["mac"], MAC, "after {ending}");
        let frames = Frames {
            count: 100,
            size: 256,
            window: 8,
        };
        exchange_counted(&mut guest, "eth0", &net, &[frames]).unwrap();
    }
    assert!(guest.console().contains("Kernel panic"));
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// The guest reboots. Linux with support for EFI uses the reset vector.
fn boots_again(guest: &mut Guest) {
    guest.command("reboot").unwrap();
    let ready = guest.wait_ready(SILENCE).unwrap();
    assert_eq!(ready["nics"][0]["mac"], MAC);
}

/// The random number generator works.
fn has_random_numbers(guest: &mut Guest) {
    let hwrng = guest.ready()["hwrng"].as_str().unwrap_or_default();
    assert!(hwrng.starts_with("virtio_rng"), "{hwrng:?}");
    let answer = guest.command("rng 4096").unwrap();
    assert_eq!(answer["bytes"], 4096, "{answer}");
    // 4096 random bytes have nearly all of the 256 values.
    assert!(answer["distinct"].as_u64().unwrap() > 200, "{answer}");
}

#[test]
fn a_triple_fault_ends_with_exit_code_3_and_a_sentence() {
    require_lab().unwrap();
    let kernel = CrashKernel::at_once();
    let arguments = BellhopArguments::small().unwrap().kernel(kernel.path());
    let (status, console) = Guest::run_to_end(&arguments, Duration::from_secs(60)).unwrap();
    assert_eq!(status.code(), Some(CRASHED), "{console}");
    let line = console.lines().last().unwrap_or_default();
    assert!(
        line.starts_with("error: the guest crashed: vCPU 0") && line.contains("triple-faulted"),
        "{console}"
    );
    // For a report of the crash. On AMD processors the guest's registers are lost.
    assert!(
        console.contains("vcpu0 registers: rip=0x") && console.contains(" cr3=0x"),
        "{console}"
    );
}

#[test]
fn huge_pages_back_the_memory_or_are_missed_clearly() {
    const PAGES: u64 = 140;
    require_lab().unwrap();
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("size=256M,hugepages=2M");
    let none = HugePages::reserve(0);
    let (status, said) = Guest::run_to_end(&arguments, Duration::from_secs(60)).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("too few free huge pages"), "{said}");
    assert!(said.contains("the guest needs 128 of 2 MiB"), "{said}");
    drop(none);

    let _reserved = HugePages::reserve(PAGES);
    let net = SimDevice::net("huge", MAC, 1500).unwrap();
    let mut guest = Guest::start(&arguments.vdpa(net.path())).unwrap();
    assert!(HugePages::free() < PAGES);
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid())).unwrap();
    let ram = smaps.split_once("memfd:guest-ram").unwrap().1;
    let size = ram
        .lines()
        .find(|line| line.starts_with("KernelPageSize"))
        .unwrap();
    assert!(size.contains("2048 kB"), "{size}");
    let frames = Frames {
        count: 100,
        size: 1514,
        window: 8,
    };
    exchange_counted(&mut guest, "eth0", &net, &[frames]).unwrap();
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
    assert_eq!(HugePages::free(), PAGES, "the VMM's pages are free again");
}

/// Huge pages of 2 MiB that the host has reserved; dropping it releases them.
struct HugePages;

impl HugePages {
    const DIRECTORY: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

    fn reserve(count: u64) -> Self {
        let file = Path::new(Self::DIRECTORY).join("nr_hugepages");
        let guard = Self;
        std::fs::write(&file, count.to_string()).unwrap();
        let now = std::fs::read_to_string(&file).unwrap();
        assert_eq!(now.trim(), count.to_string(), "the host lacks free memory");
        guard
    }

    fn free() -> u64 {
        let file = Path::new(Self::DIRECTORY).join("free_hugepages");
        std::fs::read_to_string(file)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let file = Path::new(Self::DIRECTORY).join("nr_hugepages");
        notice::left_behind(lab::files::write(&file, "0"));
    }
}
