//! Devices that are created, changed, listed and deleted.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lab::labnic::Labnic;
use lab::notice;
use lab::sim::{self, Mapping, SimDevice, device_file, require_lab};
use lab::threads::StopOnDrop;
use vdpa::device::Device;
use vdpa_mgmt::{ClassConfig, Connection, ErrorKind, NewDevice, QueueType};

use super::holder::Holder;
use super::support::{MAC, bellhop, complaint, iproute2, listed, printed};

fn new(name: &str) -> NewDevice {
    NewDevice::new(name, "vdpasim_net".parse().unwrap()).unwrap()
}

/// A device of that name, deleted at the end in any case.
struct Leftover(&'static str);

impl Drop for Leftover {
    fn drop(&mut self) {
        let _ = iproute2(&["dev", "del", self.0]);
    }
}

#[test]
fn a_device_is_created_as_requested() {
    let labnic = Labnic::load(&[]).unwrap();
    let _leftover = Leftover("lab-made");
    let arguments = "dev add name lab-made mgmtdev labnic mac 02:5e:10:53:11:01 mtu 2000 max_vqp 3";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    assert_eq!(printed(&bellhop(&arguments)), "");
    let text = printed(&iproute2(&["dev", "config", "show", "lab-made"]));
    let expected =
        "lab-made: mac 02:5e:10:53:11:01 link up link_announce false max_vq_pairs 3 mtu 2000 \n";
    assert_eq!(text, expected);
    assert_eq!(
        printed(&bellhop(&[
            "dev",
            "set",
            "name",
            "lab-made",
            "mac",
            "02:5e:10:53:11:02"
        ])),
        ""
    );
    let text = printed(&iproute2(&["dev", "config", "show", "lab-made"]));
    assert!(text.contains("mac 02:5e:10:53:11:02 "), "{text}");
    assert_eq!(printed(&bellhop(&["dev", "del", "lab-made"])), "");
    assert!(!listed().contains(&"lab-made".to_owned()));

    // Only the requested features: MAC, MTU, STATUS, VERSION_1, ACCESS_PLATFORM.
    let features = format!("{:#x}", 1_u64 << 5 | 1 << 3 | 1 << 16 | 1 << 32 | 1 << 33);
    let arguments = [
        "dev",
        "add",
        "name",
        "lab-made",
        "mgmtdev",
        "labnic",
        "device_features",
    ];
    printed(&bellhop(&[&arguments[..], &[&features]].concat()));
    let config = Connection::open().unwrap().config("lab-made").unwrap();
    assert_eq!(config.device_features, Some(0x3_0001_0028));
    printed(&bellhop(&["dev", "del", "lab-made"]));
    drop(labnic);
}

#[test]
fn the_library_returns_all_attributes() {
    require_lab().unwrap();
    let net = SimDevice::net("tells", MAC, 1400).unwrap();
    let connection = Connection::open().unwrap();
    let simulator = connection
        .mgmt_device(&"vdpasim_net".parse().unwrap())
        .unwrap();
    assert!(simulator.supports(1) && !simulator.supports(2));
    assert!(connection.mgmt_devices().unwrap().contains(&simulator));
    let device = connection.device(net.name()).unwrap();
    assert_eq!((device.device_id, device.max_vqs), (1, Some(3)));
    assert_eq!(device.mgmtdev.to_string(), "vdpasim_net");
    assert_eq!(device.min_vq_size, Some(1));
    assert!(connection.devices().unwrap().contains(&device));
    let config = connection.config(net.name()).unwrap();
    assert!(connection.configs().unwrap().contains(&config));
    let ClassConfig::Net(config) = config.class else {
        panic!("{config:?}")
    };
    assert_eq!((config.mtu, config.link_up()), (Some(1400), Some(true)));
    assert_eq!(config.mac, Some([2, 0x5e, 0x10, 0x53, 0x11, 1]));

    let error = connection.vendor_stats(net.name(), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotNegotiated, "{error}");
    let _holder = Holder::start(net.path());
    let stats = connection.vendor_stats(net.name(), 1).unwrap();
    assert_eq!(stats.queue_type(), Some(QueueType::Transmit));
    let names: Vec<&str> = stats.counters.iter().map(|one| one.0.as_str()).collect();
    assert_eq!(names, ["tx packets", "tx bytes", "tx errors", "tx drops"]);
    assert!(stats.counters[0].1 > 0, "{stats:?}");
}

#[test]
fn a_device_in_use_is_not_deleted_and_blocks_nothing() {
    require_lab().unwrap();
    let net = SimDevice::net("busy", MAC, 1500).unwrap();
    let holder = Holder::start(net.path());
    let words = [
        "lab-busy is in use by lab-holder (PID ",
        &holder.pid().to_string(),
    ];
    complaint(&bellhop(&["dev", "del", net.name()]), &words);
    // While it is still held: a waiting deletion would block the kernel's answers to all clients.
    printed(&iproute2(&["dev", "show"]));
    assert!(listed().contains(&net.name().to_owned()));
    drop(holder);

    // Never while this process itself has it open.
    let opened = open_soon(&net);
    let error = Connection::open().unwrap().delete(net.name()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    let own = format!("(PID {})", std::process::id());
    assert!(error.to_string().contains(&own), "{error}");
    drop(opened);
    assert!(listed().contains(&net.name().to_owned()));
}

/// Far longer than the kernel takes: a watchdog, not a measurement.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The kernel may close a dead process's files even after the process was reaped.
fn open_soon(device: &SimDevice) -> Device {
    let begin = Instant::now();
    loop {
        match Device::open(device.path()) {
            Ok(device) => return device,
            Err(error) => assert!(begin.elapsed() < WATCHDOG, "{error}"),
        }
    }
}

#[test]
fn a_blocked_kernel_blocks_no_caller() {
    require_lab().unwrap();
    let _leftover = Leftover("lab-blocked");
    let patient = Connection::open().unwrap();
    let connection = Connection::with_patience(Duration::from_secs(1)).unwrap();
    patient.add(&new("lab-blocked")).unwrap();
    let opened = Device::open(device_file("lab-blocked").unwrap()).unwrap();
    // What Bellhop never does: delete the device while it is open.
    let mut blocked = Command::new("vdpa")
        .args(["dev", "del", "lab-blocked"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let first = connection.devices().unwrap_err();
    assert_eq!(first.kind(), ErrorKind::NoAnswer { sent: true }, "{first}");
    assert!(first.to_string().contains("dev del"), "{first}");
    // It waits behind the first request and is never sent.
    let second = connection.add(&new("lab-late")).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::NoAnswer { sent: false });
    assert!(
        second.to_string().contains("the kernel will not do it"),
        "{second}"
    );
    drop(opened);
    assert!(blocked.wait().unwrap().success());
    let names = listed();
    assert!(!names.contains(&"lab-blocked".to_owned()), "{names:?}");
    std::thread::sleep(Duration::from_millis(200));
    let error = patient.device("lab-late").unwrap_err();
    assert!(error.is_missing(), "{error}");
}

#[test]
fn fifty_lives_leave_nothing() {
    require_lab().unwrap();
    let before = (
        printed(&iproute2(&["dev", "show"])),
        printed(&iproute2(&["mgmtdev", "show"])),
    );
    let connection = Connection::open().unwrap();
    let _leftover = Leftover("lab-life");
    for life in 0..50_u16 {
        let mtu = 1000 + life;
        connection
            .add(&new("lab-life").mtu(Some(mtu)).unwrap())
            .unwrap();
        let ClassConfig::Net(config) = connection.config("lab-life").unwrap().class else {
            panic!()
        };
        assert_eq!(config.mtu, Some(mtu));
        connection.delete("lab-life").unwrap();
        let error = connection.device("lab-life").unwrap_err();
        assert!(error.is_missing(), "{error}");
    }
    let after = (
        printed(&iproute2(&["dev", "show"])),
        printed(&iproute2(&["mgmtdev", "show"])),
    );
    assert_eq!(before, after);
}

#[test]
fn lists_are_complete_while_devices_change() {
    const STAYING: usize = 500;
    require_lab().unwrap();
    let connection = Connection::open().unwrap();
    let names: Vec<String> = (0..STAYING)
        .map(|number| format!("lab-stay-{number}"))
        .collect();
    let _all = Staying(&names);
    let transients: Vec<String> = (0..8).map(|number| format!("lab-go-{number}")).collect();
    let _others = Staying(&transients);
    // First on the bus, so that each deletion moves all that stay.
    for name in transients.iter().chain(&names) {
        connection.add(&new(name)).unwrap();
    }
    // Another process that adds and deletes continuously, and a thread of this one.
    let _foreign = Foreign::start();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let connection = Connection::open().unwrap();
            let mut changes = 0;
            while !stop.load(Ordering::Relaxed) {
                for name in &transients {
                    connection.delete(name).unwrap();
                    changes += 1;
                }
                for name in &transients {
                    connection.add(&new(name)).unwrap();
                }
            }
            changes
        });
        let wanted: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        let stopped = StopOnDrop(&stop);
        for _ in 0..20 {
            for found in [
                connection
                    .devices()
                    .unwrap()
                    .into_iter()
                    .map(|one| one.name)
                    .collect::<Vec<_>>(),
                connection
                    .configs()
                    .unwrap()
                    .into_iter()
                    .map(|one| one.name)
                    .collect(),
            ] {
                let unique: BTreeSet<&str> = found.iter().map(String::as_str).collect();
                assert_eq!(unique.len(), found.len());
                assert!(unique.is_superset(&wanted), "{} of {STAYING}", unique.len());
            }
        }
        drop(stopped);
        assert!(changer.join().unwrap() > 0);
    });
}

/// iproute2 that adds and deletes devices continuously, killed at the end; its leftovers are
/// deleted.
struct Foreign(std::process::Child);

impl Foreign {
    const NAMES: [&str; 2] = ["lab-other-0", "lab-other-1"];

    fn start() -> Self {
        let [first, second] = Self::NAMES;
        let script = format!(
            "while :; do for name in {first} {second}; do \
             vdpa dev add name $name mgmtdev vdpasim_net || exit 1; done; \
             for name in {first} {second}; do vdpa dev del $name || exit 1; done; done"
        );
        let mut command = Command::new("sh");
        let command = command.args(["-c", &script]).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let ended = self.0.try_wait();
        let _ = (self.0.kill(), self.0.wait());
        // The shell's last command may still run.
        std::thread::sleep(Duration::from_millis(500));
        for name in Self::NAMES {
            let _ = iproute2(&["dev", "del", name]);
        }
        if !std::thread::panicking() {
            assert!(
                matches!(ended, Ok(None)),
                "the other process ended: {ended:?}"
            );
        }
    }
}

/// Devices that are deleted at the end in any case.
struct Staying<'a>(&'a [String]);

impl Drop for Staying<'_> {
    fn drop(&mut self) {
        if let Ok(connection) = Connection::open() {
            for name in self.0 {
                let _ = connection.delete(name);
            }
        }
    }
}

const VDPA_BUS: &str = "/sys/bus/vdpa";

/// The vDPA core without its parents and drivers. Those of a lab host are loaded again at the end.
struct WithoutCore;

impl WithoutCore {
    /// All modules that use the core, and the core itself, dependents first. An earlier test file
    /// may have left some loaded, such as the lab NIC.
    const MODULES: [&str; 9] = [
        "virtio_vdpa",
        "vhost_vdpa",
        "labnic",
        "vdpa_sim_net",
        "vdpa_sim_blk",
        "vdpa_sim",
        "vp_vdpa",
        "vduse",
        "vdpa",
    ];

    /// Each loaded module, with its use count and the modules that use it.
    fn users() -> String {
        let read = |module: &str, file: &str| {
            std::fs::read_to_string(format!("/sys/module/{module}/{file}")).ok()
        };
        let loaded = Self::MODULES.iter().filter_map(|module| {
            let users = read(module, "refcnt")?;
            let holders = std::fs::read_dir(format!("/sys/module/{module}/holders"));
            let holders: Vec<_> = holders
                .into_iter()
                .flatten()
                .flatten()
                .map(|holder| holder.file_name())
                .collect();
            Some(format!("{module}: {} users, {holders:?}\n", users.trim()))
        });
        loaded.collect()
    }

    fn unload() -> Self {
        let this = Self;
        // A device that was just closed holds its modules a moment longer.
        let started = Instant::now();
        while Path::new(VDPA_BUS).exists() && started.elapsed() < Duration::from_secs(10) {
            Self::try_unload();
        }
        this
    }

    fn try_unload() {
        for module in Self::MODULES {
            let _ = Command::new("rmmod")
                .arg(module)
                .stderr(Stdio::null())
                .status();
        }
    }
}

impl Drop for WithoutCore {
    fn drop(&mut self) {
        for module in ["vhost_vdpa", "vduse"] {
            let _ = Command::new("modprobe").arg(module).status();
        }
        notice::left_behind(sim::reload(Mapping::DEFAULT));
    }
}

#[test]
fn a_kernel_without_vdpa_is_reported_and_its_return_noticed() {
    require_lab().unwrap();
    let connection = Connection::open().unwrap();
    let without = WithoutCore::unload();
    assert!(
        !Path::new(VDPA_BUS).exists(),
        "a module is in use:\n{}",
        WithoutCore::users()
    );
    for arguments in [
        &["dev", "show"][..],
        &["mgmtdev", "show"],
        &["dev", "del", "x"],
    ] {
        complaint(&bellhop(arguments), &["modprobe vdpa"]);
    }
    // The help needs no kernel.
    assert!(printed(&bellhop(&["dev", "--help"])).contains("max_vqp"));
    let error = connection.devices().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoVdpa, "{error}");
    drop(without);
    // The family has another number now.
    assert!(
        connection
            .mgmt_device(&"vdpasim_net".parse().unwrap())
            .is_ok()
    );
}
