//! Huge pages: pools of 2 MiB and 1 GiB, and transparent huge pages for shared memory.
//!
//! Guest memory is a memfd, so the setting of shmem applies to its transparent huge pages. The VMM
//! asks for them, so `advise` is enough.

use super::devices;
use super::finding::Finding;
use super::host::Host;

/// Pools of x86-64: the size in KiB as in the directory's name, and the usual name.
const POOLS: [(u32, &str); 2] = [(2048, "2M"), (1_048_576, "1G")];

/// Checks both pools and the setting for shared memory.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let pinned = devices::pin_memory(host);
    let mut findings: Vec<Finding> = POOLS
        .iter()
        .map(|(size, name)| pool(host, *size, name, pinned))
        .collect();
    findings.push(transparent(host));
    findings
}

fn pool(host: &Host, size: u32, name: &str, pinned: bool) -> Finding {
    let directory = format!("/sys/kernel/mm/hugepages/hugepages-{size}kB");
    let reserve = match size {
        2048 => format!("echo 512 >{directory}/nr_hugepages    (1 GiB of them)"),
        _ => "kernel command line: hugepagesz=1G hugepages=N    (later there is little room)"
            .to_owned(),
    };
    let total = host.number::<u64>(&format!("{directory}/nr_hugepages"));
    let free = host.number::<u64>(&format!("{directory}/free_hugepages"));
    match (total, free) {
        (Ok(0), _) if size == 2048 && pinned => Finding::warning(
            name,
            "none reserved: devices that pin memory may reject a guest with 4 KiB pages",
        )
        .mend(reserve)
        .mend("then: bellhop run --memory size=1G,hugepages=2M"),
        (Ok(0), _) => Finding::ok(name, format!("none reserved; to reserve some: {reserve}")),
        (Ok(total), Ok(free)) => {
            let found = format!("{free} of {total} pages are free");
            match free {
                0 => Finding::warning(name, found).mend(reserve),
                _ => Finding::ok(name, found),
            }
        }
        (Err(why), _) if why.is_absent() && host.sysfs().is_ok() => {
            Finding::ok(name, "this kernel has no pages of this size")
        }
        (Err(why), _) | (_, Err(why)) => Finding::unread(name, &why),
    }
}

fn transparent(host: &Host) -> Finding {
    const NAME: &str = "transparent";
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let text = match host.text(PATH) {
        Ok(text) => text,
        Err(why) if why.is_absent() && host.sysfs().is_ok() => {
            return Finding::ok(NAME, "this kernel has none for shared memory");
        }
        Err(why) => return Finding::unread(NAME, &why),
    };
    let chosen = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    match chosen {
        Some(chosen @ ("always" | "within_size" | "advise" | "force")) => {
            Finding::ok(NAME, format!("{chosen} for shared memory"))
        }
        Some(chosen) => Finding::ok(
            NAME,
            format!("{chosen} for shared memory; for faster guests: echo advise >{PATH}"),
        ),
        None => Finding::unknown(NAME, format!("cannot parse {PATH}: unexpected content")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

    fn tree(total: &str, free: &str) -> Tree {
        let tree = Tree::new();
        tree.file(&format!("{POOL}/nr_hugepages"), total);
        tree.file(&format!("{POOL}/free_hugepages"), free);
        tree
    }

    #[test]
    fn pools() {
        let state = |total, free| check(&tree(total, free).host())[0].state;
        assert_eq!(state("512\n", "12\n"), State::Ok);
        assert_eq!(state("512\n", "0\n"), State::Warning);
        assert_eq!(state("0\n", "0\n"), State::Ok);
        assert_eq!(state("many", "0\n"), State::Unknown);
        assert_eq!(state("1", "-1"), State::Unknown);
        let pinning = tree("0", "0");
        pinning.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../mlx5_core");
        let findings = check(&pinning.host());
        assert_eq!(findings[0].state, State::Warning);
        assert!(findings[0].remedy[0].starts_with("echo 512 >/sys/kernel/mm/hugepages/"));
        assert_eq!(findings[1].state, State::Ok);
    }

    #[test]
    fn transparent_ones() {
        let look = |text: &str| {
            let tree = Tree::new();
            let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
            tree.file(path, text);
            check(&tree.host()).remove(2)
        };
        assert!(
            look("always within_size advise [never]")
                .found
                .contains("echo advise")
        );
        assert_eq!(look("[always] never\n").found, "always for shared memory");
        assert_eq!(look("always [advise]").found, "advise for shared memory");
        assert_eq!(look("\0\0").state, State::Unknown);
    }
}
