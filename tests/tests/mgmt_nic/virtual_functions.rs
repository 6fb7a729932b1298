//! From a NIC to devices on its virtual functions, and back.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lab::endurance::soak;
use lab::notice::{Kind, notice};
use lab::process::output;
use lab::rig::{VIRTUAL_FUNCTIONS, vf_mac};
use lab::sim::require_lab;
use rustix::process::Signal;
use serde_json::Value;
use vdpa::netdev::Options;
use vdpa_mgmt::nic::{MadeNic, NicRequest, Nics, Observer, Phase, Silent, Step};
use vdpa_mgmt::pci::{Function, Pci};

use super::faults::{be_killed, each_death_is_undone, each_end_is_undone, moments, signalled};
use super::host::{NAMES, Traces, clean_up, made, record};
use super::support::{bellhop, complaint, complaint_with, iproute2, listed, printed, program};
use super::traffic::{Flow, both_ways, start};

const NET_DRIVER: &str = "virtio-pci";
const NOBODY: u32 = 65534;

/// All phases of a NIC on a virtual function of a parent NIC that takes no settings.
const PHASES: [Phase; 7] = [
    Phase::Check,
    Phase::CountVirtualFunctions,
    Phase::ChooseVirtualFunction,
    Phase::BindFunction,
    Phase::AwaitMgmtDevice,
    Phase::AddDevice,
    Phase::AwaitCharacterDevice,
];

/// The NIC, for one test at a time, in the same state before and after.
struct Physical {
    name: String,
    netdev: String,
    function: Function,
    _alone: MutexGuard<'static, ()>,
}

impl Physical {
    fn find() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        require_lab().unwrap();
        let started = Instant::now();
        loop {
            let mut found = Pci::default().physical_functions().unwrap();
            found.retain(|function| function.driver.as_deref() == Some(NET_DRIVER));
            // Its driver may not be ready yet.
            if let Some(function) = found.pop()
                && let Some(netdev) = function.netdevs.first()
            {
                return Self {
                    name: format!("pci/{}", function.address),
                    netdev: netdev.clone(),
                    function,
                    _alone: alone,
                };
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no NIC");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn now(&self) -> Function {
        Pci::default().function(self.function.address).unwrap()
    }

    fn count(&self) -> usize {
        self.now().virtual_functions.len()
    }

    fn virtual_function(&self, index: usize) -> String {
        format!("pci/{}", self.now().virtual_functions[index].1)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // A failed test must not leave anything to the next one.
        clean_up();
        bellhop(&["vf", "count", &self.name, "0"]);
    }
}

fn mac(index: usize) -> [u8; 6] {
    let text = vf_mac(index);
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn talk(one: &Path, other: &Path) {
    let options = Options::default();
    let [mut a, mut b] = [one, other].map(|path| start(path, &options));
    both_ways(&Flow::new(mac(0), mac(1)), &mut a, &mut b);
}

#[test]
fn nics_are_created_exchange_frames_and_are_removed() {
    let nic = Physical::find();
    let before = Traces::find();
    let plan = [
        "nic",
        "create",
        NAMES[0],
        "--from",
        &nic.netdev,
        "--dry-run",
    ];
    let plan = printed(&bellhop(&plan));
    for step in ["4 of ", "the first free one", "vp-vdpa", NAMES[0]] {
        assert!(plan.contains(step), "no {step:?} in {plan}");
    }
    before.assert_same("a dry run");
    let one = made(&["--from", &nic.netdev, "--name", NAMES[0]]);
    assert_eq!(nic.count(), VIRTUAL_FUNCTIONS);
    let with = [
        "nic", "make", "--from", &nic.name, "--kind", "vf", "--name", NAMES[1], "-j",
    ];
    let text = printed(&bellhop(&with));
    let told: Value = serde_json::from_str(&text).unwrap();
    let told = &told["nic"][NAMES[1]];
    let other = PathBuf::from(told["path"].as_str().unwrap());
    assert_eq!(told["from"], nic.name);
    assert_eq!(told["state"], "made");
    assert_eq!(told["function"], nic.virtual_function(1));
    assert_eq!(told["mgmtdev"], nic.virtual_function(1));
    assert_eq!(told["driver"], "vp-vdpa");
    assert_eq!(told["mac"], vf_mac(1));
    talk(&one, &other);
    let text = printed(&bellhop(&["nic", "list"]));
    for word in NAMES[..2]
        .iter()
        .copied()
        .chain([one.to_str().unwrap(), "state made"])
    {
        assert!(text.contains(word), "no {word} in {text}");
    }
    let record = record(NAMES[0]);
    assert_eq!(
        fs::metadata(&record).unwrap().permissions().mode() & 0o777,
        0o600
    );

    // While a process has it open, nothing is changed, and nothing hangs.
    let with = Traces::find();
    let open = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&one)
        .unwrap();
    let pid = format!("PID {}", std::process::id());
    complaint(
        &bellhop(&["nic", "remove", NAMES[0]]),
        &[NAMES[0], "in use by", &pid],
    );
    drop(open);
    // Nor while this host uses it.
    output(Command::new("modprobe").arg("virtio_vdpa")).unwrap();
    printed(&bellhop(&["bind", NAMES[0], "virtio_vdpa"]));
    complaint(
        &bellhop(&["nic", "remove", NAMES[0]]),
        &["bound to virtio_vdpa", "bellhop bind lab-nic0 vhost_vdpa"],
    );
    printed(&bellhop(&["bind", NAMES[0], "vhost_vdpa"]));
    with.assert_same("after refusals");

    // The virtual functions are removed with the last NIC on them.
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    assert_eq!(nic.count(), VIRTUAL_FUNCTIONS);
    let one = made(&["--from", &nic.netdev, "--name", NAMES[2]]);
    talk(&one, &other);
    printed(&bellhop(&["nic", "remove", NAMES[1]]));
    assert_eq!(nic.count(), VIRTUAL_FUNCTIONS);
    printed(&bellhop(&["nic", "remove", NAMES[2]]));
    assert_eq!(nic.count(), 0);
    before.assert_same("after removal");
    complaint(&bellhop(&["nic", "remove", NAMES[2]]), &["no NIC lab-nic2"]);
}

fn request(from: &str) -> NicRequest {
    NicRequest {
        virtual_functions: Some(2),
        ..NicRequest::new(NAMES[0], from)
    }
}

#[test]
fn any_failure_leaves_the_host_as_before() {
    let nic = Physical::find();
    let before = Traces::find();
    each_end_is_undone(&request(&nic.netdev), &moments(&PHASES), &before);
}

#[test]
#[ignore = "another test runs it in a process of its own"]
fn dies_at_a_moment() {
    be_killed(request, &moments(&PHASES));
}

#[test]
fn steps_of_a_killed_process_are_undone() {
    let nic = Physical::find();
    let before = Traces::find();
    let test = "virtual_functions::dies_at_a_moment";
    each_death_is_undone(test, &nic.netdev, &moments(&PHASES), &before);
}

#[test]
fn the_command_is_killed_and_interrupted() {
    let nic = Physical::find();
    let before = Traces::find();
    let make = [
        "nic",
        "make",
        "--from",
        &nic.netdev,
        "--name",
        NAMES[0],
        "--vfs",
        "2",
    ];
    // INT and TERM take the same path: the gate sends each at every third line, not at the same
    // ones.
    let each = if soak() { 1 } else { 3 };
    if each > 1 {
        let what = format!("nic make: INT and TERM at one line in {each} each");
        notice(Kind::Thinned, what);
    }
    for (signal, first, each) in [
        (Signal::KILL, 1, 1),
        (Signal::INT, 1, each),
        (Signal::TERM, each.min(2), each),
    ] {
        for lines in (first..).step_by(each) {
            let Some(output) = signalled(&make, lines, signal) else {
                assert!(lines > PHASES.len(), "only {lines} lines");
                printed(&bellhop(&["nic", "remove", NAMES[0]]));
                break;
            };
            let errors = String::from_utf8_lossy(&output.stderr);
            match (signal, output.status.code()) {
                // The creation had already finished.
                (_, Some(0)) => printed(&bellhop(&["nic", "remove", NAMES[0]])),
                (Signal::KILL, None) => {
                    assert_eq!(output.status.signal(), Some(libc::SIGKILL));
                    let removed = bellhop(&["nic", "remove", NAMES[0]]);
                    if removed.status.success() {
                        String::new()
                    } else {
                        // Nothing had been done yet.
                        complaint(&removed, &["no NIC lab-nic0"])
                    }
                }
                (Signal::INT, Some(130)) | (Signal::TERM, Some(143)) => {
                    assert!(errors.contains("interrupted"), "{errors}");
                    String::new()
                }
                other => panic!("{other:?}: {errors}"),
            };
            before.assert_same(&format!("{signal:?} after {lines} lines"));
        }
        before.assert_same(&format!("{signal:?}"));
    }
}

#[test]
fn changes_of_others_are_kept() {
    let nic = Physical::find();
    let nics = Nics::open().unwrap();
    // An existing number of functions stays.
    printed(&bellhop(&["vf", "count", &nic.name, "3"]));
    let made = nics.make(&request(&nic.netdev), &[], &mut Silent).unwrap();
    assert_eq!(nic.count(), 3);
    assert!(
        !made
            .steps()
            .iter()
            .any(|step| matches!(step, Step::CountVirtualFunctions { .. })),
        "{made:?}"
    );
    nics.remove(&made, &mut Silent).unwrap();
    assert_eq!(nic.count(), 3);
    let first = Pci::default()
        .function(nic.now().virtual_functions[0].1)
        .unwrap();
    assert_eq!(first.driver.as_deref(), Some(NET_DRIVER));
    assert_eq!(first.driver_override, None);

    // Missing parts need no undoing; another driver, and an override, stay.
    let made = nics.make(&request(&nic.netdev), &[], &mut Silent).unwrap();
    printed(&bellhop(&["dev", "del", NAMES[0]]));
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    printed(&bellhop(&["bind", &nic.virtual_function(0), "vfio-pci"]));
    let mut notes = Notes::default();
    nics.remove(&made, &mut notes).unwrap();
    assert!(
        notes
            .0
            .iter()
            .any(|note| note.contains("now has the driver vfio-pci")),
        "{notes:?}"
    );
    let first = Pci::default().function(first.address).unwrap();
    assert_eq!(first.driver.as_deref(), Some("vfio-pci"));

    // The next NIC takes the next function, whose override is restored afterwards.
    let second = nic.virtual_function(1);
    let file = format!("/sys/bus/pci/devices/{}/driver_override", &second[4..]);
    fs::write(&file, NET_DRIVER).unwrap();
    let made = nics.make(&request(&nic.netdev), &[], &mut Silent).unwrap();
    let on = made.mgmtdev().unwrap().to_string();
    assert_eq!(on, second);
    nics.remove(&made, &mut Silent).unwrap();
    let second = Pci::default().function(second.parse().unwrap()).unwrap();
    assert_eq!(second.driver_override.as_deref(), Some(NET_DRIVER));
    assert_eq!(second.driver.as_deref(), Some(NET_DRIVER));
}

/// Records what was left.
#[derive(Debug, Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn keep(&mut self, _: &MadeNic) -> std::io::Result<()> {
        Ok(())
    }

    fn progress(&mut self, progress: &vdpa_mgmt::nic::Progress<'_>) {
        if let vdpa_mgmt::nic::Activity::Leave(why) = progress.activity {
            self.0.push(why.to_owned());
        }
    }
}

#[test]
fn functions_in_use_are_not_chosen() {
    let nic = Physical::find();
    printed(&bellhop(&["vf", "count", &nic.name, "4"]));
    let netdev = |index: usize| {
        let function = Pci::default().function(nic.now().virtual_functions[index].1);
        function.unwrap().netdevs[0].clone()
    };
    let ip = |words: &str| drop(output(Command::new("ip").args(words.split(' '))).unwrap());
    ip(&format!("link set {} up", netdev(0)));
    ip(&format!("addr add 192.0.2.7/24 dev {}", netdev(1)));
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    printed(&bellhop(&["bind", &nic.virtual_function(2), "vfio-pci"]));
    ip("netns add lab-nic");
    ip(&format!("link set {} netns lab-nic", netdev(3)));
    let text = complaint(
        &bellhop(&["nic", "make", "--from", &nic.name, "--name", NAMES[0]]),
        &[
            "is free",
            "which is up",
            "has an address",
            "vfio-pci",
            "namespace",
        ],
    );
    for index in 0..4 {
        assert!(text.contains(&nic.virtual_function(index)[4..]), "{text}");
    }
    ip(&format!("link set {} down", netdev(0)));
    ip("link add lab-bridge type bridge");
    ip(&format!("link set {} master lab-bridge", netdev(0)));
    let member = bellhop(&["nic", "make", "--from", &nic.name, "--name", NAMES[0]]);
    complaint(&member, &["in a bridge or bond"]);
    ip("link del lab-bridge");
    made(&["--from", &nic.name, "--name", NAMES[0]]);
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    ip("netns del lab-nic");
    assert_eq!(nic.count(), 4);
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let nic = Physical::find();
    let before = Traces::find();
    let make = |words: &[&str]| {
        let common = [
            "nic",
            "make",
            "--from",
            nic.netdev.as_str(),
            "--name",
            NAMES[0],
        ];
        bellhop(&[common.as_slice(), words].concat())
    };
    // The NIC's driver takes no settings, and its parent driver no values: the creation is rolled
    // back.
    complaint(
        &make(&["--connect", "vlan=100"]),
        &["connect it", "VLAN", "has no such setting"],
    );
    let rate = make(&["--max-tx-rate", "100"]);
    complaint(&rate, &["rates", "has no such setting"]);
    complaint(
        &make(&["--mac", "02:00:00:00:00:77"]),
        &["does not accept mac"],
    );
    complaint(&make(&["--mtu", "1500"]), &["does not accept mtu"]);
    complaint(&make(&["--max-vqp", "2"]), &["does not accept max_vqp"]);
    complaint(
        &make(&["--vfs", "5"]),
        &["4 virtual functions at most, not 5"],
    );
    before.assert_same("after refusals");
    for words in [
        ["--vfs", "0"].as_slice(),
        &["--mac", "01:00:00:00:00:01"],
        &["--mtu", "67"],
        &["--max-vqp", "0"],
        &["--connect", "vlan=4095"],
        &["--connect", "x"],
        &["--kind", "x"],
        &["--min-tx-rate", "7", "--max-tx-rate", "6"],
        &["--device-features", "x"],
        &["--device-features", "0", "--mtu", "1500"],
    ] {
        let output = make(words);
        let code = output.status.code();
        assert!(matches!(code, Some(1 | 2)), "{words:?} {output:?}");
        assert!(output.stdout.is_empty());
    }
    for (from, word) in [
        ("lab-none", "neither a network interface"),
        ("", "neither a network interface"),
        ("../x", "neither a network interface"),
    ] {
        let output = bellhop(&["nic", "make", "--from", from, "--name", NAMES[0]]);
        complaint_with(2, &output, &[word]);
    }
    let output = bellhop(&["nic", "make", "--from", "lo", "--name", NAMES[0]]);
    complaint(&output, &["not an interface of a NIC"]);
    let output = bellhop(&[
        "nic",
        "make",
        "--from",
        "pci/0000:ff:1f.7",
        "--name",
        NAMES[0],
    ]);
    complaint(&output, &["no PCI function 0000:ff:1f.7"]);
    for name in ["", "a/b", "..", "a b", &"x".repeat(64)] {
        let output = bellhop(&["nic", "make", "--from", &nic.netdev, "--name", name]);
        complaint_with(2, &output, &["63 bytes"]);
        let output = bellhop(&["nic", "remove", name]);
        complaint_with(2, &output, &["63 bytes"]);
    }
    for words in [["nic", "remove", NAMES[0]].as_slice(), &["nic", "list"]] {
        let mut command = Command::new(program());
        let command = command.args(words).stdin(Stdio::null());
        let output = command.uid(NOBODY).gid(NOBODY).output().unwrap();
        complaint(&output, &["root"]);
    }
    before.assert_same("after bad input");

    // A virtual function, and a device made by hand.
    printed(&bellhop(&["vf", "count", &nic.name, "1"]));
    let function = nic.virtual_function(0);
    let output = bellhop(&["nic", "make", "--from", &function, "--name", NAMES[0]]);
    complaint(&output, &["is a virtual function", &nic.name]);
    printed(&bellhop(&["bind", &function, "vp-vdpa"]));
    printed(&iproute2(&[
        "dev", "add", "name", NAMES[0], "mgmtdev", &function,
    ]));
    complaint(&make(&[]), &["there is a vDPA device lab-nic0 already"]);
    complaint(&bellhop(&["nic", "remove", NAMES[0]]), &["--no-record"]);
    assert_eq!(listed(), [NAMES[0]]);
    printed(&bellhop(&["nic", "remove", "--no-record", NAMES[0]]));
    assert!(listed().is_empty());
    // The function is a management device in its current state.
    made(&["--from", &function, "--name", NAMES[0]]);
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    // An invalid record.
    let record = record(NAMES[0]);
    fs::write(&record, "{\"version\":1,\"name\":\"lab-nic0\"}").unwrap();
    complaint(
        &bellhop(&["nic", "remove", NAMES[0]]),
        &["is not a record of a NIC"],
    );
    fs::write(&record, "{\"version\":99}").unwrap();
    complaint(&make(&[]), &["has version 99"]);
    fs::remove_file(&record).unwrap();
}

#[test]
fn several_are_created_at_once() {
    let nic = Physical::find();
    let before = Traces::find();
    let children = NAMES.map(|name| {
        let mut command = Command::new(program());
        let command = command.args(["nic", "make", "--from", &nic.netdev, "--name", name]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    });
    for child in children {
        printed(&child.wait_with_output().unwrap());
    }
    assert_eq!(listed().len(), NAMES.len());
    for name in NAMES {
        printed(&bellhop(&["nic", "remove", name]));
    }
    before.assert_same("after several at once");
}
