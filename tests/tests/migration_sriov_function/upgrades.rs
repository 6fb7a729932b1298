//! Another program continues the guest in the same process, and the present one if that fails. One
//! function is opened by iommufd, the other one in a container.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::sriov::{SriovNic, VirtualFunction};
use lab::temp_path::TempPath;
use serde_json::{Value, json};

use super::live::{ask_upgrade, wait_upgrade};
use super::moving::Host;
use super::{Parameter, RESUMING, STOP_COPY, bind, check, check_and_continue, vfio};

/// A copy of the program.
fn copy(name: &str) -> TempPath {
    let path = TempPath::new(name);
    fs::copy(std::env::var_os("BELLHOP").unwrap(), path.path()).unwrap();
    fs::set_permissions(path.path(), PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// Checks that an upgrade fails for this reason, and that the guest continues with its functions.
#[track_caller]
fn fails(guest: &mut Guest, client: &Client, spurious: u64, why: &str) {
    let vm = wait_upgrade(guest, client, |vm| vm["upgrade_error"].is_string());
    let error = vm["upgrade_error"].as_str().unwrap();
    assert!(error.contains(why), "{vm}");
    let now = (&vm["upgrades"], &vm["state"]);
    assert_eq!(now, (&json!(0), &json!("Running")), "{vm}");
    check_and_continue(guest, spurious);
    guest.command("mover-on 3000").unwrap();
}

/// Has an upgrade refused before the guest stops.
#[track_caller]
fn refused(client: &Client, program: &Path, words: &str) {
    let body = json!({ "program": program });
    let answer = client.ask("POST", "/v1/vm/upgrade", Some(&body)).unwrap();
    let text = answer.body.to_string();
    assert!(answer.status == 409 && text.contains(words), "{text}");
}

/// The file through which a function is opened by iommufd.
fn own_file(function: &VirtualFunction<'_>) -> PathBuf {
    let listed = Path::new("/sys/bus/pci/devices").join(function.address());
    let mut listed = fs::read_dir(listed.join("vfio-dev")).unwrap();
    let name = listed.next().unwrap().unwrap().file_name();
    Path::new("/dev/vfio/devices").join(name)
}

#[test]
fn one_program_after_the_other_continues_a_guest_with_its_functions() {
    let nic = SriovNic::enable(3).unwrap();
    let functions = [0, 1, 2].map(|index| nic.vf(index).unwrap());
    let [first, second, plain] = &functions;
    // An upgrade needs no log.
    let unlogged = Parameter::set("logs", "Y", "N");
    [first, second].into_iter().for_each(bind);
    drop(unlogged);
    plain.bind("vfio-pci").unwrap();
    let host = Host::without_nic("upgraded");
    let client = host.client();
    let small = BellhopArguments::small().unwrap().memory("128M");
    let contained = format!("host={},id=second,iommufd=off", second.address());
    let mut guest = host.boot(
        small
            .argument("--vfio", &vfio(first))
            .argument("--vfio", &contained),
    );
    let on = guest.command("mover-on 3000").unwrap();
    assert_eq!(on, json!({ "functions": 2 }));
    let (present, other) = (
        PathBuf::from(std::env::var_os("BELLHOP").unwrap()),
        copy("bellhop-other"),
    );

    // Refused: one whose driver moves no state, and one that no program could open again.
    let body = json!({ "host": plain.address() });
    let path = "/v1/vm/vfio/plain";
    let plugged = client.ask("PUT", path, Some(&body)).unwrap();
    assert_eq!(plugged.status, 201, "{}", plugged.body);
    refused(&client, other.path(), "vfio-pci cannot move the state");
    client.ask("DELETE", path, None).unwrap();
    wait_upgrade(&guest, &client, |_| {
        client.ask("GET", path, None).unwrap().status == 404
    });
    let file = own_file(first);
    let hidden = file.with_extension("hidden");
    fs::rename(&file, &hidden).unwrap();
    refused(&client, other.path(), "again (No such file");
    fs::rename(&hidden, &file).unwrap();

    // It never left, as a function does not stop or the program is gone.
    let fault = Parameter::set("fail_state", "-1", &STOP_COPY.to_string());
    ask_upgrade(&client, other.path());
    fails(&mut guest, &client, 0, "does not stop");
    drop(fault);
    let vanishing = copy("bellhop-vanishing");
    ask_upgrade(&client, vanishing.path());
    fs::remove_file(vanishing.path()).unwrap();
    fails(&mut guest, &client, 0, "No such file");

    // The other program cannot load the second state: the present one opens both again.
    let once = Parameter::set("fail_times", "-1", "1");
    let skip = Parameter::set("fail_skip", "0", "1");
    let fault = Parameter::set("fail_state", "-1", &RESUMING.to_string());
    ask_upgrade(&client, other.path());
    fails(&mut guest, &client, 1, "second");
    drop((fault, skip, once));

    for (upgrade, program) in [(1, other.path()), (2, &present)] {
        ask_upgrade(&client, program);
        let vm = wait_upgrade(&guest, &client, |vm| vm["upgrades"] == upgrade);
        assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
        println!("the guest was stopped for {} ms", vm["upgrade_downtime_ms"]);
        let executed = fs::read_link(format!("/proc/{}/exe", guest.pid()));
        assert_eq!(executed.unwrap(), program);
    }
    check(&mut guest, 3);
    assert!(guest.power_off().unwrap().success());
    for function in &functions {
        function.bind("virtio-pci").unwrap();
    }
}
