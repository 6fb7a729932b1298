//! A fake sysfs, and this host's own.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A directory that looks like sysfs; removed when dropped.
struct Tree(Host);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("host-{}-{count}", std::process::id());
        let sysfs = std::env::temp_dir().join(name);
        for (path, content) in files {
            let path = sysfs.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fs::create_dir_all(&sysfs).unwrap();
        Self(Host { sysfs })
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0.sysfs);
    }
}

fn cpus(lists: &[&str]) -> Vec<HostCpus> {
    lists.iter().map(|list| list.parse().unwrap()).collect()
}

#[test]
fn cpus_must_be_online() {
    let tree = Tree::new(&[("devices/system/cpu/online", "0-3,6\n")]);
    tree.0.check_cpus(&cpus(&["0-3", "6"])).unwrap();
    let error = tree.0.check_cpus(&cpus(&["0", "3-5"])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cpu_affinity: vCPU 1 needs CPUs 3-5, but this host has 0-3,6 online"
    );
    let none = Tree::new(&[]);
    none.0.check_cpus(&[]).unwrap();
    let error = none.0.check_cpus(&cpus(&["0"])).unwrap_err();
    assert!(error.to_string().starts_with("cannot read"), "{error}");
    // Content that no kernel writes.
    let strange = Tree::new(&[("devices/system/cpu/online", "0-99999999\u{0}")]);
    assert!(strange.0.check_cpus(&cpus(&["0"])).is_err());
}

#[test]
fn a_node_must_be_there_and_large_enough() {
    let tree = Tree::new(&[
        ("devices/system/node/has_memory", "0-1\n"),
        (
            "devices/system/node/node1/meminfo",
            "Node 1 MemTotal:        1048576 kB\nNode 1 MemFree:          12 kB\n",
        ),
    ]);
    tree.0.check_node(1, 1 << 30).unwrap();
    let error = tree.0.check_node(1, (1 << 30) + 1).unwrap_err();
    assert!(error.to_string().contains("more than the 1 GiB"), "{error}");
    let error = tree.0.check_node(2, 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "memory: host_numa_node 2 has no memory or does not exist; this host has node 0-1"
    );
    let error = Tree::new(&[]).0.check_node(0, 1).unwrap_err();
    assert!(error.to_string().contains("CONFIG_NUMA"), "{error}");
}

#[test]
fn a_device_is_on_the_node_of_its_nearest_parent() {
    let tree = Tree::new(&[
        ("devices/pci0000:00/numa_node", "0\n"),
        ("devices/pci0000:00/0000:00:01.0/numa_node", "1\n"),
        ("devices/pci0000:00/0000:00:01.0/vdpa0/vhost-vdpa-0/dev", ""),
        ("devices/pci0000:00/0000:00:02.0/numa_node", "-1\n"),
        ("devices/pci0000:00/0000:00:02.0/vdpa1/dev", ""),
        ("devices/vdpasim_net/vdpa2/dev", ""),
    ]);
    let node = |path: &str| tree.0.node_at(&tree.0.sysfs.join("devices").join(path));
    assert_eq!(node("pci0000:00/0000:00:01.0/vdpa0/vhost-vdpa-0"), Some(1));
    assert_eq!(node("pci0000:00/0000:00:02.0/vdpa1"), Some(0));
    assert_eq!(node("vdpasim_net/vdpa2"), None);
    assert_eq!(node("nowhere"), None);
    // A link that leads out of sysfs is ignored.
    let out = tree.0.sysfs.join("out");
    std::os::unix::fs::symlink(std::env::temp_dir(), &out).unwrap();
    assert_eq!(tree.0.node_at(&out), None);
}

#[test]
fn a_device_has_the_drivers_of_its_parents() {
    let tree = Tree::new(&[
        ("devices/0000:00:01.0/vdpa0/vhost-vdpa-0/dev", ""),
        ("devices/vdpasim_net/vdpa1/dev", ""),
    ]);
    let devices = tree.0.sysfs.join("devices");
    let driver = devices.join("0000:00:01.0/driver");
    std::os::unix::fs::symlink("../../bus/pci/drivers/mlx5_core", driver).unwrap();
    let bound = |path: &str| tree.0.is_bound_at(&devices.join(path), "mlx5_core");
    assert!(bound("0000:00:01.0/vdpa0/vhost-vdpa-0"));
    assert!(!bound("vdpasim_net/vdpa1") && !bound("nowhere"));
}

#[test]
fn no_device_has_no_node() {
    let host = Host::new();
    for path in ["/", "/dev/null", "/proc/self/status"] {
        let file = fs::metadata(path).unwrap();
        assert_eq!(host.node_of(&file), None, "{path}");
        assert!(!host.is_bound_to(&file, "mlx5_core"), "{path}");
    }
}

#[test]
fn only_two_different_nodes_are_worth_a_warning() {
    for (device, memory) in [
        (None, None),
        (Some(0), None),
        (None, Some(0)),
        (Some(1), Some(1)),
    ] {
        assert_eq!(numa_warning(device, memory), None);
    }
    let warning = numa_warning(Some(1), Some(0)).unwrap();
    assert!(
        warning.contains("set memory.host_numa_node to 1"),
        "{warning}"
    );
}
