//! The manual's examples: each has a place where it runs; those of the simulator, and those without
//! any NIC, run here.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod examples;

use clap::Parser as _;
use examples::{Desk, Example, Place, examples, places, unlisted_documents, unused_places};
use lab::sim::require_lab;
use launcher::verbs::Arguments;

#[test]
fn every_example_has_a_place() {
    let examples = examples();
    assert!(examples.len() > 10, "{examples:#?}");
    let homeless: Vec<&Example> = examples
        .iter()
        .filter(|one| places(&one.command).is_empty())
        .collect();
    assert!(
        homeless.is_empty(),
        "examples without a place; see tests/tests/examples/mod.rs: {homeless:#?}"
    );
    assert!(unused_places().is_empty(), "{:?}", unused_places());
    let unlisted = unlisted_documents();
    assert!(
        unlisted.is_empty(),
        "documents missing from DOCUMENTS in tests/tests/examples/mod.rs: {unlisted:?}"
    );
}

#[test]
fn commands_in_the_manual_match_the_command_line() {
    let mut tried = 0;
    for Example { document, command } in examples() {
        let words = command.split('#').next().unwrap_or_default();
        let Some(arguments) = words.trim().strip_prefix("cargo lab ") else {
            continue;
        };
        let arguments = ["lab"].into_iter().chain(arguments.split_whitespace());
        if let Err(error) = Arguments::try_parse_from(arguments) {
            panic!("{document}: {command}: {error}");
        }
        tried += 1;
    }
    assert!(tried >= 2, "{tried}");
}

#[test]
fn a_machine_is_run_and_commanded() {
    require_lab().unwrap();
    let desk = Desk::new("examples");
    let said = desk.run(
        Place::Sim,
        &[],
        "vm -X PATCH http://vm/v1/vm -d '{\"state\": \"Stopped\"}'\n\
         kill $daemon\nwait\nbellhop dev del nic0\nbellhop dev del spare0",
    );
    for part in [
        "vdpasim_net",
        "reboot: Power down",
        "\"driver_ok\"",
        "bellhop_vm_state{state=\"Running\"} 1",
    ] {
        assert!(said.contains(part), "no {part:?}");
    }
}

/// The quick start on a machine without a NIC, with the modules of Debian's kernel. The guest has
/// the lab's ramdisk, because the lab host has none. Its user types the lines of the quick start
/// until the host has answered. That ramdisk's shell powers off when it exits.
#[test]
fn a_guest_runs_on_a_host_without_hardware() {
    require_lab().unwrap();
    let [kernel, ramdisk] =
        ["GUEST_KERNEL_STOCK", "GUEST_INITRAMFS_STOCK"].map(|name| std::env::var(name).unwrap());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let wanted = format!("/boot/vmlinuz-{}", release.trim());
    assert!(
        kernel.ends_with(&wanted),
        "the host runs {wanted}, not {kernel}"
    );
    let desk = Desk::new("examples-software");
    let words = [
        ("/boot/vmlinuz-$(uname -r)", kernel.as_str()),
        ("/boot/initrd.img-$(uname -r)", ramdisk.as_str()),
    ];
    let document = include_str!("../../docs/quickstart.md");
    let lines = document.lines();
    let mut typed: Vec<&str> = lines
        .filter_map(|line| line.strip_prefix("(initramfs) "))
        .collect();
    assert_eq!(typed.pop(), Some("poweroff -f"));
    assert!(typed.last().unwrap().starts_with("ping "), "{typed:?}");
    let typed = typed.join("\n") + "\n";
    let reply = "3 packets transmitted, 3 packets received, 0% packet loss";
    assert!(document.lines().any(|line| line == reply));
    let user = move |said: &str| {
        if said.contains(reply) {
            "exit\n".to_owned()
        } else {
            typed.clone()
        }
    };
    let afterwards = "ip link del br0";
    let said = desk.run_with_user(Place::Software, &words, afterwards, user);
    for part in [
        "from=software, because no port of br0 is a NIC",
        reply,
        "reboot: Power down",
    ] {
        assert!(said.contains(part), "no {part:?}");
    }
}
