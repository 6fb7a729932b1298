//! The description of a VM by a file and options, for `bellhop run` and `bellhop vm create`.
//!
//! Owns the precedence between them. The spec of the daemon defines the keys of a file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bellhop_api::config::{
    CpuAffinity, CpuBaseline, CpuCount, DEFAULT_CMDLINE, DiskConfig, MemoryConfig,
};
use bellhop_api::merge_patch;
use bellhop_common::error::Error;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::config_file;
use crate::setting::{self, Setting};

/// A VM without its NICs, which the two commands name in different ways. It serializes to the
/// options' values.
#[derive(Debug, Clone, Serialize, clap::Args)]
#[command(group = clap::ArgGroup::new("described").multiple(true).args(["kernel", "file"]))]
pub(crate) struct MachineArguments {
    /// Kernel: an ELF with a PVH note (vmlinux) or a bzImage (vmlinuz)
    #[arg(long, value_name = "PATH")]
    pub(crate) kernel: Option<PathBuf>,

    /// Initial RAM file system
    #[arg(long, value_name = "PATH", requires = "described")]
    pub(crate) initramfs: Option<PathBuf>,

    #[arg(
        long,
        value_name = "STRING",
        requires = "described",
        help = format!("Kernel command line [default: {DEFAULT_CMDLINE}]")
    )]
    cmdline: Option<String>,

    // `help` instead of a doc comment: rustdoc reads brackets as links.
    #[arg(
        long,
        value_name = "N",
        requires = "described",
        help = "Number of vCPUs, 1 to 32 [default: 1]"
    )]
    cpus: Option<CpuCount>,

    #[arg(
        long,
        value_name = "NAME",
        requires = "described",
        help = "CPU model of the guest: host, x86-64-v2, x86-64-v3 or x86-64-v4. A guest that \
                moves between different hosts of one vendor needs a level that all hosts reach \
                [default: host]"
    )]
    cpu: Option<CpuBaseline>,

    /// Host CPUs for each vCPU, one list per vCPU separated by colons: 0-1:2 (vCPU 0 on CPUs 0 and
    /// 1, vCPU 1 on CPU 2)
    #[arg(long, value_name = "LISTS")]
    pub(crate) cpu_affinity: Option<CpuAffinity>,

    #[arg(
        long,
        value_name = "SIZE",
        requires = "described",
        help = "Guest memory: 512M, 4G, or size=4G[,hugepages=2M|1G][,host_numa_node=N], with N \
                the only NUMA node to take memory from [default: 512M]"
    )]
    memory: Option<MemoryConfig>,

    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        requires = "described",
        help = "A disk, raw: FILE or path=FILE[,id=NAME][,readonly=on][,iommu=on]\
                [,stall_kick=on][,bps=100M][,iops=N][,burst=SECONDS] (may be repeated)"
    )]
    #[serde(skip)]
    disks: Vec<DiskConfig>,

    /// Read the VM from this TOML, JSON or YAML file; - is standard input. Options override it
    ///
    /// A device of an option replaces the device with the same id in the file.
    /// `bellhop config schema` prints the keys.
    #[arg(short, long, alias = "config", value_name = "FILE")]
    #[serde(skip)]
    pub(crate) file: Option<PathBuf>,

    /// Set any key of a file: --set ring_watch=off, --set memory.hugepages=2M (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "described")]
    #[serde(skip)]
    settings: Vec<Setting>,
}

/// A VM as a file and options describe it. The daemon checks the fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Description {
    /// Its name, if the file has one.
    pub(crate) name: Option<String>,
    /// The fields of its spec.
    pub(crate) fields: Map<String, Value>,
}

impl MachineArguments {
    /// The VM without the NICs of options; none without a kernel and a file.
    pub(crate) fn description(&self) -> Result<Option<Description>, Error> {
        let fields = match &self.file {
            Some(file) => flat(config_file::read(file)?),
            None if self.kernel.is_none() => return Ok(None),
            None => Map::new(),
        };
        let Value::Object(mut options) = json_of(self)? else {
            return Ok(None);
        };
        options.retain(|_, value| !value.is_null());
        let mut description = Description::new(patched(fields, options), &self.settings)?;
        let disks = self.disks.iter().map(json_of);
        let disks = disks.collect::<Result<_, _>>()?;
        put_devices(&mut description.fields, "disks", disks)?;
        Ok(Some(description))
    }
}

impl Description {
    /// Reads a file, and changes values.
    pub(crate) fn read(file: &Path, settings: &[Setting]) -> Result<Self, Error> {
        Self::new(flat(config_file::read(file)?), settings)
    }

    fn new(fields: Map<String, Value>, settings: &[Setting]) -> Result<Self, Error> {
        let mut fields = patched(fields, setting::patch(settings));
        let name = match fields.remove("name") {
            Some(Value::String(name)) => Some(name),
            Some(other) => {
                let message = format!("`name` in the file must be a string, but is {other}");
                return Err(Error::invalid_input(message));
            }
            None => None,
        };
        Ok(Self { name, fields })
    }
}

/// The VM of the API with these fields of a file; also a merge patch of it.
pub(crate) fn resource(mut fields: Map<String, Value>) -> Value {
    let mut vm = Map::new();
    for name in ["labels", "annotations"] {
        if let Some(value) = fields.remove(name) {
            vm.insert(name.to_owned(), value);
        }
    }
    vm.insert("spec".to_owned(), fields.into());
    vm.into()
}

/// The fields of a file that has the VM as the API does. Those of another file stay as they are.
pub(crate) fn flat(mut file: Map<String, Value>) -> Map<String, Value> {
    if file.get("spec").is_some_and(Value::is_object) {
        // The daemon has these.
        file.remove("generation");
        file.remove("status");
        if let Some(Value::Object(spec)) = file.remove("spec") {
            file.extend(spec);
        }
    }
    file
}

fn patched(fields: Map<String, Value>, patch: Map<String, Value>) -> Map<String, Value> {
    let mut fields = Value::Object(fields);
    merge_patch::apply(&mut fields, &Value::Object(patch));
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Adds devices to a list of the spec. A device replaces another one with the same ID.
///
/// # Errors
/// Two of `devices` have the same ID.
pub(crate) fn put_devices(
    fields: &mut Map<String, Value>,
    list: &str,
    devices: Vec<Value>,
) -> Result<(), Error> {
    if devices.is_empty() {
        return Ok(());
    }
    let mut ids = BTreeSet::new();
    for id in devices
        .iter()
        .filter_map(|device| device.get("id")?.as_str())
    {
        if !ids.insert(id) {
            return Err(Error::wrong(format!(
                "two options for {list} have the ID {id}: give each device its own ID"
            )));
        }
    }
    let there = fields.entry(list).or_insert_with(|| json!([]));
    // The check of the spec rejects another value.
    let Some(there) = there.as_array_mut() else {
        return Ok(());
    };
    for device in devices {
        let id = device.get("id");
        let mut others = there.iter_mut();
        match others.find(|other| id.is_some() && other.get("id") == id) {
            Some(other) => *other = device,
            None => there.push(device),
        }
    }
    Ok(())
}

/// An option's value as in a file.
pub(crate) fn json_of(value: &impl Serialize) -> Result<Value, Error> {
    let unwritable = |source| Error::wrong("cannot encode the options").because(source);
    serde_json::to_value(value).map_err(unwritable)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        machine: MachineArguments,
    }

    fn described(words: &[&str]) -> Option<Value> {
        let line = std::iter::once(&"x").chain(words);
        let line = Line::try_parse_from(line).unwrap();
        let description = line.machine.description().unwrap();
        description.map(|description| Value::Object(description.fields))
    }

    #[test]
    fn options_override_the_file() {
        let file = std::env::temp_dir().join(format!("bellhop-run-{}.yaml", std::process::id()));
        let text = "name: web\nkernel: /k\ncpus: 4\nmemory: {size: 1G, hugepages: 2M}\n\
                    disks:\n- {path: /a, id: a}\n- {path: /b, id: b}\n";
        std::fs::write(&file, text).unwrap();
        let path = file.to_str().unwrap();
        let words = [
            "-f",
            path,
            "--cpus=2",
            "--memory=2G",
            "--disk=/c,id=a",
            "--disk=/d",
            "--set=cmdline=quiet",
            "--set=restart=always",
        ];
        let disk = |path: &str| json!({"path": path, "readonly": false, "stall_kick": false});
        let mut replaced = disk("/c");
        replaced["id"] = "a".into();
        let wanted = json!({
            "kernel": "/k", "cpus": 2, "memory": {"size": "2G", "hugepages": "2M"},
            "disks": [replaced, {"path": "/b", "id": "b"}, disk("/d")],
            "cmdline": "quiet", "restart": "always",
        });
        assert_eq!(described(&words), Some(wanted));
        let name = Description::read(&file, &[]).unwrap().name;
        assert_eq!(name.as_deref(), Some("web"));
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_file_may_have_the_form_of_the_api() {
        let vm = json!({"name": "web", "labels": {"tier": "web"}, "generation": 7,
            "spec": {"kernel": "/k", "cpus": 2}, "status": {"phase": "Running"}});
        let fields = json!({"name": "web", "labels": {"tier": "web"}, "kernel": "/k", "cpus": 2});
        let object = |value: &Value| value.as_object().unwrap().clone();
        assert_eq!(Value::from(flat(object(&vm))), fields);
        assert_eq!(Value::from(flat(object(&fields))), fields);
        let mut fields = object(&fields);
        fields.remove("name");
        let body = json!({"labels": {"tier": "web"}, "spec": {"kernel": "/k", "cpus": 2}});
        assert_eq!(resource(fields), body);
    }

    #[test]
    fn a_machine_needs_a_kernel_or_a_file() {
        assert_eq!(described(&[]), None);
        assert_eq!(described(&["--kernel=k"]), Some(json!({"kernel": "k"})));
        for word in ["--cpus=2", "--disk=d", "--set=a=b"] {
            assert!(Line::try_parse_from(["x", word]).is_err(), "{word}");
        }
    }
}
