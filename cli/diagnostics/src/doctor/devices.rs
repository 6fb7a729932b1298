//! vDPA devices: their drivers, and whether a VM could open them.
//!
//! The checks never open a device, because that resets it. access(2) shows whether this user may
//! open it; `/proc` shows whether a process has it open.

use bellhop_common::error::Error;
use rustix::io::Errno;
use vdpa::causes::in_one_line;
use vdpa::device::holder::Holder;

use super::finding::{Finding, first};
use super::host::{Host, is_plain};
use super::modules::{Modules, Presence, VDPA_SIM_NET, VDUSE};
use super::nics;

/// Directory of the vDPA bus.
const VDPA: &str = "/sys/bus/vdpa/devices";

/// The most devices that are listed.
const SHOWN_MAX: usize = 64;

/// A vDPA device.
#[derive(Debug)]
struct Device {
    name: String,
    parent: Option<String>,
    driver: Option<String>,
    /// The number in `vhost-vdpa-N`.
    file: Option<u32>,
}

impl Device {
    fn of(host: &Host, name: String) -> Self {
        let path = format!("{VDPA}/{name}");
        let file = host.names(&path).unwrap_or_default();
        Self {
            parent: host.parent_name(&path),
            driver: host.link_name(&format!("{path}/driver")),
            file: file
                .iter()
                .find_map(|name| name.strip_prefix("vhost-vdpa-")?.parse().ok()),
            name,
        }
    }

    /// Whether its parent is a PCI function, such as `0000:01:00.2`.
    fn is_hardware(&self) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|parent| parent.contains(':') || parent.starts_with("mlx5_core."))
    }
}

fn devices(host: &Host) -> Result<Vec<Device>, Error> {
    let names = host.sysfs_names(VDPA)?;
    let devices = names.into_iter().map(|name| Device::of(host, name));
    Ok(devices.collect())
}

/// Whether guest memory is pinned for devices of this host, as far as can be determined: hardware
/// pins it, the simulator does if configured so.
pub(super) fn pin_memory(host: &Host) -> bool {
    devices(host).is_ok_and(|devices| devices.iter().any(Device::is_hardware))
        || nics::functions(host).is_ok_and(|functions| !functions.is_empty())
        || host
            .text("/sys/module/vdpa_sim/parameters/use_va")
            .is_ok_and(|value| value == "N")
}

/// The number of the first `/dev/vhost-vdpa-N` that no visible process holds.
pub(super) fn free(host: &Host) -> Option<u32> {
    let devices = devices(host).unwrap_or_default();
    let is_vhost = |device: &&Device| device.driver.as_deref() == Some("vhost_vdpa");
    let mut files = devices
        .iter()
        .filter(is_vhost)
        .filter_map(|device| Some((&device.name, device.file?)));
    let free = files.find(|(name, number)| holders(host, name, *number).is_empty());
    free.map(|(_, number)| number)
}

fn holders(host: &Host, name: &str, number: u32) -> Vec<Holder> {
    let number = host.text(&format!("{VDPA}/{name}/vhost-vdpa-{number}/dev"));
    host.holders(number.as_deref().unwrap_or_default())
}

/// Checks all devices.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let devices = match devices(host) {
        Ok(devices) => devices,
        Err(why) => return vec![Finding::unread("vDPA devices", &why)],
    };
    if devices.is_empty() {
        return vec![none(host)];
    }
    first(&devices, SHOWN_MAX, "vDPA devices", |device| {
        describe(host, device)
    })
}

fn none(host: &Host) -> Finding {
    const NAME: &str = "vDPA devices";
    let make = "bellhop dev add name nic0 mgmtdev NAME    (names: bellhop mgmtdev show)";
    if nics::functions(host).is_ok_and(|functions| !functions.is_empty()) {
        return Finding::warning(NAME, "none yet").mend(make);
    }
    let modules = Modules::of(host);
    if modules.presence(VDUSE).is_possible() {
        let load = format!("modprobe -a {} vhost_vdpa tun", VDUSE.name);
        return Finding::warning(
            NAME,
            "none yet, and no NIC of this host provides one; software does (VDUSE)",
        )
        .mend(load)
        .mend("bellhop nic create sw0 --from software --connect bridge=BRIDGE");
    }
    if modules.presence(VDPA_SIM_NET).is_possible() {
        let load = format!("modprobe {} && {make}", VDPA_SIM_NET.name);
        return Finding::warning(
            NAME,
            "none yet, and no NIC of this host provides one; the simulator does",
        )
        .mend(load);
    }
    if let Presence::Unknown(why) = modules.presence(VDPA_SIM_NET) {
        return Finding::unknown(NAME, format!("none; cannot check for the simulator: {why}"));
    }
    Finding::missing(NAME, "none, and nothing on this host provides one").mend(
        "install a NIC whose driver provides vDPA devices, or a kernel with CONFIG_VDPA_SIM_NET=m",
    )
}

fn describe(host: &Host, device: &Device) -> Finding {
    let Device {
        name,
        parent,
        driver,
        file,
    } = device;
    let parent = parent.as_deref().unwrap_or("unknown");
    let Some(driver) = driver else {
        let finding = Finding::warning(name, format!("of {parent}, bound to no driver"));
        return if is_plain(name) {
            finding.mend(format!(
                "modprobe vhost_vdpa; echo {name} >/sys/bus/vdpa/drivers/vhost_vdpa/bind"
            ))
        } else {
            finding
        };
    };
    let about = format!("of {parent}, {driver}");
    if driver != "vhost_vdpa" {
        return Finding::ok(name, format!("{about}: used by this host, not for VMs"));
    }
    let Some(number) = file else {
        return Finding::unknown(
            name,
            format!("{about}; sysfs shows no vhost-vdpa-N below it"),
        );
    };
    let path = format!("/dev/vhost-vdpa-{number}");
    match host.may_open(&path) {
        Ok(()) => {
            let holders = holders(host, name, *number);
            let holders: Vec<String> = holders.iter().map(ToString::to_string).collect();
            let state = if holders.is_empty() {
                "can be opened, and no visible process holds it".to_owned()
            } else {
                format!("held by {}", holders.join(", "))
            };
            Finding::ok(name, format!("{about}, {path}: {state}"))
        }
        Err(Errno::NOENT) => Finding::missing(name, format!("{about}; {path} does not exist"))
            .mend(format!("in a container: start it with --device {path}")),
        Err(Errno::ACCESS) => without_rights(host, name, &about, &path),
        Err(error) => Finding::missing(name, format!("{about}, {path}: {error}")),
    }
}

/// The udev rule that gives a group access.
///
/// The character device has neither class nor bus, so the kernel sends no event for it and no rule
/// can name it (`vhost_vdpa_probe`; `dev_uevent_filter`). Its vDPA device has both: its bind event
/// arrives as soon as the file exists.
fn without_rights(host: &Host, name: &str, about: &str, path: &str) -> Finding {
    let owner = host.owner(path);
    let shown = owner
        .as_ref()
        .map_or_else(|why| in_one_line(why), ToString::to_string);
    let found = format!("{about}, {path}: this user may not open it ({shown})");
    let finding = Finding::missing(name, found);
    let group = owner.ok().and_then(|owner| {
        let usable = owner.mode & 0o060 == 0o060;
        owner.group.filter(|group| usable && group != "root")
    });
    if let Some(group) = group {
        return finding.mend(format!("usermod -aG {group} USER    (then log in again)"));
    }
    finding
        .mend(format!("now: chgrp kvm {path} && chmod 0660 {path}"))
        .mend("always: in /etc/udev/rules.d/60-vhost-vdpa.rules, then udevadm control --reload:")
        .mend(UDEV_RULE)
        .mend("usermod -aG kvm USER    (then log in again)")
}

/// `%p` is the vDPA device's path; the files below it have their devices' names.
const UDEV_RULE: &str = concat!(
    r#"ACTION=="bind", SUBSYSTEM=="vdpa", DRIVER=="vhost_vdpa", RUN+="/bin/sh -c 'cd /sys%p "#,
    r#"&& for n in vhost-vdpa-*; do chgrp kvm /dev/$$n && chmod 0660 /dev/$$n; done'""#
);

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    /// A device below its parent, and the bus's link to it.
    fn device(tree: &Tree, parent: &str, name: &str, driver: Option<&str>) {
        let real = format!("/sys/devices/{parent}/{name}");
        tree.directory(&real);
        tree.link(
            &format!("{VDPA}/{name}"),
            &format!("../../../devices/{parent}/{name}"),
        );
        if let Some(driver) = driver {
            let target = format!("../../../bus/vdpa/drivers/{driver}");
            tree.link(&format!("{real}/driver"), &target);
        }
    }

    fn with_file(tree: &Tree, parent: &str, name: &str, file: &str) {
        device(tree, parent, name, Some("vhost_vdpa"));
        tree.file(
            &format!("/sys/devices/{parent}/{name}/{file}/dev"),
            "511:0\n",
        );
    }

    #[test]
    fn a_device_that_can_be_opened() {
        let tree = Tree::new();
        with_file(&tree, "0000:01:00.2", "nic0", "vhost-vdpa-7");
        tree.file("/dev/vhost-vdpa-7", "");
        let host = tree.host();
        let finding = &check(&host)[0];
        assert_eq!((finding.name.as_str(), finding.state), ("nic0", State::Ok));
        assert!(
            finding
                .found
                .contains("of 0000:01:00.2, vhost_vdpa, /dev/vhost-vdpa-7")
        );
        assert!(pin_memory(&host));
    }

    #[test]
    fn no_rights_and_no_file() {
        let tree = Tree::new();
        with_file(&tree, "vdpasim_net", "sim0", "vhost-vdpa-0");
        let finding = &check(&tree.host())[0];
        assert_eq!(finding.state, State::Missing);
        assert!(finding.remedy[0].contains("--device /dev/vhost-vdpa-0"));
        tree.file("/dev/vhost-vdpa-0", "");
        let host = tree.host_without_rights();
        let finding = &check(&host)[0];
        assert_eq!(finding.state, State::Missing);
        assert!(finding.remedy.contains(&UDEV_RULE.to_owned()));
        assert!(!pin_memory(&host));
        tree.file("/sys/module/vdpa_sim/parameters/use_va", "N\n");
        assert!(pin_memory(&host));
    }

    #[test]
    fn other_drivers_and_none() {
        let tree = Tree::new();
        device(&tree, "0000:01:00.2", "container", Some("virtio_vdpa"));
        device(&tree, "0000:01:00.3", "idle", None);
        device(&tree, "0000:01:00.3", "rm -rf", None);
        device(&tree, "0000:01:00.3", "young", Some("vhost_vdpa"));
        let findings = check(&tree.host());
        assert!(findings[0].found.contains("not for VMs"));
        assert!(findings[1].remedy[0].contains("echo idle >/sys/bus/vdpa/drivers/vhost_vdpa/bind"));
        assert!(findings[2].remedy.is_empty());
        assert_eq!(findings[3].state, State::Unknown);
    }

    #[test]
    fn no_devices() {
        let tree = Tree::new();
        assert_eq!(check(&tree.host())[0].state, State::Unknown);
        tree.file("/proc/sys/kernel/osrelease", "6.12");
        tree.file("/lib/modules/6.12/modules.dep", "");
        assert_eq!(check(&tree.host())[0].state, State::Missing);
        tree.file("/sys/module/vdpa_sim_net/initstate", "live");
        assert_eq!(check(&tree.host())[0].state, State::Warning);
        assert!(check(&tree.host())[0].remedy[0].starts_with("modprobe vdpa_sim_net"));
        tree.file("/sys/module/vduse/initstate", "live");
        assert!(check(&tree.host())[0].remedy[0].starts_with("modprobe -a vduse"));
        tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../mlx5_core");
        let finding = &check(&tree.host())[0];
        assert_eq!(finding.found, "none yet");
        let tree = Tree::new();
        tree.file(VDPA, "");
        assert_eq!(check(&tree.host())[0].state, State::Unknown);
    }

    #[test]
    fn garbage() {
        let tree = Tree::new();
        with_file(&tree, "p", "odd", "vhost-vdpa-99999999999999");
        tree.link(&format!("{VDPA}/gone"), "../nowhere");
        tree.link(&format!("{VDPA}/loop"), "loop");
        for number in 0..SHOWN_MAX {
            tree.directory(&format!("{VDPA}/x\x1b{number}"));
        }
        let findings = check(&tree.host());
        assert_eq!(findings.len(), SHOWN_MAX + 1);
        assert!(findings.iter().all(|one| !one.name.contains('\x1b')));
    }
}
