//! Placement of a machine on its host: memory on one NUMA node, vCPUs on their own CPUs, and a NIC
//! that is near or far.
//!
//! The lab host has two nodes (`numa=fake=2`). The kernel's account shows the actual placement.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::restored::Restored;
use lab::sriov::{SriovNic, VfDevice};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(120);

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// The line of guest RAM in the kernel's account of a process's mappings and nodes.
fn guest_ram(pid: u32) -> String {
    let maps = read(format!("/proc/{pid}/numa_maps"));
    let line = maps.lines().find(|line| line.contains("memfd:guest-ram"));
    line.unwrap().to_owned()
}

/// The CPUs that a thread of the process may run on.
fn cpus(pid: u32, thread: &str) -> String {
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let task = task.unwrap().path();
        if read(task.join("comm")).trim() == thread {
            let status = read(task.join("status"));
            let mut lines = status.lines();
            let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            return list.unwrap().trim().to_owned();
        }
    }
    panic!("no thread {thread}");
}

fn socket() -> PathBuf {
    std::env::temp_dir().join(format!("lab-numa-{}.socket", std::process::id()))
}

#[test]
fn memory_vcpus_and_a_nic_are_where_they_were_asked_for() {
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let address = device.function().address().to_owned();
    let node = Restored::keep(format!("/sys/bus/pci/devices/{address}/numa_node")).unwrap();
    let node_of_nic = |number: &str| node.set(number).unwrap();
    assert_eq!(read("/sys/devices/system/node/has_memory").trim(), "0-1");
    node_of_nic("0");
    let client = Client::new(&socket());
    let arguments = BellhopArguments::small()
        .unwrap()
        .silence(SILENCE)
        .processors(2)
        .memory("size=256M,host_numa_node=1")
        .argument("--cpu-affinity", "1:0-1")
        .argument(
            "--vdpa",
            &format!("path={},id=far", device.path().display()),
        )
        .argument("--api-socket", &socket().display().to_string());
    let mut guest = Guest::start(&arguments).unwrap();
    let pid = guest.pid();

    // All of it is pinned for the device, so all of it is resident, and on node 1.
    let ram = guest_ram(pid);
    println!("{ram}");
    assert!(ram.contains(" bind:1 "), "{ram}");
    assert!(ram.contains(" N1=65536") && !ram.contains(" N0="), "{ram}");
    assert_eq!(cpus(pid, "vcpu0"), "1");
    assert_eq!(cpus(pid, "vcpu1"), "0-1");
    assert_eq!(cpus(pid, "bellhop"), "0-1");
    assert_eq!(guest.command("info").unwrap()["cpus_online"], 2);

    let far = client.get("/v1/vm/nics/far").unwrap();
    assert_eq!(far["numa_node"], 0, "{far}");
    let warning = far["numa_warning"].as_str().unwrap();
    assert!(warning.contains("guest memory on node 1"), "{warning}");
    assert!(guest.console().contains(warning), "it is in the log too");
    let config = client.get("/v1/vm/config").unwrap();
    assert_eq!(config["memory"]["host_numa_node"], 1, "{config}");
    assert_eq!(config["cpu_affinity"], json!([[1], [0, 1]]));

    // A reboot keeps the whole placement.
    guest.command("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    assert_eq!(cpus(pid, "vcpu0"), "1");
    assert!(guest_ram(pid).contains(" bind:1 "));
    assert!(guest.power_off().unwrap().success());

    node_of_nic("1");
    let mut guest = Guest::start(&arguments).unwrap();
    let near = client.get("/v1/vm/nics/far").unwrap();
    assert_eq!(
        (&near["numa_node"], &near["numa_warning"]),
        (&json!(1), &Value::Null)
    );
    assert_eq!(guest.command("info").unwrap()["cpus_online"], 2);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn places_that_are_not_there_are_named() {
    lab::sim::require_lab().unwrap();
    for (memory, affinity, words) in [
        ("size=64M,host_numa_node=2", "0:1", "this host has node 0-1"),
        (
            "size=64M,host_numa_node=65535",
            "0:1",
            "host_numa_node 65535",
        ),
        ("size=5G,host_numa_node=1", "0:1", "more than the"),
        ("64M", "0:2", "this host has 0-1 online"),
        ("64M", "0:1:1", "3 lists for 2 vCPUs"),
        ("64M", "0", "1 lists for 2 vCPUs"),
        (
            "size=64M,hugepages=2M,host_numa_node=1",
            "0:1",
            "huge pages",
        ),
    ] {
        let arguments = BellhopArguments::small()
            .unwrap()
            .processors(2)
            .memory(memory)
            .argument("--cpu-affinity", affinity);
        let (status, said) = Guest::run_to_end(&arguments, SILENCE).unwrap();
        println!("{said}");
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn huge_pages_come_from_the_node_or_not_at_all() {
    lab::sim::require_lab().unwrap();
    let pools = [0, 1].map(|node| {
        Restored::keep(format!(
            "/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"
        ))
        .unwrap()
    });
    let set = |pages: [&str; 2]| {
        for (pool, pages) in pools.iter().zip(pages) {
            pool.set(pages).unwrap();
        }
    };
    let arguments = BellhopArguments::small()
        .unwrap()
        .silence(SILENCE)
        .memory("size=256M,hugepages=2M,host_numa_node=1");
    // There are enough pages in all, but not on the node: a reservation would succeed.
    set(["128", "64"]);
    let (status, said) = Guest::run_to_end(&arguments, SILENCE).unwrap();
    println!("{said}");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("NUMA node 1 has too few"), "{said}");
    set(["0", "128"]);
    let mut guest = Guest::start(&arguments).unwrap();
    let ram = guest_ram(guest.pid());
    println!("{ram}");
    assert!(ram.contains(" bind:1 ") && ram.contains(" N1=128"), "{ram}");
    guest.command("info").unwrap();
    assert!(guest.power_off().unwrap().success());
}
