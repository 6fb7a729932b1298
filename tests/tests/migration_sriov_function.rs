//! A guest migrates with its function, and is saved with it. The function is `bellhop_vfio_mig`
//! (`tests/kmod`), whose driver on the host moves its state, and logs what it writes into guest
//! memory.

#[path = "migration_sriov_function/daemon.rs"]
mod daemon;
mod live;
mod moving;
#[path = "migration_sriov_function/upgrades.rs"]
mod upgrades;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lab::files;
use lab::guest::{BellhopArguments, Guest};
use lab::process::output;
use lab::small_file_system::SmallFileSystem;
use lab::sriov::{SriovNic, VfDevice, VirtualFunction};
use lab::temp_path::TempPath;
use moving::Host;
use serde_json::{Value, json};

const DRIVER: &str = "bellhop_vfio_mig";

/// States of `enum vfio_device_mig_state`.
const STOP: i32 = 1;
const STOP_COPY: i32 = 3;
const RESUMING: i32 = 4;
const PRE_COPY: i32 = 6;

/// The bytes that are the first part of a state (`extra`), and those of all states so far that were
/// read while the guest ran.
const EARLY: u64 = (1 << 20) + 4097;

fn read_early() -> u64 {
    let path = Path::new("/sys/module").join(DRIVER);
    let text = files::read_text(&path.join("parameters/precopied")).unwrap();
    text.trim().parse().unwrap()
}

/// A parameter of the driver with another value than the default, until it is dropped.
struct Parameter {
    name: &'static str,
    default: &'static str,
}

impl Parameter {
    fn set(name: &'static str, default: &'static str, value: &str) -> Self {
        write(name, value);
        Self { name, default }
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        write(self.name, self.default);
    }
}

fn write(name: &str, value: &str) {
    let path = Path::new("/sys/module").join(DRIVER).join("parameters");
    files::write(&path.join(name), value).unwrap();
}

fn bind(function: &VirtualFunction<'_>) {
    output(Command::new("modprobe").arg("vfio-pci")).unwrap();
    function.bind(DRIVER).unwrap();
}

/// Two functions with the driver, and the NICs of two hosts.
fn equipment(nic: &SriovNic) -> ([VirtualFunction<'_>; 2], [VfDevice<'_>; 2]) {
    let functions = [0, 1].map(|index| nic.vf(index).unwrap());
    let devices = [2, 3].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    functions.iter().for_each(bind);
    (functions, devices)
}

/// Through iommufd.
fn vfio(function: &VirtualFunction<'_>) -> String {
    format!("host={},id=function", function.address())
}

fn boot(host: &Host, function: &VirtualFunction<'_>) -> Guest {
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut guest = host.boot(small.argument("--vfio", &vfio(function)));
    guest.command("mover-on 3000").unwrap();
    guest
}

fn wait(host: &Host, function: &VirtualFunction<'_>) -> Guest {
    wait_as(host, function, "off")
}

fn wait_as(host: &Host, function: &VirtualFunction<'_>, sandbox: &str) -> Guest {
    host.wait_as(|command| {
        command.args(["--vfio", &vfio(function), "--sandbox", sandbox]);
    })
}

/// Checks the totals of a guest that has moved so often, and returns the writes. Each move adds one
/// spurious interrupt, which may coincide with another one.
#[track_caller]
fn check(guest: &mut Guest, moves: u64) -> u64 {
    let off = guest.command("mover-off").unwrap();
    let mut all = 0;
    for totals in off["functions"].as_array().unwrap() {
        let number = |name: &str| totals[name].as_u64().unwrap();
        for wrong in ["wrong_pages", "wrong_scratch", "failed"] {
            assert_eq!(number(wrong), 0, "{wrong}: {totals}");
        }
        let writes = number("writes");
        assert!(writes > 20, "{totals}");
        assert_eq!((number("done"), number("raised")), (writes, writes));
        let interrupts = number("interrupts");
        assert!(
            (writes..=writes + moves).contains(&interrupts),
            "{moves} moves: {totals}"
        );
        all += writes;
    }
    all
}

/// As [`check`]. Then the function must write more.
#[track_caller]
fn check_and_continue(guest: &mut Guest, moves: u64) {
    let before = check(guest, moves);
    guest.command("mover-on 3000").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(check(guest, moves) > before);
}

/// Has the guest stay, with this reason.
#[track_caller]
fn stays(guest: &mut Guest, from: &Host, to: &Host, more: Value) -> String {
    from.send(to, more);
    let status = from.ended(guest);
    assert_eq!(status["phase"], "Stayed", "{status}");
    let machine = from.client().get("/v1/vm").unwrap();
    assert_eq!(machine["state"], "Running", "{machine}");
    status.to_string()
}

/// Has the guest saved, with this status and words.
#[track_caller]
fn save(host: &Host, to: &Path, status: u16, words: &str) {
    let body = json!({ "path": to });
    let answer = host.client().ask("POST", "/v1/vm/snapshot", Some(&body));
    let answer = answer.unwrap();
    let text = answer.body.to_string();
    assert!(answer.status == status && text.contains(words), "{text}");
    let machine = host.client().get("/v1/vm").unwrap();
    assert_eq!(machine["state"], "Running", "{machine}");
}

/// The command that continues a snapshot of the guest with these functions.
fn restore(saved: &TempPath, host: &Host, functions: &[String]) -> Command {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", saved.text(), "--vdpa", host.vdpa()])
        .args(BellhopArguments::small().unwrap().allow_boot_files());
    for function in functions {
        command.args(["--vfio", function]);
    }
    command
}

/// Has the snapshot refused, with these words.
#[track_caller]
fn refused(mut command: Command, words: &str) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains(words) && !text.contains("panicked"),
        "{words}: {text}"
    );
}

#[test]
fn a_guest_is_saved_with_its_function_and_continues_here_and_on_other_functions() {
    let nic = SriovNic::enable(4).unwrap();
    let [first, second, other] = [0, 1, 2].map(|index| nic.vf(index).unwrap());
    // A snapshot needs no log.
    let unlogged = Parameter::set("logs", "Y", "N");
    [&first, &second].into_iter().for_each(bind);
    drop(unlogged);
    other.bind("vfio-pci").unwrap();
    let device = VfDevice::add(nic.vf(3).unwrap()).unwrap();
    let host = Host::new("saved", device.path());
    let mut guest = boot(&host, &first);
    let (saved, small) = (
        TempPath::new("function.snapshot"),
        SmallFileSystem::mount().unwrap(),
    );

    // After each failure, and after the snapshot, the function runs on.
    let fault = Parameter::set("fail_state", "-1", &STOP_COPY.to_string());
    save(&host, saved.path(), 409, "does not stop");
    drop(fault);
    save(&host, &small.path().join("full"), 500, "No space left");
    save(&host, saved.path(), 201, "memory_bytes");
    check_and_continue(&mut guest, 0);
    drop(guest);

    // Before memory is read: its change is found afterwards.
    let memory = fs::File::options()
        .read(true)
        .write(true)
        .open(saved.path().join("memory"))
        .unwrap();
    let (at, mut byte) = (1 << 20, [0]);
    memory.read_exact_at(&mut byte, at).unwrap();
    memory.write_all_at(&[!byte[0]], at).unwrap();
    let named = |functions: &[String]| restore(&saved, &host, functions);
    refused(named(&[]), "--vfio host=ADDRESS,id=function");
    let unknown = vfio(&first).replace("id=function", "id=unknown");
    refused(named(&[unknown]), "no VFIO device unknown; it has function");
    for part in ["its vendor and device differ", "of the same model"] {
        refused(named(&[vfio(&other)]), part);
    }
    let iommu = format!("{},iommu=on", vfio(&first));
    refused(named(&[iommu]), "the setting that it had");
    refused(named(&[vfio(&first)]), "the guest's memory");
    memory.write_all_at(&byte, at).unwrap();
    let fault = Parameter::set("fail_state", "-1", &RESUMING.to_string());
    refused(named(&[vfio(&first)]), "the driver refuses");
    drop(fault);

    for function in [&second, &first] {
        let mut command = named(&[vfio(function)]);
        command.args(["--sandbox", "on"]);
        let mut restored = Guest::start_restored(command, moving::NOTICE).unwrap();
        check_and_continue(&mut restored, 1);
        assert!(restored.power_off().unwrap().success());
    }
    for function in [first, second, other] {
        function.bind("virtio-pci").unwrap();
    }
}

#[test]
fn a_guest_moves_with_its_function_and_back() {
    let nic = SriovNic::enable(4).unwrap();
    let ([first, second], devices) = equipment(&nic);
    let here = Host::new("here", devices[0].path());
    let there = Host::new("there", devices[1].path());
    let guest = boot(&here, &first);

    // Within the limits of a sandbox, as destination and then as source.
    let waiting = wait_as(&there, &second, "on");
    let trial = here.try_out(&there, json!({}));
    assert_eq!(trial["movable"], true, "{trial}");
    let verify = json!({ "verify_memory": true });
    let before = read_early();
    let (guest, _) = moving::move_to_waiting_as(guest, waiting, &here, &there, verify.clone());
    let waiting = wait(&here, &first);
    let (mut guest, _) = moving::move_to_waiting_as(guest, waiting, &there, &here, verify);
    // The first part of the state moves while the guest runs.
    assert_eq!(read_early() - before, 2 * EARLY);
    check(&mut guest, 2);
    assert!(guest.power_off().unwrap().success());
    for function in [first, second] {
        function.bind("virtio-pci").unwrap();
    }
}

#[test]
fn a_guest_moves_with_two_functions_or_stays_with_both() {
    let nic = SriovNic::enable(4).unwrap();
    let functions = [0, 1, 2, 3].map(|index| nic.vf(index).unwrap());
    for (index, function) in functions.iter().enumerate() {
        // The second function of each end hands out nothing early.
        let early = if index % 2 == 0 { "Y" } else { "N" };
        let bound = Parameter::set("precopy", "Y", early);
        bind(function);
        drop(bound);
    }
    let (ours, theirs) = functions.split_at(2);
    let [here, there] = ["here", "there"].map(Host::without_nic);
    // In a container, unlike those of the other tests.
    let options = |functions: &[VirtualFunction<'_>]| {
        let names = ["first", "second"].into_iter().zip(functions);
        let option = |(name, function): (_, &VirtualFunction<'_>)| {
            format!("host={},id={name},iommufd=off", function.address())
        };
        names.map(option).collect::<Vec<String>>()
    };
    let wait = |host: &Host, functions: &[VirtualFunction<'_>]| {
        host.wait_as(|command| {
            for option in options(functions) {
                command.args(["--vfio", &option]);
            }
        })
    };
    let small = BellhopArguments::small().unwrap().memory("128M");
    let both = options(ours).iter().fold(small, |arguments, option| {
        arguments.argument("--vfio", option)
    });
    let mut guest = here.boot(both);
    let on = guest.command("mover-on 3000").unwrap();
    assert_eq!(on, json!({ "functions": 2 }));

    // Only one of them has a place.
    let waiting = wait(&there, &theirs[..1]);
    let why = stays(&mut guest, &here, &there, json!({}));
    assert!(why.contains("the VFIO device second"), "{why}");
    drop(waiting);
    // The first function has done the step, and the second one cannot. The first one enters STOP
    // before and after its state is read.
    let steps = [
        (STOP, 2, "does not stop"),
        (STOP_COPY, 1, "does not stop"),
        (RESUMING, 1, "refuses"),
    ];
    for (state, before, said) in steps {
        let waiting = wait(&there, theirs);
        let skip = Parameter::set("fail_skip", "0", &before.to_string());
        let fault = Parameter::set("fail_state", "-1", &state.to_string());
        let why = stays(&mut guest, &here, &there, json!({}));
        assert!(why.contains("second") && why.contains(said), "{why}");
        drop((fault, skip));
        drop(waiting);
    }
    let waiting = wait(&there, theirs);
    let trial = here.try_out(&there, json!({}));
    assert_eq!(trial["movable"], true, "{trial}");
    let verify = json!({ "verify_memory": true });
    let before = read_early();
    let (guest, _) = moving::move_to_waiting_as(guest, waiting, &here, &there, verify.clone());
    let waiting = wait(&here, ours);
    let (mut guest, _) = moving::move_to_waiting_as(guest, waiting, &there, &here, verify);
    assert_eq!(read_early() - before, 2 * EARLY);
    check(&mut guest, 2);
    assert!(guest.power_off().unwrap().success());
    for function in functions {
        function.bind("virtio-pci").unwrap();
    }
}

#[test]
fn a_guest_stays_with_its_function_after_each_failure() {
    let nic = SriovNic::enable(4).unwrap();
    let ([first, second], devices) = equipment(&nic);
    let here = Host::new("here", devices[0].path());
    let there = Host::new("there", devices[1].path());
    let mut guest = boot(&here, &first);
    let without = there.wait();
    let why = stays(&mut guest, &here, &there, json!({}));
    assert!(why.contains("--vfio host=ADDRESS,id=function"), "{why}");
    drop(without);
    let steps = [
        (PRE_COPY, "does not begin the transfer"),
        (STOP_COPY, "does not stop"),
        (RESUMING, "refuses"),
    ];
    for (state, said) in steps {
        let waiting = wait(&there, &second);
        let fault = Parameter::set("fail_state", "-1", &state.to_string());
        let why = stays(&mut guest, &here, &there, json!({}));
        assert!(why.contains(said), "{why}");
        drop(fault);
        drop(waiting);
    }
    // Without the log, pages that the function has written would be lost: the comparison shows it.
    let waiting = wait(&there, &second);
    let fault = Parameter::set("log_lies", "N", "Y");
    let why = stays(&mut guest, &here, &there, json!({ "verify_memory": true }));
    assert!(why.contains("memory"), "{why}");
    drop(fault);
    drop(waiting);
    check(&mut guest, 0);
    assert!(guest.power_off().unwrap().success());

    // A driver without a log.
    let fault = Parameter::set("logs", "Y", "N");
    bind(&first);
    drop(fault);
    let guest = boot(&here, &first);
    let body = json!({ "send": { "destination": there.endpoint() } });
    let answer = here.client().ask("POST", "/v1/vm/migration", Some(&body));
    let answer = answer.unwrap();
    let text = answer.body.to_string();
    assert_eq!(answer.status, 409, "{text}");
    for part in ["does not log the pages", "standby"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(guest.power_off().unwrap().success());
    for function in [first, second] {
        function.bind("virtio-pci").unwrap();
    }
}
