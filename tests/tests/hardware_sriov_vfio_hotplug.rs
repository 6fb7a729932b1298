//! Virtual functions of the SR-IOV rig that are plugged and unplugged by VFIO while the guest runs,
//! and that the host takes back under traffic.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod guest_nics;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use guest_nics::wait_nics;
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice, VirtualFunction};
use lab::temp_path::TempPath;
use lab::traffic::exchange_both_ways;
use lab::vmm_process::cost;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

/// Far longer than a boot or an ejection takes: a watchdog, not a measurement.
const SILENCE: Duration = Duration::from_secs(120);

/// The VMM ejects a function that the guest does not eject after 10 s.
const FORCED: Duration = Duration::from_secs(12);

const PAGE: u64 = 4096;
const MEMORY_KIB: u64 = 128 << 10;

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

/// A guest, its API, and its peer on a vDPA device of the same switch.
struct Scene<'nic> {
    client: Client,
    guest: Guest,
    peer: Guest,
    other: String,
    device: VfDevice<'nic>,
    _socket: TempPath,
}

impl<'nic> Scene<'nic> {
    fn start(arguments: BellhopArguments, peer: VirtualFunction<'nic>) -> Self {
        let device = VfDevice::add(peer).unwrap();
        let socket = TempPath::new("vfio.socket");
        let arguments = arguments.argument("--api-socket", socket.text());
        Self {
            client: Client::new(socket.path()),
            guest: Guest::start(&arguments).unwrap(),
            peer: Guest::start(&small().vdpa(device.path())).unwrap(),
            other: device.function().mac(),
            device,
            _socket: socket,
        }
    }

    /// Small and full frames, from each guest to the other.
    #[track_caller]
    fn talk(&mut self, mac: &str) {
        exchange_both_ways(&mut self.guest, &mut self.peer, [mac, &self.other]).unwrap();
    }

    fn flood(&mut self) {
        self.peer.command("echo-on").unwrap();
        let flood = format!("flood-on 300 16 eth0 to {}", self.other);
        self.guest.command(&flood).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }

    /// Ends a flood whose NIC may be gone. Returns how many frames came back.
    fn flood_ends(&mut self) -> u64 {
        let flooded = self.guest.command("flood-off").unwrap();
        for wrong in ["corrupt", "duplicate"] {
            assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
        }
        self.peer.command("echo-off").unwrap();
        let returned = flooded["rx"].as_u64().unwrap();
        assert!(returned > 0, "{flooded}");
        returned
    }

    /// Accesses to BARs of the function `vf` that exited.
    fn trapped(&self) -> u64 {
        let shown = self.client.get("/v1/vm/vfio/vf").unwrap();
        let count = |name: &str| shown["function"][name].as_u64().unwrap();
        count("trapped_reads") + count("trapped_writes")
    }

    /// A request that is refused with this status.
    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: &Value, status: u16) -> String {
        let answer = self.client.ask(method, path, Some(body)).unwrap();
        let text = answer.body.to_string();
        assert_eq!(answer.status, status, "{method} {path}: {text}");
        text
    }

    fn unplug(&self, id: &str) {
        let path = format!("/v1/vm/vfio/{id}");
        let asked = self.client.done("DELETE", &path, None).unwrap();
        assert_eq!(asked["state"], "UnplugRequested", "{asked}");
        self.is_gone(id);
    }

    #[track_caller]
    fn is_gone(&self, id: &str) {
        let begin = Instant::now();
        let path = format!("/v1/vm/vfio/{id}");
        while self.client.ask("GET", &path, None).unwrap().status != 404 {
            assert!(begin.elapsed() < SILENCE, "{}", self.guest.console());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The host removes all virtual functions, and waits for each.
    #[track_caller]
    fn ends_without_functions(mut self, one: &VirtualFunction<'_>, ids: &[&str]) {
        let control = format!("/sys/bus/pci/devices/{}/physfn/sriov_numvfs", one.address());
        let begin = Instant::now();
        fs::write(control, "0").unwrap();
        println!("no virtual functions after {:?}", begin.elapsed());
        assert!(begin.elapsed() < FORCED, "{:?}", begin.elapsed());
        for id in ids {
            self.is_gone(id);
        }
        wait_nics(&mut self.guest, &[]);
        self.guest.command("flood-off").unwrap();
        assert!(!self.guest.console().contains("ERROR"));
        assert_eq!(pinned_kib(&self.guest), 0);
        assert!(self.guest.power_off().unwrap().success());
        drop(self.peer);
        // It is gone, with its function.
        std::mem::forget(self.device);
    }

    fn power_off(self) {
        assert!(self.guest.power_off().unwrap().success());
        assert!(self.peer.power_off().unwrap().success());
    }
}

fn bind(function: &VirtualFunction<'_>) {
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind("vfio-pci").unwrap();
}

/// The memory that is pinned for the guest's function, in KiB.
fn pinned_kib(guest: &Guest) -> u64 {
    cost(guest.pid()).unwrap().pinned_kib
}

/// Sets RLIMIT_MEMLOCK of the machine's process, in bytes; `None` means no limit.
fn limit_locked_memory(guest: &Guest, bytes: Option<u64>) {
    let pid = Pid::from_raw(guest.pid().try_into().unwrap()).unwrap();
    let limit = Rlimit {
        current: bytes,
        maximum: None,
    };
    prlimit(Some(pid), Resource::Memlock, limit).unwrap();
}

/// Confined, so that the filters and Landlock are complete.
#[test]
fn a_confined_vm_gets_and_returns_a_function_by_request() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    let mac = function.mac();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    let mut scene = Scene::start(small().argument("--sandbox", "on"), nic.vf(1).unwrap());
    wait_nics(&mut scene.guest, &[]);
    limit_locked_memory(&scene.guest, Some(1 << 20));
    let wanted = json!({"host": function.address()});
    let path = "/v1/vm/vfio/vf";

    // The error's command is the remedy.
    let error = scene.refused("PUT", path, &wanted, 422);
    let remedy = format!("bellhop bind pci/{} vfio-pci", function.address());
    assert!(error.contains(&remedy), "{error}");
    let words = remedy.split_whitespace().skip(1);
    output(Command::new(std::env::var("BELLHOP").unwrap()).args(words)).unwrap();
    // Nothing stays of an attempt that fails after the function was opened.
    let error = scene.refused("PUT", path, &wanted, 422);
    assert!(error.contains("LimitMEMLOCK="), "{error}");
    assert_eq!(pinned_kib(&scene.guest), 0);
    let before = cost(scene.guest.pid()).unwrap();
    scene.refused("PUT", path, &wanted, 422);
    let after = cost(scene.guest.pid()).unwrap();
    assert_eq!(after.descriptors, before.descriptors);
    limit_locked_memory(&scene.guest, None);

    let mut held = None;
    for cycle in 0..2 {
        let plugged = scene.client.done("PUT", path, Some(&wanted)).unwrap();
        assert_eq!(plugged["state"], "Plugged", "{plugged}");
        wait_nics(&mut scene.guest, &[&mac]);
        scene.talk(&mac);
        assert!(pinned_kib(&scene.guest) >= MEMORY_KIB);
        if cycle == 0 {
            is_shown(&scene, &function);
        }
        let trapped = scene.trapped();
        scene.flood();
        let trapped = scene.trapped() - trapped;
        scene.unplug("vf");
        let returned = scene.flood_ends();
        assert!(
            trapped * 20 < returned,
            "{trapped} exits, {returned} frames"
        );
        wait_nics(&mut scene.guest, &[]);
        assert_eq!(pinned_kib(&scene.guest), 0);
        let now = cost(scene.guest.pid()).unwrap();
        // Its workers end after a second without work.
        let held = held.get_or_insert(now.descriptors);
        assert_eq!(now.descriptors, *held, "cycle {cycle}");
    }
    // Without the function the machine can be saved, and the function is free.
    let snapshot = TempPath::new("vfio.snapshot");
    let body = json!({"path": snapshot.text()});
    scene
        .client
        .done("POST", "/v1/vm/snapshot", Some(&body))
        .unwrap();
    function.bind("virtio-pci").unwrap();
    scene.power_off();
}

/// All pages of the function's memory BARs but those of MSI-X, by the host's view: BAR, offset and
/// size.
fn mappable(function: &VirtualFunction<'_>) -> Vec<[u64; 3]> {
    let directory = Path::new("/sys/bus/pci/devices").join(function.address());
    let config = fs::read(directory.join("config")).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    let mut msix = usize::from(config[0x34]);
    while config[msix] != 0x11 {
        msix = usize::from(config[msix + 1]);
        assert_ne!(msix, 0, "no MSI-X");
    }
    let vectors = u64::from(u32_at(msix) >> 16 & 0x7ff) + 1;
    let holes = [
        (msix + 4, vectors * 16),
        (msix + 8, vectors.div_ceil(64) * 8),
    ];
    let holes = holes.map(|(register, len)| {
        let (place, offset) = (u32_at(register), u64::from(u32_at(register) & !7));
        (
            u64::from(place & 7),
            offset / PAGE,
            (offset + len).div_ceil(PAGE),
        )
    });
    let mut areas: Vec<[u64; 3]> = Vec::new();
    let resources = fs::read_to_string(directory.join("resource")).unwrap();
    for (bar, line) in (0..6).zip(resources.lines()) {
        let words = line
            .split(' ')
            .map(|word| u64::from_str_radix(&word[2..], 16));
        let words: Vec<u64> = words.map(Result::unwrap).collect();
        let [start, end, flags] = words[..] else {
            panic!("{line}");
        };
        // IORESOURCE_MEM
        let size = if flags & 0x200 == 0 {
            0
        } else {
            end + 1 - start
        };
        for page in 0..size / PAGE {
            if holes
                .iter()
                .any(|(at, first, end)| *at == bar && (*first..*end).contains(&page))
            {
                continue;
            }
            match areas.last_mut() {
                Some([at, offset, size]) if *at == bar && *offset + *size == page * PAGE => {
                    *size += PAGE;
                }
                _ => areas.push([bar, page * PAGE, PAGE]),
            }
        }
    }
    // More than one page, so that this proves sizes.
    assert!(areas.iter().any(|[.., size]| *size > PAGE), "{areas:?}");
    areas
}

/// The views of a plugged function, and the requests that it prevents.
#[track_caller]
fn is_shown(scene: &Scene<'_>, host: &VirtualFunction<'_>) {
    let shown = scene.client.get("/v1/vm/vfio/vf").unwrap();
    let function = &shown["function"];
    assert_eq!(function["driver"], "vfio-pci", "{shown}");
    assert!(function["connected_vectors"].as_u64() >= Some(2), "{shown}");
    let areas = function["areas"].as_array().unwrap();
    let number = |area: &Value, name: &str| area[name].as_u64().unwrap();
    let mapped = areas.iter().map(|area| {
        // Its BAR's place in the guest, the same for all areas of the BAR.
        assert_eq!(number(area, "address") % PAGE, 0, "{shown}");
        ["bar", "offset", "size"].map(|name| number(area, name))
    });
    let mapped: Vec<[u64; 3]> = mapped.collect();
    assert_eq!(mapped, mappable(host), "{shown}");
    assert_eq!(
        (&function["failed"], &function["faults"]),
        (&json!(false), &json!(0))
    );
    let config = scene.client.get("/v1/vm/config").unwrap();
    let same = &config["vfio"][0];
    assert_eq!(
        scene
            .client
            .ask("PUT", "/v1/vm/vfio/vf", Some(same))
            .unwrap()
            .status,
        200
    );
    let other = json!({"host": "0000:00:1f.0"});
    scene.refused("PUT", "/v1/vm/vfio/vf", &other, 409);
    let metrics = scene.client.get("/v1/metrics").unwrap();
    let metrics = metrics.as_str().unwrap();
    for line in [
        "bellhop_vfio_plugged{function=\"vf\"} 1",
        "bellhop_vfio_total{function=\"vf\",what=\"errors\"} 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let body = json!({"path": "/tmp/vfio-refused"});
    let error = scene.refused("POST", "/v1/vm/snapshot", &body, 409);
    assert!(error.contains("DELETE /v1/vm/vfio/vf"), "{error}");
}

#[test]
fn two_functions_pin_memory_once_and_leave_with_all_virtual_functions() {
    let nic = SriovNic::enable(3).unwrap();
    let (first, second) = (nic.vf(0).unwrap(), nic.vf(1).unwrap());
    bind(&first);
    bind(&second);
    let device = format!("path=/sys/bus/pci/devices/{},id=first", first.address());
    let mut scene = Scene::start(small().argument("--device", &device), nic.vf(2).unwrap());
    let once = pinned_kib(&scene.guest);
    assert!(once >= MEMORY_KIB);
    let wanted = json!({"host": second.address()});
    scene
        .client
        .done("PUT", "/v1/vm/vfio/second", Some(&wanted))
        .unwrap();
    wait_nics(&mut scene.guest, &[&first.mac(), &second.mac()]);
    assert_eq!(pinned_kib(&scene.guest), once);
    scene.talk(&first.mac());
    // The first one goes and comes while the second one keeps the memory.
    scene.unplug("first");
    assert_eq!(pinned_kib(&scene.guest), once);
    let wanted = json!({"host": first.address()});
    scene
        .client
        .done("PUT", "/v1/vm/vfio/first", Some(&wanted))
        .unwrap();
    wait_nics(&mut scene.guest, &[&first.mac(), &second.mac()]);
    scene.talk(&first.mac());

    scene.flood();
    scene.ends_without_functions(&first, &["first", "second"]);
}

/// In a container, as on a host without iommufd.
#[test]
fn a_function_leaves_its_container_while_another_one_stays() {
    let nic = SriovNic::enable(3).unwrap();
    let (first, second) = (nic.vf(0).unwrap(), nic.vf(1).unwrap());
    bind(&first);
    bind(&second);
    let vfio = format!("host={},id=first,iommufd=off", first.address());
    let mut scene = Scene::start(small().argument("--vfio", &vfio), nic.vf(2).unwrap());
    let once = pinned_kib(&scene.guest);
    assert!(once >= MEMORY_KIB);
    let plug = |scene: &Scene<'_>, id: &str, function: &VirtualFunction<'_>| {
        let wanted = json!({"host": function.address(), "iommufd": false});
        let path = format!("/v1/vm/vfio/{id}");
        scene.client.done("PUT", &path, Some(&wanted)).unwrap();
    };
    plug(&scene, "second", &second);
    let both = [first.mac(), second.mac()];
    let both = both.each_ref().map(String::as_str);
    wait_nics(&mut scene.guest, &both);
    for _ in 0..2 {
        scene.unplug("first");
        assert_eq!(pinned_kib(&scene.guest), once);
        // Another process gets the group, and another driver the function.
        let group = format!("/sys/bus/pci/devices/{}/iommu_group", first.address());
        let group = fs::read_link(group).unwrap();
        let file = Path::new("/dev/vfio").join(group.file_name().unwrap());
        drop(File::options().read(true).write(true).open(file).unwrap());
        first.bind("virtio-pci").unwrap();
        first.bind("vfio-pci").unwrap();
        plug(&scene, "first", &first);
        wait_nics(&mut scene.guest, &both);
        scene.talk(&first.mac());
    }
    // Memory is mapped again after the last one.
    scene.unplug("first");
    scene.unplug("second");
    assert_eq!(pinned_kib(&scene.guest), 0);
    plug(&scene, "second", &second);
    wait_nics(&mut scene.guest, &[&second.mac()]);
    scene.talk(&second.mac());
    scene.flood();
    scene.ends_without_functions(&second, &["second"]);
}

#[test]
fn a_guest_that_does_not_eject_a_function_loses_it() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    // A guest without a hot-plug driver.
    let arguments = small().cmdline("acpiphp.disable=1");
    let vfio = format!("host={},id=vf", function.address());
    let mut scene = Scene::start(arguments.argument("--vfio", &vfio), nic.vf(1).unwrap());
    scene.talk(&function.mac());
    scene.flood();
    let begin = Instant::now();
    function.bind("virtio-pci").unwrap();
    let elapsed = begin.elapsed();
    println!("bound to another driver after {elapsed:?}");
    assert!(
        elapsed > Duration::from_secs(9) && elapsed < FORCED,
        "{elapsed:?}"
    );
    scene.is_gone("vf");
    assert_eq!(pinned_kib(&scene.guest), 0);
    // The guest continues without its NIC. Only a shutdown by its virtio driver would wait for it.
    scene.guest.command("now").unwrap();
    let stop = json!({"state": "Stopped"});
    scene.client.done("PATCH", "/v1/vm", Some(&stop)).unwrap();
    assert!(scene.guest.wait_exit(SILENCE).unwrap().success());
    assert!(scene.peer.power_off().unwrap().success());
}

#[test]
fn a_function_survives_ten_reboots() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let vfio = format!("host={},id=vf", function.address());
    let mut scene = Scene::start(small().argument("--vfio", &vfio), nic.vf(1).unwrap());
    let account = |guest: &Guest| {
        let now = cost(guest.pid()).unwrap();
        (
            now.descriptors,
            now.threads,
            now.mappings,
            pinned_kib(guest),
        )
    };
    scene.talk(&function.mac());
    let mut before = None;
    for reboot in 1..=10 {
        scene.guest.command("reboot").unwrap();
        scene.guest.wait_ready(SILENCE).unwrap();
        scene.talk(&function.mac());
        let before = *before.get_or_insert_with(|| account(&scene.guest));
        assert_eq!(account(&scene.guest), before, "reboot {reboot}");
    }
    let shown = scene.client.get("/v1/vm/vfio/vf").unwrap();
    assert_eq!(shown["function"]["failures"], 0, "{shown}");
    scene.power_off();
    function.bind("virtio-pci").unwrap();
}
