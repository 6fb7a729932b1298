//! A virtual function of an igb NIC, passed through to a stock guest by VFIO. Its driver, igbvf,
//! uses a mailbox to the physical function, which the host drives. The function is in a container
//! or an iommufd. The peer is a guest on a vDPA device of the same switch. One test passes the
//! physical function through.

mod guest_nics;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use guest_nics::wait_nics;
use lab::api::Client;
use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::igb::IgbNic;
use lab::notice::{Kind, notice};
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice, VirtualFunction};
use lab::temp_path::TempPath;
use lab::traffic::exchange_both_ways;
use lab::vmm_process::cost;
use serde_json::{Value, json};

/// Far longer than a boot takes: a watchdog, not a measurement.
const SILENCE: Duration = Duration::from_secs(120);

/// The VMM ejects a function that the guest does not eject after 10 s.
const FORCED: Duration = Duration::from_secs(12);

/// A function that VFIO drives.
fn passed_through(igb: &IgbNic, index: usize) -> VirtualFunction<'_> {
    let function = igb.vf(index).unwrap();
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind("vfio-pci").unwrap();
    function
}

/// The peer, which the switch connects with the function.
fn peer_on(device: &VfDevice) -> Guest {
    let small = BellhopArguments::small().unwrap().memory("128M");
    Guest::start(&small.vdpa(device.path())).unwrap()
}

/// Gives a function to a driver.
#[track_caller]
fn bind(address: &str, driver: &str) {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    output(command.args(["bind", &format!("pci/{address}"), driver])).unwrap();
}

/// Whether a guest has reset its function by FLR.
fn is_flr(reset: &Value) -> bool {
    let methods = reset["methods"].as_str();
    methods.is_some_and(|methods| methods.starts_with("flr"))
}

/// Starts a flood of the guest, which the peer echoes.
fn flood(guest: &mut Guest, peer: &mut Guest, other: &str) {
    peer.command("echo-on").unwrap();
    let flood = format!("flood-on 300 16 eth0 to {other}");
    guest.command(&flood).unwrap();
    std::thread::sleep(Duration::from_millis(300));
}

#[test]
fn an_igb_nic_comes_and_goes_with_its_functions() {
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    for _ in 0..2 {
        let igb = IgbNic::plug(2).unwrap();
        for index in 0..2 {
            let function = igb.vf(index).unwrap();
            function.bind("vfio-pci").unwrap();
            let directory = Path::new("/sys/bus/pci/devices").join(function.address());
            let group = fs::read_dir(directory.join("iommu_group/devices")).unwrap();
            assert_eq!(group.count(), 1, "{}", function.address());
        }
        drop(igb);
        let left = fs::read_dir("/sys/bus/pci/drivers/igb").unwrap();
        let left = left.filter(|entry| entry.as_ref().unwrap().path().join("vendor").exists());
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn a_stock_guest_drives_an_igb_function_across_resets_and_its_removal() {
    let nic = SriovNic::enable(1).unwrap();
    let igb = IgbNic::plug(2).unwrap();
    let function = passed_through(&igb, 1);
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let mut peer = peer_on(&device);
    let vfio = format!("host={},id=vf,iommufd=off", function.address());
    let stock = BellhopArguments::stock().unwrap().memory("256M");
    let mut guest = Guest::start(&stock.argument("--vfio", &vfio)).unwrap();
    let ready = guest.ready();
    assert_eq!(ready["problems"], json!([]));
    assert_eq!(ready["nics"][0]["mac"], mac);
    assert_eq!(ready["nics"][0]["driver"], "igbvf");
    guest.command("up eth0").unwrap();
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();

    let before = cost(guest.pid()).unwrap();
    let reset = guest.command("reset-function").unwrap();
    assert!(is_flr(&reset), "{reset}");
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    let reboots = if soak() { 10 } else { 1 };
    if reboots == 1 {
        notice(Kind::Thinned, "igb: 1 reboot of 10");
    }
    for reboot in 1..=reboots {
        guest.command("reboot").unwrap();
        let ready = guest.wait_ready(SILENCE).unwrap();
        assert_eq!(ready["nics"][0]["mac"], mac, "reboot {reboot}");
        guest.command("up eth0").unwrap();
        exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
        let after = cost(guest.pid()).unwrap();
        assert_eq!(
            (after.descriptors, after.threads),
            (before.descriptors, before.threads),
            "reboot {reboot}"
        );
    }

    // The host removes all virtual functions under traffic.
    flood(&mut guest, &mut peer, &other);
    let control = format!(
        "/sys/bus/pci/devices/{}/physfn/sriov_numvfs",
        function.address()
    );
    let begin = Instant::now();
    fs::write(control, "0").unwrap();
    println!("no virtual functions after {:?}", begin.elapsed());
    assert!(begin.elapsed() < FORCED, "{:?}", begin.elapsed());
    wait_nics(&mut guest, &[]);
    let flooded = guest.command("flood-off").unwrap();
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
    }
    assert!(flooded["rx"].as_u64() > Some(0), "{flooded}");
    assert!(!guest.console().contains("ERROR"), "{}", guest.console());
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

/// The NIC has no virtual functions, and the guest controls all of it.
#[test]
fn a_stock_guest_drives_a_physical_function_that_is_allowed() {
    let nic = SriovNic::enable(1).unwrap();
    let igb = IgbNic::plug(0).unwrap();
    let physical = igb.physical();
    let mac = Path::new("/sys/class/net").join(igb.port()).join("address");
    let mac = fs::read_to_string(mac).unwrap();
    let mac = mac.trim();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let other = device.function().mac();
    let mut peer = peer_on(&device);
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    bind(physical, "vfio-pci");
    let host = format!("host={physical}");
    let stock = || BellhopArguments::stock().unwrap().memory("256M");
    let refused = stock().argument("--vfio", &host).refused().unwrap();
    assert!(refused.contains("allow_pf=on"), "{refused}");
    let vfio = format!("{host},allow_pf=on");
    let mut guest = Guest::start(&stock().argument("--vfio", &vfio)).unwrap();
    for boot in 0..2 {
        let ready = guest.ready();
        assert_eq!(ready["problems"], json!([]));
        let nic = &ready["nics"][0];
        assert_eq!((&nic["driver"], &nic["mac"]), (&json!("igb"), &json!(mac)));
        guest.command("up eth0").unwrap();
        exchange_both_ways(&mut guest, &mut peer, [mac, &other]).unwrap();
        let reset = guest.command("reset-function").unwrap();
        assert!(is_flr(&reset), "{reset}");
        exchange_both_ways(&mut guest, &mut peer, [mac, &other]).unwrap();
        if boot == 0 {
            guest.command("reboot").unwrap();
            guest.wait_ready(SILENCE).unwrap();
        }
    }
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
    // The host's driver can use it again.
    bind(physical, "igb");
}

/// Through iommufd.
#[test]
fn a_killed_vm_leaves_its_igb_function_to_the_next_one_which_unplugs_it() {
    let nic = SriovNic::enable(1).unwrap();
    let igb = IgbNic::plug(1).unwrap();
    let function = passed_through(&igb, 0);
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let (mac, other) = (function.mac(), device.function().mac());
    let mut peer = peer_on(&device);
    let socket = TempPath::new("igb.socket");
    let stock = BellhopArguments::stock().unwrap().memory("256M");
    let vfio = format!("host={},id=vf", function.address());
    let stock = stock.argument("--vfio", &vfio);
    let stock = stock.argument("--api-socket", socket.text());
    let mut guest = Guest::start(&stock).unwrap();
    guest.command("up eth0").unwrap();
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    flood(&mut guest, &mut peer, &other);
    // Dropping a guest kills its process.
    drop(guest);
    let echoed = peer.command("echo-off").unwrap();
    assert!(echoed["echoed"].as_u64() > Some(0), "{echoed}");

    let mut guest = Guest::start(&stock).unwrap();
    wait_nics(&mut guest, &[&mac]);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    let api = Client::new(socket.path());
    let path = "/v1/vm/vfio/vf";
    let asked = api.done("DELETE", path, None).unwrap();
    assert_eq!(asked["state"], "UnplugRequested", "{asked}");
    wait_nics(&mut guest, &[]);
    let begin = Instant::now();
    while api.ask("GET", path, None).unwrap().status != 404 {
        assert!(begin.elapsed() < SILENCE, "{}", guest.console());
        std::thread::sleep(Duration::from_millis(50));
    }
    let wanted = json!({"host": function.address()});
    let plugged = api.done("PUT", path, Some(&wanted)).unwrap();
    assert_eq!(plugged["state"], "Plugged", "{plugged}");
    wait_nics(&mut guest, &[&mac]);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    assert!(!guest.console().contains("ERROR"), "{}", guest.console());
    assert!(guest.power_off().unwrap().success());
    assert!(peer.power_off().unwrap().success());
}

/// Lets the root port report a completion timeout of the function: a `struct aer_error_inj` of
/// `drivers/pci/pcie/aer_inject.c`.
fn report_error(address: &str) {
    output(Command::new("modprobe").arg("aer_inject")).unwrap();
    let place: Vec<u8> = address
        .split([':', '.'])
        .map(|part| u8::from_str_radix(part, 16).unwrap())
        .collect();
    let [0, bus, device, function] = place[..] else {
        panic!("{address} is in another domain");
    };
    let mut error = [0; 32];
    error[..3].copy_from_slice(&[bus, device, function]);
    // The status of uncorrectable errors.
    error[4..8].copy_from_slice(&0x4000_u32.to_le_bytes());
    fs::write("/dev/aer_inject", error).unwrap();
}

#[test]
fn an_uncorrectable_error_is_an_alarm_until_the_function_is_reset() {
    let igb = IgbNic::plug(1).unwrap();
    let function = passed_through(&igb, 0);
    let socket = TempPath::new("igb-error.socket");
    let small = BellhopArguments::small().unwrap().memory("128M");
    let vfio = format!("host={},id=vf", function.address());
    let small = small.argument("--vfio", &vfio);
    let mut guest = Guest::start(&small.argument("--api-socket", socket.text())).unwrap();
    let api = Client::new(socket.path());
    let state = || {
        let shown = api.done("GET", "/v1/vm/vfio/vf", None).unwrap();
        let alarms = api.done("GET", "/v1/vm", None).unwrap()["alarms"].clone();
        (shown["function"].clone(), alarms)
    };
    let (shown, alarms) = state();
    assert_eq!((&shown["failed"], &alarms), (&json!(false), &json!([])));
    report_error(function.address());
    let begin = Instant::now();
    while state().0["failed"] != true {
        assert!(begin.elapsed() < SILENCE, "{}", guest.console());
        std::thread::sleep(Duration::from_millis(20));
    }
    let (shown, alarms) = state();
    assert!(shown["errors"].as_u64() > Some(0), "{shown}");
    assert_eq!(
        (&alarms[0]["device"], &alarms[0]["alarm"]),
        (&json!("vf"), &json!("DeviceError"))
    );
    assert!(guest.console().contains("AER"), "{}", guest.console());

    guest.command("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    let (shown, alarms) = state();
    assert_eq!((&shown["failed"], &alarms), (&json!(false), &json!([])));
    assert!(guest.power_off().unwrap().success());
}
