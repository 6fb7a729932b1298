//! Everything on the host in which the creation of a NIC may leave traces.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lab::process::output;
use serde_json::Value;

use super::support::{bellhop, printed};

/// The directory of the records.
const RECORDS: &str = "/run/bellhop/nics";

/// Names of the NICs in these tests.
pub(crate) const NAMES: [&str; 3] = ["lab-nic0", "lab-nic1", "lab-nic2"];

/// Removes what a failed test has left, so that the next test does not find it.
pub(crate) fn clean_up() {
    for name in NAMES {
        bellhop(&["nic", "remove", name]);
        let _ = fs::remove_file(record(name));
    }
}

/// The path of a NIC's record.
pub(crate) fn record(name: &str) -> PathBuf {
    Path::new(RECORDS).join(format!("{name}.json"))
}

/// Creates a NIC; returns its character device.
pub(crate) fn made(arguments: &[&str]) -> PathBuf {
    let arguments = [&["nic", "make"], arguments].concat();
    let text = printed(&bellhop(&arguments));
    let path = text.strip_suffix('\n').unwrap();
    assert!(path.starts_with("/dev/vhost-vdpa-"), "{text}");
    path.into()
}

/// The state that other tools and sysfs report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traces(BTreeMap<String, String>);

impl Traces {
    pub(crate) fn find() -> Self {
        let mut all = tools();
        for directory in [
            "/sys/bus/pci/devices",
            "/sys/bus/auxiliary/devices",
            "/sys/bus/vdpa/devices",
            "/sys/bus/virtio/devices",
            "/sys/class/net",
            "/sys/kernel/iommu_groups",
            "/dev",
            RECORDS,
        ] {
            for name in names(Path::new(directory)) {
                let path = Path::new(directory).join(&name);
                // The lock stays; terminals of other tests come and go.
                if name == "lock" || directory == "/dev" && !name.starts_with("vhost-vdpa") {
                    continue;
                }
                let link = |file: &str| {
                    let target = fs::read_link(path.join(file)).ok();
                    target.map(|target| target.display().to_string())
                };
                let text = |file: &str| fs::read_to_string(path.join(file)).ok();
                let told = format!(
                    "driver {:?} override {:?} vfs {:?} flags {:?}",
                    link("driver"),
                    text("driver_override"),
                    text("sriov_numvfs"),
                    text("flags"),
                );
                all.insert(path.display().to_string(), told);
            }
        }
        Self(all)
    }

    /// Fails with the differences.
    #[track_caller]
    pub(crate) fn assert_same(&self, when: &str) {
        self.compare(when, &Self::find());
    }

    /// Like [`Self::assert_same`], except that the record of this NIC now exists.
    #[track_caller]
    pub(crate) fn assert_only_recorded(&self, name: &str, when: &str) {
        let mut now = Self::find();
        let recorded = now.0.remove(&record(name).display().to_string());
        assert!(recorded.is_some(), "{when}: no record");
        self.compare(when, &now);
    }

    #[track_caller]
    fn compare(&self, when: &str, now: &Self) {
        if now == self {
            return;
        }
        let mut different = Vec::new();
        for key in self.0.keys().chain(now.0.keys()) {
            let (before, after) = (self.0.get(key), now.0.get(key));
            if before != after {
                different.push(format!("{key}\n  before {before:?}\n  after  {after:?}"));
            }
        }
        different.sort();
        different.dedup();
        panic!("{when}: not as before:\n{}", different.join("\n"));
    }
}

/// The output of iproute2's tools, by command. One shell runs all of them: under emulation, a
/// process start costs most.
fn tools() -> BTreeMap<String, String> {
    const COMMANDS: [&str; 8] = [
        "ip -j -d link",
        "ip -j addr",
        "ip -j route show table all",
        "bridge -j vlan show",
        "vdpa -j mgmtdev show",
        "vdpa -j dev show",
        "devlink -j dev show",
        "devlink -j port show",
    ];
    let mut shell = Command::new("sh");
    let printed = output(shell.args(["-ec", &COMMANDS.join("\n")])).unwrap();
    let values = serde_json::Deserializer::from_slice(&printed).into_iter::<Value>();
    let values: Vec<Value> = values.map(Result::unwrap).collect();
    // Each prints one value, even when it has nothing to show.
    assert_eq!(values.len(), COMMANDS.len(), "{values:?}");
    let mut all = BTreeMap::new();
    for (command, mut told) in COMMANDS.into_iter().zip(values) {
        without_clocks(&mut told);
        all.insert(command.to_owned(), told.to_string());
    }
    all
}

/// Removes values that change by themselves: timers of bridges.
fn without_clocks(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(without_clocks),
        Value::Object(fields) => {
            fields.retain(|name, _| !name.ends_with("_timer"));
            fields.values_mut().for_each(without_clocks);
        }
        _ => {}
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
