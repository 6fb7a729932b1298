//! KVM: the device, the processor behind it, posted interrupts.

use rustix::io::Errno;

use super::finding::Finding;
use super::host::Host;

/// A processor's virtualization extension.
struct Extension {
    name: &'static str,
    /// Its KVM module.
    module: &'static str,
    /// The flag for two-stage page tables.
    nested_paging: &'static str,
}

const VMX: Extension = Extension {
    name: "VMX",
    module: "kvm_intel",
    nested_paging: "ept",
};

const SVM: Extension = Extension {
    name: "SVM",
    module: "kvm_amd",
    nested_paging: "npt",
};

/// The description of the first processor.
#[derive(Debug, Default)]
struct Processor {
    flags: Vec<String>,
}

impl Processor {
    /// Parses `/proc/cpuinfo` up to the end of the first flags.
    fn of(text: &str) -> Self {
        let flags = text.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == "flags").then_some(value)
        });
        Self {
            flags: flags
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
        }
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|one| one == flag)
    }

    fn extension(&self) -> Option<Extension> {
        match (self.has("vmx"), self.has("svm")) {
            (true, _) => Some(VMX),
            (_, true) => Some(SVM),
            _ => None,
        }
    }
}

/// Checks `/dev/kvm` and the processor.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let processor = host
        .beginning("/proc/cpuinfo")
        .map(|text| Processor::of(&text));
    let extension = processor.as_ref().ok().and_then(Processor::extension);
    let mut findings = vec![device(host, extension)];
    match processor {
        Ok(processor) => findings.push(describe(host, &processor)),
        Err(why) => findings.push(Finding::unread("processor", &why)),
    }
    findings.extend(posted_interrupts(host));
    findings
}

fn device(host: &Host, extension: Option<Extension>) -> Finding {
    const PATH: &str = "/dev/kvm";
    let load = match extension {
        Some(extension) => format!("modprobe {}", extension.module),
        None => "modprobe kvm_intel || modprobe kvm_amd".to_owned(),
    };
    let owner = host.owner(PATH);
    match (host.open_device(PATH), owner) {
        (Ok(()), Ok(owner)) => Finding::ok(PATH, format!("can be opened ({owner})")),
        (Ok(()), Err(_)) => Finding::ok(PATH, "can be opened"),
        (Err(Errno::NOENT), _) => Finding::missing(PATH, "does not exist")
            .mend(load)
            .mend("in a container: start it with --device /dev/kvm"),
        (Err(Errno::NODEV | Errno::NXIO), _) => {
            Finding::missing(PATH, "exists, but no KVM module serves it").mend(load)
        }
        (Err(Errno::ACCESS), Ok(owner)) => {
            let found = format!("this user may not open it ({owner})");
            let finding = Finding::missing(PATH, found);
            match owner.group.filter(|group| group != "root") {
                Some(group) if owner.mode & 0o060 == 0o060 => {
                    finding.mend(format!("usermod -aG {group} USER    (then log in again)"))
                }
                _ => finding
                    .mend("in /etc/udev/rules.d/60-kvm.rules:")
                    .mend(r#"KERNEL=="kvm", GROUP="kvm", MODE="0660""#)
                    .mend("udevadm control --reload && udevadm trigger --name-match=kvm")
                    .mend("usermod -aG kvm USER    (then log in again)"),
            }
        }
        (Err(Errno::PERM), _) => Finding::missing(PATH, "a device policy forbids opening it")
            .mend("start the container with --device /dev/kvm; in a unit: DeviceAllow=/dev/kvm rw"),
        (Err(error), _) => Finding::missing(PATH, format!("cannot be opened: {error}")),
    }
}

fn describe(host: &Host, processor: &Processor) -> Finding {
    const NAME: &str = "processor";
    if processor.flags.is_empty() {
        return Finding::unknown(NAME, "/proc/cpuinfo lists no flags");
    }
    let nested = processor.has("hypervisor");
    let Some(extension) = processor.extension() else {
        if host.exists("/dev/kvm") {
            return Finding::warning(
                NAME,
                "neither vmx nor svm, but KVM works: it is emulated or paravirtual, and guests \
                 with an unmodified kernel may not boot",
            )
            .mend("use a host, or a kind of VM, with hardware or nested virtualization");
        }
        let finding = Finding::missing(NAME, "neither vmx nor svm: no hardware virtualization");
        return if nested {
            finding.mend("enable nested virtualization on the host of this VM")
        } else {
            finding.mend("enable VT-x or AMD-V (SVM) in the firmware setup")
        };
    };
    let name = extension.name;
    if !processor.has(extension.nested_paging) {
        let flag = extension.nested_paging;
        let found = format!("{name} without {flag}: guests use shadow page tables and are slow");
        return Finding::warning(NAME, found);
    }
    if nested {
        let found = format!("{name}; this host is itself a VM, so guests are nested and slower");
        return Finding::warning(NAME, found);
    }
    Finding::ok(NAME, format!("{name} with nested paging"))
}

/// Whether interrupts of devices reach a running guest without an exit.
fn posted_interrupts(host: &Host) -> Option<Finding> {
    const NAME: &str = "posted interrupts";
    let (module, parameter) = [("kvm_intel", "enable_apicv"), ("kvm_amd", "avic")]
        .into_iter()
        .find(|(module, _)| host.exists(&format!("/sys/module/{module}/parameters")))?;
    let path = format!("/sys/module/{module}/parameters/{parameter}");
    Some(match host.text(&path) {
        Ok(value) if matches!(value.as_str(), "Y" | "1" | "y") => {
            Finding::ok(NAME, format!("on ({module} {parameter})"))
        }
        Ok(_) => Finding::ok(
            NAME,
            format!(
                "off ({module} {parameter}): each NIC interrupt costs a VM exit; if the processor \
                 supports it, `modprobe -r {module} && modprobe {module} {parameter}=1`"
            ),
        ),
        Err(why) => Finding::unread(NAME, &why),
    })
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn cpuinfo(flags: &str) -> String {
        format!("processor\t: 0\nvendor_id\t: x\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    }

    #[test]
    fn a_good_host() {
        let tree = Tree::new();
        tree.file("/dev/kvm", "");
        tree.file("/proc/cpuinfo", cpuinfo("fpu vmx ept"));
        tree.file("/sys/module/kvm_intel/parameters/enable_apicv", "Y\n");
        let findings = check(&tree.host());
        assert_eq!(findings.len(), 3);
        assert!(
            findings.iter().all(|one| one.state == State::Ok),
            "{findings:?}"
        );
    }

    #[test]
    fn no_kvm_names_the_module_of_this_processor() {
        let tree = Tree::new();
        tree.file("/proc/cpuinfo", cpuinfo("svm npt"));
        let findings = check(&tree.host());
        assert_eq!(findings[0].state, State::Missing);
        assert_eq!(findings[0].remedy[0], "modprobe kvm_amd");
    }

    #[test]
    fn no_rights_name_the_group_or_the_rule() {
        use std::os::unix::fs::PermissionsExt;
        let tree = Tree::new();
        tree.file("/dev/kvm", "");
        let gid = tree.host().owner("/dev/kvm").unwrap().gid;
        let mode = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(tree.path("/dev/kvm"), permissions).unwrap();
        };
        tree.file("/etc/group", format!("machines:x:{gid}:\n"));
        mode(0o660);
        let finding = &check(&tree.host_without_rights())[0];
        assert_eq!(finding.state, State::Missing);
        assert!(finding.found.contains("group machines"), "{finding:?}");
        assert!(finding.remedy[0].starts_with("usermod -aG machines "));
        mode(0o600);
        let finding = &check(&tree.host_without_rights())[0];
        assert!(finding.remedy[1].contains(r#"GROUP="kvm""#));
    }

    #[test]
    fn processors() {
        let look = |flags: &str, kvm: bool| {
            let tree = Tree::new();
            tree.file("/proc/cpuinfo", cpuinfo(flags));
            if kvm {
                tree.file("/dev/kvm", "");
            }
            let finding = check(&tree.host()).remove(1);
            (finding.state, finding.remedy.join(" "))
        };
        let (state, remedy) = look("fpu", false);
        assert_eq!(state, State::Missing);
        assert!(remedy.contains("firmware"));
        let (state, remedy) = look("fpu hypervisor", false);
        assert_eq!(state, State::Missing);
        assert!(remedy.contains("nested"));
        assert_eq!(look("fpu hypervisor", true).0, State::Warning);
        assert_eq!(look("vmx", true).0, State::Warning);
        assert_eq!(look("svm npt hypervisor", true).0, State::Warning);
        assert_eq!(look("", true).0, State::Unknown);
    }

    #[test]
    fn garbage_is_unknown() {
        let tree = Tree::new();
        tree.file("/proc/cpuinfo", b"\xff\xfe::::\0flags".repeat(20_000));
        assert_eq!(check(&tree.host())[1].state, State::Unknown);
        assert_eq!(check(&Tree::new().host())[1].state, State::Unknown);
    }
}
