//! Kernel modules: loaded, loadable, or absent from this kernel.
//!
//! Owns the knowledge of the kernel's build: its release, its configuration and the lists of
//! depmod. If modules are not visible (a container has no `/lib/modules`), the configuration
//! decides if it can be read.

use std::collections::{HashMap, HashSet};
use std::io::Read;

use bellhop_common::error::Error;
use flate2::read::GzDecoder;
use vdpa::causes::in_one_line;

use super::finding::Finding;
use super::host::{Host, absent, is_plain, odd};

/// Maximum size of depmod's lists, in bytes: a large kernel's is about 1 MiB.
const LIST_MAX: u64 = 16 << 20;

/// Maximum size of an unpacked kernel configuration, in bytes: a large one has 300 KiB.
const CONFIG_MAX: u64 = 4 << 20;

/// The state of a module.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// Loaded now.
    Loaded,
    /// Part of the kernel itself.
    BuiltIn,
    /// `modprobe` finds it.
    Loadable,
    /// Not built for this kernel, or not installed.
    Absent,
    /// It cannot be determined, for this reason.
    Unknown(String),
}

impl Presence {
    /// Whether it works now.
    pub(super) fn is_here(&self) -> bool {
        matches!(self, Self::Loaded | Self::BuiltIn)
    }

    /// Whether it could work without another kernel.
    pub(super) fn is_possible(&self) -> bool {
        self.is_here() || *self == Self::Loadable
    }
}

/// A module and its configuration symbol.
#[derive(Debug, Clone, Copy)]
pub(super) struct Module {
    /// As in `/sys/module`, with underscores.
    pub(super) name: &'static str,
    /// Without `CONFIG_`.
    pub(super) symbol: &'static str,
}

const fn module(name: &'static str, symbol: &'static str) -> Module {
    Module { name, symbol }
}

/// The vDPA bus.
pub(super) const VDPA: Module = module("vdpa", "VDPA");
/// Provides `/dev/vhost-vdpa-N`.
pub(super) const VHOST_VDPA: Module = module("vhost_vdpa", "VHOST_VDPA");
/// The simulator of network cards.
pub(super) const VDPA_SIM_NET: Module = module("vdpa_sim_net", "VDPA_SIM_NET");
/// Devices implemented by a process.
pub(super) const VDUSE: Module = module("vduse", "VDPA_USER");
/// Interfaces whose frames a process sends and receives.
pub(super) const TUN: Module = module("tun", "TUN");

/// The state of the kernel's modules.
#[derive(Debug)]
pub(super) struct Modules<'a> {
    host: &'a Host,
    /// The result of `uname -r`.
    pub(super) release: Result<String, Error>,
    built_in: HashSet<String>,
    loadable: Result<HashSet<String>, Error>,
    config: Result<Config, Error>,
}

impl<'a> Modules<'a> {
    /// Reads the lists.
    pub(super) fn of(host: &'a Host) -> Self {
        const RELEASE: &str = "/proc/sys/kernel/osrelease";
        let release = host.text(RELEASE).and_then(|release| {
            // It becomes a part of paths.
            if is_plain(&release) {
                Ok(release)
            } else {
                Err(odd(RELEASE))
            }
        });
        let list = |name: &str| match &release {
            Ok(release) => list(host, &format!("/lib/modules/{release}/{name}")),
            Err(_) => Err(absent("/lib/modules for this kernel")),
        };
        Self {
            built_in: list("modules.builtin").unwrap_or_default(),
            loadable: list("modules.dep"),
            config: Config::of(host, release.as_deref().ok()),
            release,
            host,
        }
    }

    /// The first two numbers of the release.
    pub(super) fn version(&self) -> Option<(u32, u32)> {
        let release = self.release.as_deref().ok()?;
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        let mut next = || numbers.next()?.parse().ok();
        Some((next()?, next()?))
    }

    /// The state of a module.
    pub(super) fn presence(&self, module: Module) -> Presence {
        // Built-in parts with parameters have a directory there, too; only real modules have this
        // file.
        let state = format!("/sys/module/{}/initstate", module.name);
        if self.host.exists(&state) {
            return Presence::Loaded;
        }
        let built = self.symbol(module.symbol);
        if self.built_in.contains(module.name) || built == Some(Build::Yes) {
            return Presence::BuiltIn;
        }
        match (&self.loadable, built) {
            (Ok(loadable), _) if loadable.contains(module.name) => Presence::Loadable,
            (Ok(_), _) | (Err(_), Some(Build::No)) => Presence::Absent,
            (Err(why), Some(_)) => Presence::Unknown(format!(
                "this kernel has it as a module; cannot check whether it is installed: {}",
                in_one_line(why)
            )),
            (Err(why), None) => Presence::Unknown(in_one_line(why)),
        }
    }

    /// The value of a symbol in the configuration; `None`: it cannot be read.
    pub(super) fn symbol(&self, symbol: &str) -> Option<Build> {
        self.config
            .as_ref()
            .ok()
            .map(|config| config.symbols.get(symbol).copied().unwrap_or(Build::No))
    }

    /// The path of the configuration, or why there is none.
    pub(super) fn config_source(&self) -> Result<&str, &Error> {
        self.config.as_ref().map(|config| config.source.as_str())
    }
}

/// Names of modules in one of depmod's lists.
fn list(host: &Host, path: &str) -> Result<HashSet<String>, Error> {
    let bytes = host.bytes(path, LIST_MAX)?;
    let names = String::from_utf8_lossy(&bytes)
        .lines()
        .filter_map(|line| {
            // Line format: kernel/drivers/vdpa/vdpa.ko.xz: kernel/…
            let path = line.split(':').next()?;
            let (name, _) = path.rsplit('/').next()?.split_once(".ko")?;
            Some(name.replace('-', "_"))
        })
        .collect();
    Ok(names)
}

/// The value of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Build {
    /// Not set.
    No,
    /// As a module.
    Module,
    /// Built in.
    Yes,
}

/// A kernel configuration.
#[derive(Debug)]
struct Config {
    source: String,
    symbols: HashMap<String, Build>,
}

impl Config {
    /// Reads the configuration of the running kernel: from the kernel itself, or else from its
    /// package.
    fn of(host: &Host, release: Option<&str>) -> Result<Self, Error> {
        let mut places = vec!["/proc/config.gz".to_owned()];
        if let Some(release) = release {
            places.push(format!("/boot/config-{release}"));
            places.push(format!("/lib/modules/{release}/config"));
        }
        let mut refused = None;
        for place in &places {
            let read = host.bytes(place, CONFIG_MAX).and_then(|bytes| {
                if !place.ends_with(".gz") {
                    return Ok(bytes);
                }
                gunzip(&bytes).ok_or_else(|| odd(place))
            });
            match read {
                Ok(bytes) => {
                    return Ok(Self {
                        source: place.clone(),
                        symbols: symbols(&String::from_utf8_lossy(&bytes)),
                    });
                }
                Err(why) if why.is_absent() => {}
                Err(why) => refused = Some(why),
            }
        }
        Err(refused.unwrap_or_else(|| absent(&places.join(" or "))))
    }
}

fn symbols(text: &str) -> HashMap<String, Build> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.strip_prefix("CONFIG_")?.split_once('=')?;
            let build = match value.trim() {
                "y" => Build::Yes,
                "m" => Build::Module,
                _ => return None,
            };
            Some((name.to_owned(), build))
        })
        .collect()
}

/// The content of a gzip file, at most [`CONFIG_MAX`] bytes.
fn gunzip(file: &[u8]) -> Option<Vec<u8>> {
    let mut decoder = GzDecoder::new(file);
    let mut content = Vec::new();
    let mut limited = decoder.by_ref().take(CONFIG_MAX);
    limited.read_to_end(&mut content).ok()?;
    // The checksum is compared at the end.
    matches!(decoder.read(&mut [0]), Ok(0)).then_some(content)
}

const VIRTIO_VDPA: Module = module("virtio_vdpa", "VIRTIO_VDPA");
const VFIO_PCI: Module = module("vfio_pci", "VFIO_PCI");

/// Modules that a host should have, their purpose, and whether they are needed.
const WANTED: [(Module, &str, bool); 7] = [
    (VDPA, "the vDPA bus", true),
    (VHOST_VDPA, "gives VMs /dev/vhost-vdpa-N", true),
    (
        VIRTIO_VDPA,
        "gives vDPA devices to this host and its containers",
        false,
    ),
    (VDUSE, "NICs without hardware (--from software)", false),
    (
        TUN,
        "taps of NICs without hardware (--from software)",
        false,
    ),
    (
        VDPA_SIM_NET,
        "the simulator, for trials without a NIC",
        false,
    ),
    (VFIO_PCI, "gives whole PCI functions to VMs", false),
];

/// The files by which programs use a module, for those without which it is useless.
const FILES: [(Module, &str); 2] = [(VDUSE, "/dev/vduse/control"), (TUN, "/dev/net/tun")];

/// Checks the modules that do not belong to one NIC. The NICs' check covers those of parents.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let modules = Modules::of(host);
    WANTED
        .map(|(module, purpose, needed)| {
            let name = module.name;
            let file = FILES.iter().find(|(module, _)| module.name == name);
            match file {
                Some((_, file)) if modules.presence(module).is_here() && !host.exists(file) => {
                    let found = format!("loaded, but there is no {file} ({purpose})");
                    Finding::warning(name, found)
                        .mend(format!("in a container: start it with --device {file}"))
                        .mend(format!(
                            "on the host: modprobe -r {name} && modprobe {name}"
                        ))
                }
                _ => describe(module, &modules, purpose, needed),
            }
        })
        .into()
}

/// Describes a module as a finding. `needed`: it is a fault if the module is not loaded.
pub(super) fn describe(
    module: Module,
    modules: &Modules<'_>,
    purpose: &str,
    needed: bool,
) -> Finding {
    let Module { name, symbol } = module;
    let load = format!("modprobe {name}");
    match modules.presence(module) {
        Presence::Loaded => Finding::ok(name, format!("loaded ({purpose})")),
        Presence::BuiltIn => Finding::ok(name, format!("built into the kernel ({purpose})")),
        Presence::Loadable if needed => {
            let found = format!("not loaded ({purpose})");
            let keep = format!("at each boot: echo {name} >/etc/modules-load.d/{name}.conf");
            Finding::missing(name, found).mend(load).mend(keep)
        }
        Presence::Loadable => Finding::ok(
            name,
            format!("not loaded ({purpose}); `{load}` where needed"),
        ),
        Presence::Absent if needed => {
            let found = format!("not in this kernel ({purpose})");
            Finding::missing(name, found).mend(format!(
                "boot a kernel with CONFIG_{symbol}=m, such as a distribution's full kernel \
                 (Debian: linux-image-amd64, not linux-image-cloud-amd64), or install its \
                 package of extra modules"
            ))
        }
        Presence::Absent => Finding::ok(
            name,
            format!("not in this kernel (CONFIG_{symbol}), and not needed ({purpose})"),
        ),
        Presence::Unknown(why) => Finding::unknown(name, why),
    }
}

#[cfg(test)]
mod tests;
