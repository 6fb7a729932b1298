//! The next commands on this host, up to a VM on a vDPA NIC. Names only files, devices
//! and functions that exist.

use bellhop_api::address::SOCKET;

use super::devices;
use super::host::Host;
use super::modules::{Modules, Presence, TUN, VDPA_SIM_NET, VDUSE, VHOST_VDPA};
use super::nics;

/// The host's network interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Possible paths of the daemon's unit.
const UNITS: [&str; 3] = [
    "/etc/systemd/system/bellhop.service",
    "/usr/lib/systemd/system/bellhop.service",
    "/lib/systemd/system/bellhop.service",
];

/// The commands, in order; none if the host has nothing to create a NIC from.
pub(super) fn commands(host: &Host) -> Vec<String> {
    let mut commands = Vec::new();
    let Some(nic) = nic(host, &mut commands) else {
        return commands;
    };
    let boot = boot_files(host);
    let has_daemon = host.exists(SOCKET);
    if !has_daemon && UNITS.iter().any(|unit| host.exists(unit)) {
        commands.push("systemctl start bellhop".to_owned());
    } else if !has_daemon {
        let nic = match nic {
            Nic::There(path) => format!("--vdpa path={path}"),
            Nic::From(source) => {
                commands.push(format!("bellhop nic create nic0 --from {source}"));
                "--vdpa path=/dev/vhost-vdpa-N    (printed by the previous command)".to_owned()
            }
            Nic::Software(bridge) => format!("--nic bridge={bridge}"),
        };
        commands.push(format!("bellhop run {boot} {nic}"));
        return commands;
    }
    let nic = match nic {
        Nic::There(path) => format!("path={path}"),
        Nic::From(source) => format!("from={source}"),
        Nic::Software(bridge) => format!("from=software,bridge={bridge}"),
    };
    commands.push(format!("bellhop vm create test {boot} --nic {nic}"));
    commands.push("bellhop vm console test".to_owned());
    commands
}

/// The source of a VM's NIC.
enum Nic {
    /// A device that no visible process has open.
    There(String),
    /// A NIC created on this function.
    From(String),
    /// A NIC without hardware, on this bridge.
    Software(String),
}

/// The best source on this host; adds the commands that it needs.
fn nic(host: &Host, commands: &mut Vec<String>) -> Option<Nic> {
    if let Some(number) = devices::free(host) {
        return Some(Nic::There(format!("/dev/vhost-vdpa-{number}")));
    }
    let functions = nics::functions(host).unwrap_or_default();
    if let Some(function) = functions.iter().find(|function| function.is_source()) {
        return Some(Nic::From(format!("pci/{}", function.address)));
    }
    let modules = Modules::of(host);
    if let Some(bridge) = software(host, &modules, commands) {
        return Some(Nic::Software(bridge));
    }
    let simulator = modules.presence(VDPA_SIM_NET);
    if simulator == Presence::Loadable {
        commands.push(format!("modprobe {}", VDPA_SIM_NET.name));
    }
    let is_possible = simulator.is_possible();
    is_possible.then(|| Nic::From("vdpasim_net".to_owned()))
}

/// The bridge for a NIC without hardware, if this host can have one. Adds the commands before it.
fn software(host: &Host, modules: &Modules<'_>, commands: &mut Vec<String>) -> Option<String> {
    let needed = [VDUSE, VHOST_VDPA, TUN];
    if !needed
        .iter()
        .all(|&one| modules.presence(one).is_possible())
    {
        return None;
    }
    let missing = needed
        .iter()
        .filter(|&&one| !modules.presence(one).is_here());
    let missing: Vec<&str> = missing.map(|module| module.name).collect();
    if !missing.is_empty() {
        commands.push(format!("modprobe -a {}", missing.join(" ")));
    }
    let interfaces = host.sysfs_names(INTERFACES).unwrap_or_default();
    let mut bridges = interfaces
        .iter()
        .filter(|name| host.exists(&format!("{INTERFACES}/{name}/bridge")));
    let bridge = bridges.next().map_or("br0", String::as_str);
    if !interfaces.iter().any(|name| name == bridge) {
        commands.push(format!("ip link add {bridge} type bridge"));
        commands.push(format!("ip link set {bridge} up"));
    }
    Some(bridge.to_owned())
}

/// The options for a guest with this host's kernel; KERNEL is a placeholder if the host has none.
fn boot_files(host: &Host) -> String {
    let Ok(release) = Modules::of(host).release else {
        return "--kernel KERNEL".to_owned();
    };
    let kernel = format!("/boot/vmlinuz-{release}");
    if !host.exists(&kernel) {
        return "--kernel KERNEL".to_owned();
    }
    // The names on Debian and Ubuntu; on Fedora and RHEL.
    let names = [
        format!("/boot/initrd.img-{release}"),
        format!("/boot/initramfs-{release}.img"),
    ];
    let initramfs = names.iter().find(|name| host.exists(name));
    let initramfs = initramfs.map(|name| format!(" --initramfs {name}"));
    format!("--kernel {kernel}{}", initramfs.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::*;

    fn with_kernel() -> Tree {
        let tree = Tree::new();
        tree.file("/proc/sys/kernel/osrelease", "6.12\n")
            .file("/lib/modules/6.12/modules.dep", "a/vdpa_sim_net.ko: b\n")
            .file("/boot/vmlinuz-6.12", "")
            .file("/boot/initrd.img-6.12", "");
        tree
    }

    const BOOT: &str = "--kernel /boot/vmlinuz-6.12 --initramfs /boot/initrd.img-6.12";

    #[test]
    fn a_host_without_a_nic_simulates_one() {
        let tree = with_kernel();
        let wanted = [
            "modprobe vdpa_sim_net".to_owned(),
            "bellhop nic create nic0 --from vdpasim_net".to_owned(),
            format!(
                "bellhop run {BOOT} --vdpa path=/dev/vhost-vdpa-N    (printed by the previous \
                 command)"
            ),
        ];
        assert_eq!(commands(&tree.host()), wanted);
        assert!(commands(&Tree::new().host()).is_empty());
        assert!(commands(&Tree::without_sysfs().host()).is_empty());
    }

    #[test]
    fn a_host_with_vduse_has_a_nic_without_hardware() {
        let tree = with_kernel();
        let modules = "a/vduse.ko: b\na/vhost_vdpa.ko: b\na/tun.ko:\na/vdpa_sim_net.ko: b\n";
        tree.file("/lib/modules/6.12/modules.dep", modules);
        let all = commands(&tree.host());
        let wanted = [
            "modprobe -a vduse vhost_vdpa tun",
            "ip link add br0 type bridge",
            "ip link set br0 up",
        ];
        assert_eq!(all[..3], wanted);
        assert_eq!(all[3], format!("bellhop run {BOOT} --nic bridge=br0"));
        // A bridge that exists is used as it is.
        tree.file("/sys/class/net/lan/bridge/stp_state", "0\n");
        let all = commands(&tree.host());
        assert_eq!(all[1], format!("bellhop run {BOOT} --nic bridge=lan"));
        tree.file(SOCKET, "");
        let create = format!("bellhop vm create test {BOOT} --nic from=software,bridge=lan");
        assert_eq!(commands(&tree.host())[1], create);
    }

    #[test]
    fn a_function_is_the_daemons() {
        let tree = with_kernel();
        let function = "/sys/bus/pci/devices/0000:01:00.0";
        tree.file(&format!("{function}/sriov_totalvfs"), "8\n")
            .link(&format!("{function}/driver"), "../drivers/mlx5_core")
            .file("/usr/lib/systemd/system/bellhop.service", "");
        let create = format!("bellhop vm create test {BOOT} --nic from=pci/0000:01:00.0");
        let wanted = [
            "systemctl start bellhop",
            &create,
            "bellhop vm console test",
        ];
        assert_eq!(commands(&tree.host()), wanted);
        tree.file(SOCKET, "");
        assert_eq!(commands(&tree.host()), wanted[1..]);
    }

    #[test]
    fn a_free_device_is_used_as_it_is() {
        let tree = Tree::new();
        tree.file("/dev/vhost-vdpa-3", "")
            .file("/sys/devices/sim/nic0/vhost-vdpa-3/dev", "511:0\n")
            .link("/sys/bus/vdpa/devices/nic0", "../../../devices/sim/nic0")
            .link(
                "/sys/devices/sim/nic0/driver",
                "../../../bus/vdpa/drivers/vhost_vdpa",
            );
        let wanted = "bellhop run --kernel KERNEL --vdpa path=/dev/vhost-vdpa-3";
        assert_eq!(commands(&tree.host()), [wanted]);
    }
}
