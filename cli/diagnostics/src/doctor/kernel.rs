//! The kernel: its release and its configuration.

use super::finding::Finding;
use super::host::Host;
use super::modules::{Build, Modules};

/// Symbols of the configuration without a module, their purpose, and whether they are needed.
/// Modules have findings of their own.
const SYMBOLS: [(&str, &str, bool); 10] = [
    ("KVM", "virtual machines", true),
    ("EVENTFD", "kicks and interrupts", true),
    ("MEMFD_CREATE", "guest memory", true),
    ("SECCOMP_FILTER", "system call filters", true),
    ("IO_URING", "disks", false),
    ("HUGETLBFS", "huge pages for guests", false),
    ("IOMMU_API", "NICs that use the platform's IOMMU", false),
    ("PCI_IOV", "virtual functions of NICs", false),
    ("NET_SWITCHDEV", "representors of functions", false),
    (
        "SECURITY_LANDLOCK",
        "rules for files of a VM's process",
        false,
    ),
];

/// The first kernel with `VHOST_BACKEND_F_SUSPEND` and address spaces in vhost-vdpa.
const OLDEST: (u32, u32) = (6, 0);

/// Checks release and configuration.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let modules = Modules::of(host);
    vec![release(&modules), configuration(&modules), landlock(host)]
}

/// Landlock must also be among the active security modules.
fn landlock(host: &Host) -> Finding {
    const NAME: &str = "landlock";
    const MODULES: &str = "/sys/kernel/security/lsm";
    match host.text(MODULES) {
        Err(why) => Finding::unread(NAME, &why),
        Ok(active) if active.trim().split(',').any(|module| module == "landlock") => Finding::ok(
            NAME,
            "limits the files and signals of a VM's process, besides its sandbox's other parts",
        ),
        Ok(active) => Finding::warning(
            NAME,
            "is not active: a VM's process is confined by the other parts of its sandbox alone",
        )
        .mend(format!("boot with lsm=landlock,{}", active.trim())),
    }
}

fn release(modules: &Modules<'_>) -> Finding {
    let release = match &modules.release {
        Ok(release) => release,
        Err(why) => return Finding::unread("release", why),
    };
    let Some(version) = modules.version() else {
        return Finding::unknown("release", format!("cannot parse the release {release}"));
    };
    if version >= OLDEST {
        return Finding::ok("release", format!("Linux {release}"));
    }
    let (major, minor) = OLDEST;
    Finding::warning(
        "release",
        format!(
            "Linux {release}: vhost-vdpa can neither suspend devices nor separate address spaces"
        ),
    )
    .mend(format!("boot Linux {major}.{minor} or later"))
}

fn configuration(modules: &Modules<'_>) -> Finding {
    const NAME: &str = "configuration";
    let source = match modules.config_source() {
        Ok(source) => source,
        Err(why) => return Finding::unread(NAME, why),
    };
    let unset = |needed: bool| -> Vec<String> {
        SYMBOLS
            .iter()
            .filter(|(name, _, is_needed)| {
                *is_needed == needed && modules.symbol(name) == Some(Build::No)
            })
            .map(|(name, purpose, _)| format!("CONFIG_{name} ({purpose})"))
            .collect()
    };
    let (needed, useful) = (unset(true), unset(false));
    let told = |symbols: &[String]| format!("{source} does not set {}", symbols.join(", "));
    let mend = "boot a kernel with these options, such as a distribution's full kernel";
    if !needed.is_empty() {
        return Finding::missing(NAME, told(&needed)).mend(mend);
    }
    if !useful.is_empty() {
        return Finding::warning(NAME, told(&useful)).mend(mend);
    }
    Finding::ok(NAME, format!("{source} sets all required options"))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn with(release: &str, config: &str) -> Vec<Finding> {
        let tree = Tree::new();
        tree.file("/proc/sys/kernel/osrelease", release);
        tree.file(&format!("/boot/config-{}", release.trim()), config);
        tree.file("/sys/kernel/security/lsm", "capability,landlock,yama\n");
        check(&tree.host())
    }

    #[test]
    fn a_full_kernel_is_fine_and_a_small_one_is_not() {
        let all: String = SYMBOLS
            .iter()
            .map(|symbol| format!("CONFIG_{}=y\n", symbol.0))
            .collect();
        let findings = with("6.12.107+deb13-amd64\n", &all);
        assert!(findings.iter().all(|finding| finding.state == State::Ok));

        let findings = with("5.10.0", "CONFIG_KVM=m\nCONFIG_EVENTFD=y\n");
        assert_eq!(findings[0].state, State::Warning);
        assert_eq!(findings[1].state, State::Missing);
        assert!(findings[1].found.contains("CONFIG_MEMFD_CREATE"));
        assert!(!findings[1].found.contains("CONFIG_KVM "));
        assert!(!findings[1].remedy.is_empty());

        let needed = "CONFIG_KVM=m\nCONFIG_EVENTFD=y\nCONFIG_MEMFD_CREATE=y\n\
                      CONFIG_SECCOMP_FILTER=y\n";
        assert_eq!(with("7.1", needed)[1].state, State::Warning);
    }

    #[test]
    fn landlock_must_be_active() {
        let tree = Tree::new();
        tree.file("/sys/kernel/security/lsm", "capability,yama");
        let finding = landlock(&tree.host());
        assert_eq!(finding.state, State::Warning);
        assert_eq!(finding.remedy, ["boot with lsm=landlock,capability,yama"]);
    }

    #[test]
    fn nonsense_is_unknown() {
        for release in ["", "../../etc", "six.twelve", "6", "4294967296.1"] {
            let tree = Tree::new();
            tree.file("/proc/sys/kernel/osrelease", release);
            for finding in check(&tree.host()) {
                assert_eq!(finding.state, State::Unknown, "{release}: {finding:?}");
            }
        }
    }
}
