#![allow(clippy::unwrap_used, reason = "tests")]
use std::os::unix::fs::symlink;

use super::*;

const PF: &str = "0000:01:00.0";
const VF: &str = "0000:01:00.1";

/// A sysfs that records writes to it, and changes nothing else.
pub(crate) struct Sysfs(pub(crate) PathBuf);

impl Sysfs {
    /// A physical function with one virtual one of four, on a bus with the drivers `nic` and
    /// `vp-vdpa`.
    pub(crate) fn new(test: &str) -> Self {
        let root = std::env::temp_dir().join(format!("bellhop-pci-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let sysfs = Self(root);
        for address in [PF, VF] {
            sysfs.put(&format!("devices/{address}/driver_override"), "(null)\n");
            sysfs.put(&format!("devices/{address}/numa_node"), "-1\n");
            sysfs.link(
                &format!("devices/{address}"),
                &format!("bus/pci/devices/{address}"),
            );
            sysfs.link("bus/pci/drivers/nic", &format!("devices/{address}/driver"));
        }
        for driver in ["nic", "vp-vdpa"] {
            sysfs.put(&format!("bus/pci/drivers/{driver}/bind"), "");
            sysfs.put(&format!("bus/pci/drivers/{driver}/unbind"), "");
        }
        sysfs.put(&format!("devices/{PF}/sriov_totalvfs"), "4\n");
        sysfs.put(&format!("devices/{PF}/sriov_numvfs"), "1\n");
        sysfs.link(&format!("devices/{VF}"), &format!("devices/{PF}/virtfn0"));
        sysfs.link(&format!("devices/{PF}"), &format!("devices/{VF}/physfn"));
        sysfs
    }

    pub(crate) fn put(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, target: &str, link: &str) {
        let link = self.0.join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.0.join(target), link).unwrap();
    }

    pub(crate) fn written(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap()
    }

    pub(crate) fn pci(&self) -> Pci {
        Pci::at(&self.0)
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

#[test]
fn a_function_is_described_with_its_parts() {
    let sysfs = Sysfs::new("described");
    sysfs.put(&format!("devices/{PF}/virtio3/net/enp1s0/mtu"), "1500\n");
    // A virtual function's representor.
    let representor = format!("devices/{PF}/virtio3/net/enp1s0r0/phys_port_name");
    sysfs.put(&representor, "pf0vf0\n");
    sysfs.put(&format!("devices/{PF}/numa_node"), "1\n");
    sysfs.put("kernel/iommu_groups/7/devices/0000:02:00.0", "");
    sysfs.put(&format!("kernel/iommu_groups/7/devices/{VF}"), "");
    sysfs.link(
        "kernel/iommu_groups/7",
        &format!("devices/{VF}/iommu_group"),
    );
    sysfs.put(&format!("devices/{VF}/nic0/uevent"), "");
    sysfs.link(&format!("devices/{VF}/nic0"), "bus/vdpa/devices/nic0");
    sysfs.put("bus/vdpa/devices/elsewhere/uevent", "");
    let pci = sysfs.pci();

    let physical = pci.function(address(PF)).unwrap();
    assert_eq!(physical.driver.as_deref(), Some("nic"));
    assert_eq!(physical.driver_override, None);
    assert_eq!(physical.virtual_functions, [(0, address(VF))]);
    assert_eq!((physical.total_vfs, physical.numa_node), (Some(4), Some(1)));
    assert_eq!(physical.netdevs, ["enp1s0"]);
    assert_eq!(physical.vdpa_devices, Vec::<String>::new());
    assert_eq!(pci.shares_group_with(&physical).unwrap(), []);

    let virtual_one = pci.function(address(VF)).unwrap();
    assert_eq!(virtual_one.physical_function, Some(address(PF)));
    assert_eq!((virtual_one.total_vfs, virtual_one.numa_node), (None, None));
    assert_eq!(virtual_one.vdpa_devices, ["nic0"]);
    let others = pci.shares_group_with(&virtual_one).unwrap();
    assert_eq!(others, [address("0000:02:00.0")]);
    assert_eq!(pci.physical_functions().unwrap(), [physical]);
}

#[test]
fn an_interface_leads_to_its_function() {
    let sysfs = Sysfs::new("behind");
    for (interface, device) in [
        ("direct", format!("devices/{PF}")),
        ("virtio", format!("devices/{PF}/virtio3")),
        ("other", "devices/platform/x".to_owned()),
    ] {
        fs::create_dir_all(sysfs.0.join(&device)).unwrap();
        sysfs.link(&device, &format!("class/net/{interface}/device"));
    }
    sysfs.put("class/net/lo/mtu", "65536\n");
    let pci = sysfs.pci();
    for interface in ["direct", "virtio"] {
        assert_eq!(pci.behind(interface).unwrap(), Some(address(PF)));
    }
    assert_eq!(pci.behind("other").unwrap(), None);
    assert_eq!(pci.behind("lo").unwrap(), None);
    for none in ["", "..", "lo/..", "eth9"] {
        let error = pci.behind(none).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{none:?}");
    }
}

#[test]
fn a_sysfs_that_makes_no_sense_is_read_without_it() {
    let sysfs = Sysfs::new("hostile");
    sysfs.put(&format!("devices/{PF}/sriov_totalvfs"), "-4\n");
    sysfs.put(&format!("devices/{PF}/numa_node"), "99999999999999\n");
    sysfs.link("nowhere", &format!("devices/{PF}/virtfn1"));
    sysfs.link(&format!("devices/{VF}"), &format!("devices/{PF}/virtfnX"));
    sysfs.link("groups/x", &format!("devices/{PF}/iommu_group"));
    sysfs.put("bus/pci/devices/rubbish/sriov_totalvfs", "1\n");
    let path = sysfs.0.join(format!("devices/{PF}/driver_override"));
    fs::write(path, [0xff, 0xfe, b'\n']).unwrap();
    let pci = sysfs.pci();
    let function = pci.function(address(PF)).unwrap();
    assert_eq!((function.total_vfs, function.numa_node), (None, None));
    assert_eq!(function.virtual_functions, [(0, address(VF))]);
    assert_eq!(function.iommu_group, None);
    assert_eq!(pci.physical_functions().unwrap(), [function]);
    let error = pci.function(address("0000:01:00.7")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let nowhere = Pci::at(&sysfs.0.join("nowhere"));
    assert_eq!(nowhere.physical_functions().unwrap(), []);
}

#[test]
fn a_function_goes_from_driver_to_driver() {
    let sysfs = Sysfs::new("bind");
    let pci = sysfs.pci();
    for driver in ["vfio-pci", "", "..", "a/b"] {
        let error = pci.bind(address(VF), driver).unwrap_err();
        assert!(error.to_string().contains("no PCI driver"), "{driver:?}");
    }
    pci.bind(address(VF), "nic").unwrap();
    assert!(pci.check_bind(address(VF), "vfio-pci").is_err());
    let checked = pci.check_bind(address(VF), "vp-vdpa").unwrap();
    assert_eq!(checked.driver.as_deref(), Some("nic"));
    assert_eq!(sysfs.written("bus/pci/drivers/nic/unbind"), "");
    pci.bind(address(VF), "vp-vdpa").unwrap();
    assert_eq!(sysfs.written("bus/pci/drivers/nic/unbind"), VF);
    assert_eq!(sysfs.written("bus/pci/drivers/vp-vdpa/bind"), VF);
    assert_eq!(sysfs.written("bus/pci/drivers/nic/bind"), "");
}

#[test]
fn driver_and_override_come_back_when_the_new_driver_fails() {
    let sysfs = Sysfs::new("back");
    let file = format!("devices/{VF}/driver_override");
    sysfs.put(&file, "nic\n");
    fs::remove_file(sysfs.0.join("bus/pci/drivers/vp-vdpa/bind")).unwrap();
    let error = sysfs.pci().bind(address(VF), "vp-vdpa").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotUndone);
    assert!(error.to_string().contains("which now has nic"), "{error}");
    assert_eq!(sysfs.written("bus/pci/drivers/nic/bind"), VF);
    assert_eq!(sysfs.written(&file), "nic\n");
}

#[test]
fn a_function_that_a_program_has_through_vfio_is_left_alone() {
    let sysfs = Sysfs::new("vfio");
    sysfs.link(
        "kernel/iommu_groups/7",
        &format!("devices/{VF}/iommu_group"),
    );
    // A character device that this process has open.
    fs::create_dir_all(sysfs.0.join("vfio")).unwrap();
    symlink("/dev/null", sysfs.0.join("vfio/7")).unwrap();
    let _open = fs::File::open("/dev/null").unwrap();
    let mut pci = sysfs.pci();
    pci.vfio = sysfs.0.join("vfio");
    for driver in ["vfio-pci", "mlx5_vfio_pci"] {
        fs::remove_file(sysfs.0.join(format!("devices/{VF}/driver"))).unwrap();
        let unbind = format!("bus/pci/drivers/{driver}/unbind");
        sysfs.put(&unbind, "");
        sysfs.link(
            &format!("bus/pci/drivers/{driver}"),
            &format!("devices/{VF}/driver"),
        );
        for error in [
            pci.bind(address(VF), "nic").unwrap_err(),
            pci.set_virtual_functions(address(PF), 0).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InUse, "{driver}");
            let text = error.to_string();
            assert!(
                text.contains(&std::process::id().to_string()) && text.contains(VF),
                "{text}"
            );
        }
        assert_eq!(sysfs.written(&unbind), "");
    }
    assert_eq!(sysfs.written(&format!("devices/{PF}/sriov_numvfs")), "1\n");
}

/// A sysfs whose virtual function is in the IOMMU group 7.
fn in_group(test: &str) -> Sysfs {
    let sysfs = Sysfs::new(test);
    sysfs.put(&format!("kernel/iommu_groups/7/devices/{VF}"), "");
    sysfs.link(
        "kernel/iommu_groups/7",
        &format!("devices/{VF}/iommu_group"),
    );
    sysfs
}

#[test]
fn only_a_function_that_a_guest_can_have_passes() {
    let sysfs = in_group("vfio-check");
    let mut pci = sysfs.pci();
    pci.vfio = sysfs.0.join("vfio");
    let refused = |which: &str, allow_pf: bool| {
        let function = pci.function(address(which)).unwrap();
        let error = pci.check_vfio(&function, allow_pf).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unusable);
        error.to_string()
    };
    assert!(refused(PF, false).contains("allow_pf"));
    assert!(refused(PF, true).contains("no IOMMU group"));
    assert!(refused(VF, false).contains("modprobe vfio-pci"));
    sysfs.put("bus/pci/drivers/vfio-pci/bind", "");
    let function = pci.function(address(VF)).unwrap();
    pci.check_vfio(&function, false).unwrap();
    assert_eq!(
        pci.files_for_vfio(&function).unwrap(),
        [pci.vfio.join("7"), pci.vfio.join("vfio")]
    );

    // A function without a driver, a port, and one of the host in the same group.
    for (other, driver) in [("0000:02:00.0", None), ("0000:02:00.1", Some("pcieport"))] {
        sysfs.put(&format!("kernel/iommu_groups/7/devices/{other}"), "");
        sysfs.put(&format!("bus/pci/devices/{other}/numa_node"), "-1\n");
        if let Some(driver) = driver {
            sysfs.link(driver, &format!("bus/pci/devices/{other}/driver"));
        }
    }
    pci.check_vfio(&function, false).unwrap();
    sysfs.link("nic", "bus/pci/devices/0000:02:00.0/driver");
    let text = refused(VF, false);
    assert!(text.contains("also has 0000:02:00.0, which"), "{text}");
    fs::remove_file(sysfs.0.join("kernel/iommu_groups/7/devices/0000:02:00.0")).unwrap();
    sysfs.put(&format!("devices/{VF}/nic0/uevent"), "");
    sysfs.link(&format!("devices/{VF}/nic0"), "bus/vdpa/devices/nic0");
    assert!(refused(VF, false).contains("vDPA device nic0"));
}

#[test]
fn a_function_returns_from_vfio_unless_another_driver_has_it() {
    let sysfs = in_group("vfio-return");
    let mut pci = sysfs.pci();
    pci.vfio = sysfs.0.join("vfio");
    sysfs.put("bus/pci/drivers/vfio-pci/bind", "");
    sysfs.put("bus/pci/drivers/vfio-pci/unbind", "");
    let former = FormerDriver {
        function: address(VF),
        driver: Some("nic".to_owned()),
        driver_override: None,
    };
    let link = sysfs.0.join(format!("devices/{VF}/driver"));
    let bound = |driver: Option<&str>| {
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            sysfs.link(
                &format!("bus/pci/drivers/{driver}"),
                &format!("devices/{VF}/driver"),
            );
        }
    };
    pci.give_to_vfio(&former).unwrap();
    assert_eq!(sysfs.written("bus/pci/drivers/vfio-pci/bind"), VF);
    // Killed between the two drivers, and after.
    for now in [None, Some("vfio-pci")] {
        sysfs.put("bus/pci/drivers/nic/bind", "");
        bound(now);
        assert_eq!(pci.take_from_vfio(&former).unwrap(), None);
        assert_eq!(sysfs.written("bus/pci/drivers/nic/bind"), VF, "{now:?}");
    }
    // Not begun, taken by another driver, and gone.
    sysfs.put("bus/pci/drivers/nic/bind", "");
    bound(Some("nic"));
    assert_eq!(pci.take_from_vfio(&former).unwrap(), None);
    bound(Some("vp-vdpa"));
    let left = pci.take_from_vfio(&former).unwrap().unwrap();
    assert!(left.contains("now has the driver vp-vdpa"), "{left}");
    let gone = FormerDriver {
        function: address("0000:01:00.7"),
        ..former
    };
    assert_eq!(pci.take_from_vfio(&gone).unwrap(), None);
    assert_eq!(sysfs.written("bus/pci/drivers/nic/bind"), "");
}
