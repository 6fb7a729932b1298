//! The host's resources for placement: its CPUs, its NUMA nodes, and the node of a device.
//!
//! Owns the reading of sysfs, below a root so that tests can provide a fake one. It must not know
//! the placed machine. It reads nothing but sysfs: a machine needs no netlink.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::Error;
use crate::byte_count::ByteCount;
use crate::config::{HostCpus, parse_list, show_list};

/// The host, seen through its sysfs.
#[derive(Debug)]
pub(crate) struct Host {
    sysfs: PathBuf,
}

impl Host {
    /// This host.
    pub(crate) fn new() -> Self {
        Self {
            sysfs: PathBuf::from("/sys"),
        }
    }

    /// Checks that the CPUs of all lists, one for each vCPU, are online.
    ///
    /// # Errors
    /// A CPU does not exist or is offline.
    pub(crate) fn check_cpus(&self, lists: &[HostCpus]) -> Result<(), Error> {
        if lists.is_empty() {
            return Ok(());
        }
        let online = self.list("devices/system/cpu/online")?;
        for (vcpu, wanted) in (0..).zip(lists) {
            if !wanted.iter().all(|cpu| online.contains(&cpu)) {
                let online = show_list(online);
                return Err(Error::unusable(format!(
                    "cpu_affinity: vCPU {vcpu} needs CPUs {wanted}, but this host has {online} \
                     online"
                )));
            }
        }
        Ok(())
    }

    /// Checks that a node exists and has `size` bytes of memory, free or not. The kernel would kill
    /// a guest bound to a node with less, once it touches too much.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn check_node(&self, node: u16, size: u64) -> Result<(), Error> {
        let path = "devices/system/node/has_memory";
        let nodes = if matches!(self.sysfs.join(path).try_exists(), Ok(false)) {
            Vec::new()
        } else {
            self.list(path)?
        };
        if !nodes.contains(&node) {
            let nodes = match nodes.len() {
                0 => "no NUMA nodes (a kernel without CONFIG_NUMA)".to_owned(),
                _ => format!("node {}", show_list(nodes)),
            };
            return Err(Error::unusable(format!(
                "memory: host_numa_node {node} has no memory or does not exist; this host has \
                 {nodes}"
            )));
        }
        let path = format!("devices/system/node/node{node}/meminfo");
        let text = self.read(&path)?;
        match node_total(&text) {
            Some(total) if size > total => Err(Error::unusable(format!(
                "memory: {} is more than the {} of host_numa_node {node}",
                ByteCount(size),
                ByteCount(total)
            ))),
            _ => Ok(()),
        }
    }

    /// The node of a character or block device: that of the nearest parent that reports one, which
    /// is the PCI function behind a vDPA device. `None` if no parent does, or for other files.
    pub(crate) fn node_of(&self, device: &fs::Metadata) -> Option<u16> {
        self.node_at(&self.link_of(device)?)
    }

    /// Whether the device of this file, or one of its parents, is bound to this driver.
    pub(crate) fn is_bound_to(&self, device: &fs::Metadata, driver: &str) -> bool {
        let link = self.link_of(device);
        link.is_some_and(|link| self.is_bound_at(&link, driver))
    }

    /// The link to the directory of a device file's device.
    fn link_of(&self, device: &fs::Metadata) -> Option<PathBuf> {
        let kind = match device.file_type() {
            kind if kind.is_char_device() => "char",
            kind if kind.is_block_device() => "block",
            _ => return None,
        };
        let (major, minor) = (libc::major(device.rdev()), libc::minor(device.rdev()));
        Some(self.sysfs.join(format!("dev/{kind}/{major}:{minor}")))
    }

    /// As [`Host::node_of`]; `link` leads to the device's directory.
    pub(crate) fn node_at(&self, link: &Path) -> Option<u16> {
        let parents = self.parents(link)?.into_iter();
        let mut nodes =
            parents.filter_map(|parent| fs::read_to_string(parent.join("numa_node")).ok());
        // -1: the firmware does not report it.
        nodes.find_map(|node| node.trim().parse().ok())
    }

    /// See [`Host::is_bound_to`]; `link` leads to the device's directory.
    fn is_bound_at(&self, link: &Path, driver: &str) -> bool {
        let mut parents = self.parents(link).into_iter().flatten();
        parents.any(|parent| {
            let bound = fs::read_link(parent.join("driver")).ok();
            bound.is_some_and(|bound| bound.file_name().is_some_and(|name| name == driver))
        })
    }

    /// The directory to which `link` leads and those above it, within sysfs.
    fn parents(&self, link: &Path) -> Option<Vec<PathBuf>> {
        let root = fs::canonicalize(&self.sysfs).ok()?;
        let directory = fs::canonicalize(link).ok()?;
        let parents = directory.ancestors();
        let parents = parents.take_while(|parent| parent.starts_with(&root));
        Some(parents.map(Path::to_owned).collect())
    }

    /// Reads the numbers of a list in the kernel's format.
    fn list(&self, path: &str) -> Result<Vec<u16>, Error> {
        let text = self.read(path)?;
        let numbers = parse_list(text.trim()).unwrap_or_default();
        Ok(numbers
            .into_iter()
            .filter_map(|number| number.try_into().ok())
            .collect())
    }

    fn read(&self, path: &str) -> Result<String, Error> {
        let path = self.sysfs.join(path);
        fs::read_to_string(&path).map_err(|source| {
            Error::unusable(format!("cannot read {}", path.display())).because(source)
        })
    }
}

/// Reads `Node 0 MemTotal:  2014332 kB` in bytes.
fn node_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.contains(" MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth_back(1)?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// A warning about a device on `device_node` of a machine whose memory is bound to `memory_node`.
pub(crate) fn numa_warning(device_node: Option<u16>, memory_node: Option<u16>) -> Option<String> {
    let (device, memory) = (device_node?, memory_node?);
    (device != memory).then(|| {
        format!(
            "the device is on NUMA node {device}, guest memory on node {memory}: each transfer \
             crosses between them; set memory.host_numa_node to {device}, or take a device of \
             node {memory}"
        )
    })
}

#[cfg(test)]
mod tests;
