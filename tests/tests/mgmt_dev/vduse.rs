//! Devices in userspace (VDUSE), beside iproute2's `vdpa`. Their management device reports that it
//! has no queues at all, and accepts a device only while a program serves it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use lab::sim::SimDevice;
use vdpa_mgmt::{ClassConfig, Connection, ErrorKind, NewDevice};

use super::same::{negotiated, same};
use super::support::{bellhop, complaint, iproute2, listed, printed};

/// The program that serves the device and ends with it. The vDPA device must be deleted first.
struct Program(Child);

impl Program {
    /// `name` has the lab's prefix.
    fn start(name: &str, class: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lab-vduse"))
            .args([name, class])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        let program = Self(child);
        assert_eq!(line, "ready\n");
        program
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let status = self.0.wait();
        if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("lab-vduse: {status:?}");
        }
    }
}

#[test]
fn a_network_device_in_userspace_is_shown_alike() {
    lab::sim::require_lab().unwrap();
    let _program = Program::start("lab-user", "net");
    let device = SimDevice::add("user", "vduse", &[]).unwrap();
    same(&["mgmtdev", "show"]);
    same(&["mgmtdev", "show", "vduse"]);
    same(&["dev", "show"]);
    same(&["dev", "show", device.name()]);
    same(&["dev", "config", "show"]);
    same(&["dev", "config", "show", device.name()]);
    let text = printed(&bellhop(&["dev", "config", "show", device.name()]));
    assert!(text.contains("mac 02:5e:10:53:11:77 link up"), "{text}");
    let driver = negotiated(device.path());
    same(&["dev", "config", "show", device.name()]);
    // The device has no counters, which both tools report with the kernel's words.
    let arguments = ["dev", "vstats", "show", device.name(), "qidx", "0"];
    let theirs = iproute2(&arguments);
    assert!(
        !theirs.status.success() && theirs.stdout.is_empty(),
        "{theirs:?}"
    );
    complaint(
        &bellhop(&arguments),
        &["counters of queue 0 of lab-user", "not supported"],
    );
    drop(driver);
}

#[test]
fn a_disk_in_userspace_is_shown_alike() {
    lab::sim::require_lab().unwrap();
    let _program = Program::start("lab-user", "block");
    let device = SimDevice::add("user", "vduse", &[]).unwrap();
    same(&["dev", "show"]);
    same(&["dev", "show", device.name()]);
    let text = printed(&bellhop(&["dev", "config", "show", device.name()]));
    assert!(text.contains("capacity 2048"), "{text}");
}

#[test]
fn the_library_and_the_command_make_and_delete_one() {
    lab::sim::require_lab().unwrap();
    let _program = Program::start("lab-user", "net");
    let connection = Connection::open().unwrap();
    let mgmtdev = connection.mgmt_device(&"vduse".parse().unwrap()).unwrap();
    // No limit, and no reason to reject a device.
    assert_eq!(mgmtdev.max_supported_vqs, Some(0));
    assert!(mgmtdev.supports(1) && mgmtdev.supports(2));
    let new = NewDevice::new("lab-user", "vduse".parse().unwrap()).unwrap();
    connection.add(&new).unwrap();
    assert_eq!(connection.device("lab-user").unwrap().max_vqs, Some(2));
    let ClassConfig::Net(net) = connection.config("lab-user").unwrap().class else {
        panic!()
    };
    assert_eq!(net.mtu, Some(1500));
    let error = connection.add(&new).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameTaken, "{error}");
    connection.delete("lab-user").unwrap();
    printed(&bellhop(&[
        "dev", "add", "name", "lab-user", "mgmtdev", "vduse",
    ]));
    printed(&bellhop(&["dev", "del", "lab-user"]));
    // Without a program of that name, the device cannot be created.
    let arguments = ["dev", "add", "name", "lab-nouser", "mgmtdev", "vduse"];
    complaint(&bellhop(&arguments), &["cannot add lab-nouser on vduse"]);
    assert!(
        listed().iter().all(|name| !name.starts_with("lab-")),
        "{:?}",
        listed()
    );
}
