//! A virtual function of the SR-IOV rig, passed through to a guest by VFIO. The peer is a guest on
//! a vDPA device of the same switch. Functions are opened through iommufd, except where a test says
//! otherwise.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice, VirtualFunction};
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_both_ways, exchange_from};
use lab::vmm_process::cost;
use serde_json::json;

/// Far longer than a boot takes: a watchdog, not a measurement.
const SILENCE: Duration = Duration::from_secs(120);

const MEMORY_MIB: u64 = 256;

fn bind(function: &VirtualFunction<'_>) {
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind("vfio-pci").unwrap();
}

fn stock(function: &VirtualFunction<'_>) -> BellhopArguments {
    BellhopArguments::stock()
        .unwrap()
        .memory(&format!("{MEMORY_MIB}M"))
        .argument("--vfio", &format!("host={},id=vf", function.address()))
}

#[test]
fn a_stock_guest_drives_a_function_by_vfio_across_rebinds() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let device = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let socket = TempPath::new("vfio.socket");
    let arguments = stock(&function).argument("--api-socket", socket.text());
    let mut guest = Guest::start(&arguments).unwrap();
    let ready = guest.ready();
    assert_eq!(ready["problems"], json!([]));
    assert_eq!(ready["nics"][0]["mac"], mac);
    assert_eq!(ready["nics"][0]["driver"], "virtio_net");
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&arguments.vdpa(device.path())).unwrap();
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();

    // The driver releases the function and takes it again, under traffic.
    peer.command("echo-on").unwrap();
    guest
        .command(&format!("flood-on 300 16 eth0 to {other}"))
        .unwrap();
    let rebound = guest.command("rebind-flooded 3 200").unwrap();
    assert_eq!(rebound["rebinds"], 3, "{rebound}");
    let flooded = guest.command("flood-off").unwrap();
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
    }
    assert!(flooded["rx"].as_u64() >= Some(600), "{flooded}");
    peer.command("echo-off").unwrap();

    // The guest resets the function while it has no driver.
    let client = Client::new(socket.path());
    let resets = || {
        let shown = client.get("/v1/vm/vfio/vf").unwrap();
        shown["function"]["resets"].as_u64().unwrap()
    };
    let before = resets();
    let reset = guest.command("reset-function").unwrap();
    let methods = reset["methods"].as_str().unwrap_or_default();
    assert!(methods.starts_with("flr"), "{reset}");
    assert_eq!(resets(), before + 1);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();

    // What the machine cannot do with it, with the device's name.
    let program = std::env::var("BELLHOP").unwrap();
    let nowhere = json!({"send": {"destination": "unix:/tmp/vfio-nowhere"}});
    for (path, body) in [
        ("/v1/vm/snapshot", json!({"path": "/tmp/vfio-snapshot"})),
        ("/v1/vm/upgrade", json!({"program": program})),
        ("/v1/vm/migration", nowhere),
    ] {
        let answer = client.ask("POST", path, Some(&body)).unwrap();
        let text = format!("{path}: {} {}", answer.status, answer.body);
        assert!(
            answer.status == 409 && text.contains("VFIO device vf"),
            "{text}"
        );
    }
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();

    // A killed process leaves the function to the next one.
    let message = refused(&format!("host={}", function.address()));
    assert!(message.contains("in use"), "{message}");
    drop(guest);
    let mut guest = Guest::start(&stock(&function)).unwrap();
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
    function.bind("virtio-pci").unwrap();
}

#[test]
fn a_function_and_a_vdpa_nic_of_one_card_are_in_one_vm() {
    let nic = SriovNic::enable(3).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let own = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    let device = VfDevice::add(nic.vf(2).unwrap()).unwrap();
    let small = || BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small().vdpa(device.path())).unwrap();
    let vfio = format!("host={},id=vf", function.address());
    let arguments = small().vdpa(own.path()).argument("--vfio", &vfio);
    let mut guest = Guest::start(&arguments).unwrap();
    let ready = guest.ready().clone();
    assert_eq!(ready["problems"], json!([]));
    let nics = ready["nics"].as_array().unwrap();
    assert_eq!(nics.len(), 2, "{ready}");
    for mac in [function.mac(), own.function().mac()] {
        let same = nics.iter().find(|nic| nic["mac"] == mac.as_str());
        let name = same.and_then(|nic| nic["name"].as_str()).unwrap();
        guest.command(&format!("up {name}")).unwrap();
        for (count, size, window) in [(500, 64, 32), (200, 1514, 8)] {
            let frames = Frames {
                count,
                size,
                window,
            };
            let to = device.function().mac();
            exchange_from(&mut guest, name, &mut peer, &to, frames).unwrap();
        }
    }
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
    function.bind("virtio-pci").unwrap();
}

/// The small kernel: `hardware_sriov_vfio_igb` reboots Debian's. The function is in a container.
#[test]
fn a_guest_drives_a_function_by_vfio_across_reboots() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let device = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let small = || BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small().vdpa(device.path())).unwrap();
    let vfio = format!("host={},iommufd=off", function.address());
    let mut guest = Guest::start(&small().argument("--vfio", &vfio)).unwrap();
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    let before = cost(guest.pid()).unwrap();
    for ending in ["reboot", "panic"] {
        guest.command(ending).unwrap();
        let ready = guest.wait_ready(SILENCE).unwrap();
        assert_eq!(ready["nics"][0]["mac"], mac, "after {ending}");
        exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    }
    let after = cost(guest.pid()).unwrap();
    assert_eq!(
        (after.descriptors, after.threads),
        (before.descriptors, before.threads)
    );
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
    function.bind("virtio-pci").unwrap();
}

#[test]
fn a_function_that_the_host_takes_back_is_ejected() {
    let nic = SriovNic::enable(1).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let mut guest = Guest::start(&stock(&function)).unwrap();
    assert!(cost(guest.pid()).unwrap().pinned_kib >= MEMORY_MIB << 10);
    // The kernel waits until the VM has closed the function.
    let begin = Instant::now();
    function.bind("virtio-pci").unwrap();
    assert!(begin.elapsed() < SILENCE, "{:?}", begin.elapsed());
    let shown = guest.command("link").unwrap();
    assert_eq!(shown["nics"], json!([]), "{shown}");
    assert_eq!(cost(guest.pid()).unwrap().pinned_kib, 0);
    assert!(guest.power_off().unwrap().success());
}

/// Opens a file that `bellhop run` inherits.
fn inheritable(path: &Path) -> File {
    let file = File::options().read(true).write(true).open(path).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    file
}

/// Opens a function's own file.
fn own_file(function: &VirtualFunction<'_>) -> File {
    let directory = Path::new("/sys/bus/pci/devices").join(function.address());
    let entries = fs::read_dir(directory.join("vfio-dev")).unwrap();
    let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    let [name] = &names[..] else {
        panic!("{names:?}");
    };
    inheritable(&Path::new("/dev/vfio/devices").join(name))
}

#[test]
fn a_function_comes_as_an_inherited_descriptor() {
    let nic = SriovNic::enable(2).unwrap();
    let function = nic.vf(0).unwrap();
    bind(&function);
    let device = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let small = || BellhopArguments::small().unwrap().memory("128M");
    // Before this process has a file that the peer would inherit.
    let mut peer = Guest::start(&small().vdpa(device.path())).unwrap();

    // Wrong descriptors.
    let refused = |file: &File| {
        let fd = format!("fd={}", file.as_raw_fd());
        small().argument("--vfio", &fd).refused().unwrap()
    };
    let group = Path::new("/sys/bus/pci/devices")
        .join(function.address())
        .join("iommu_group");
    let group = fs::read_link(group).unwrap();
    let group = Path::new("/dev/vfio").join(group.file_name().unwrap());
    for path in [Path::new("/dev/null"), &group] {
        let file = inheritable(path);
        let message = refused(&file);
        let words = format!("{} is not a device file of VFIO", path.display());
        assert!(message.contains(&words), "{message}");
        assert!(message.contains("/dev/vfio/devices/vfioN"), "{message}");
    }
    let file = own_file(&function);
    let message = small().argument("--vfio", "fd=1").refused().unwrap();
    assert!(message.contains("begin at 3"), "{message}");

    let socket = TempPath::new("vfio.socket");
    let options = format!("fd={}", file.as_raw_fd());
    let arguments = small()
        .argument("--vfio", &options)
        .argument("--api-socket", socket.text());
    let mut guest = Guest::start(&arguments).unwrap();
    // Now only the VMM has it open.
    drop(file);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    // The address is the one of the file.
    let config = Client::new(socket.path()).get("/v1/vm/config").unwrap();
    let shown = &config["vfio"][0];
    assert_eq!(shown["host"], function.address(), "{config}");
    assert_eq!(shown["id"], function.address(), "{config}");
    assert_eq!(shown["fd"], json!(null), "{config}");
    // The file is bound to the first VM.
    let message = refused(&own_file(&function));
    assert!(message.contains("in use"), "{message}");
    guest.command("reboot").unwrap();
    let ready = guest.wait_ready(SILENCE).unwrap();
    assert_eq!(ready["nics"][0]["mac"], mac);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    // The host takes the function back: no descriptor is left in the VM.
    function.bind("virtio-pci").unwrap();
    let shown = guest.command("link").unwrap();
    assert_eq!(shown["nics"], json!([]), "{shown}");
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

/// The error of `bellhop run` for a function that it cannot use.
#[track_caller]
fn refused(options: &str) -> String {
    let arguments = BellhopArguments::small().unwrap();
    arguments.argument("--vfio", options).refused().unwrap()
}

#[test]
fn functions_that_cannot_be_passed_through_are_refused_with_the_remedy() {
    let nic = SriovNic::enable(1).unwrap();
    let function = nic.vf(0).unwrap();
    let host = format!("host={}", function.address());
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    let message = refused(&host);
    let remedy = format!("bellhop bind pci/{} vfio-pci", function.address());
    for part in ["driver virtio-pci", &remedy] {
        assert!(message.contains(part), "{message}");
    }
    let physical = Path::new("/sys/bus/pci/devices")
        .join(function.address())
        .join("physfn");
    let message = refused(&format!("path={}", physical.display()));
    assert!(message.contains("allow_pf=on"), "{message}");
    let message = refused("host=0000:ff:1f.7");
    assert!(message.contains("lspci -D"), "{message}");
    // Twice in one VM.
    bind(&function);
    let twice = stock(&function).argument("--vfio", &format!("{host},id=again"));
    let message = twice.refused().unwrap();
    assert!(message.contains("VFIO device again"), "{message}");
    assert!(message.contains("already"), "{message}");
    function.bind("virtio-pci").unwrap();

    // The chipset's functions share a group, and the host drives one of them.
    output(Command::new("modprobe").arg("ahci")).unwrap();
    let pci = Path::new("/sys/bus/pci");
    let driven = names(&pci.join("drivers/ahci"));
    let driven = driven
        .iter()
        .find(|name| name.starts_with("0000:"))
        .unwrap();
    let group = names(&pci.join("devices").join(driven).join("iommu_group/devices"));
    let beside = group.iter().find(|name| *name != driven).unwrap();
    let directory = pci.join("devices").join(beside);
    assert!(!directory.join("driver").exists(), "{beside} has a driver");
    fs::write(directory.join("driver_override"), "vfio-pci\n").unwrap();
    fs::write(pci.join("drivers_probe"), beside).unwrap();
    let message = refused(&format!("host={beside},allow_pf=on"));
    fs::write(directory.join("driver/unbind"), beside).unwrap();
    fs::write(directory.join("driver_override"), "\n").unwrap();
    let remedy = format!("bellhop bind pci/{driven} vfio-pci");
    for part in ["IOMMU group", &remedy] {
        assert!(message.contains(part), "{message}");
    }
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap();
    names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}
