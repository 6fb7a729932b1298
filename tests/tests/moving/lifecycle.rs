//! Changes of a VM without a migration: a hot swap, a live upgrade, and a snapshot that another
//! host restores.

use std::path::Path;
use std::process::Command;

use lab::guest::{BellhopArguments, Guest};
use lab::temp_path::TempPath;
use serde_json::{Value, json};

use crate::live::{ask_upgrade, swap_nic, wait_upgrade};
use crate::moving::{Host, NOTICE};

/// The NIC moves to another device and back.
#[track_caller]
pub(crate) fn swap(host: &Host, [own, other]: [&Path; 2]) {
    for path in [other, own] {
        swap_nic(&host.client(), path);
    }
}

/// The same program continues the VM in the same process.
#[track_caller]
pub(crate) fn upgrade(guest: &Guest, host: &Host) {
    let client = host.client();
    ask_upgrade(&client, Path::new(&std::env::var_os("BELLHOP").unwrap()));
    let ended = |vm: &Value| vm["upgrades"] == 1 || vm["upgrade_error"].is_string();
    let vm = wait_upgrade(guest, &client, ended);
    assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
}

/// Saves the VM, stops it, and restores it on the device of `there`.
#[track_caller]
pub(crate) fn save_and_restore(
    mut guest: Guest,
    here: &Host,
    there: &Host,
    files: BellhopArguments,
) -> Guest {
    let saved = TempPath::new("iommu-snapshot");
    let client = here.client();
    let body = json!({ "path": saved.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    let stop = json!({ "state": "Stopped" });
    client.done("PATCH", "/v1/vm", Some(&stop)).unwrap();
    assert!(guest.wait_exit(NOTICE).unwrap().success());
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", saved.text()])
        .args(files.allow_boot_files())
        .args(["--vdpa", there.vdpa()]);
    Guest::start_restored(command, NOTICE).unwrap()
}
