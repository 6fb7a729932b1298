//! A machine as it is put into words for the daemon: options or a file become the body of `PUT /v1/vms/{name}`.

use std::path::{Path, PathBuf};

use serde::ser::{SerializeMap as _, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use vmm::config::{
    DEFAULT_CMDLINE, DiskConfig, DoorbellMode, KeyValueError, MacAddress, MemoryConfig,
    from_key_value,
};

use super::create::Arguments;
use crate::client::Address;
use crate::config_file::{self, ConfigFileError};

/// Why a machine cannot be put into words.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpecError {
    #[error(transparent)]
    File(#[from] ConfigFileError),
    #[error("the file says what machine it is in a table; this one has something else")]
    NotATable,
    #[error("no kernel is given; say --kernel PATH or --file FILE")]
    NoKernel,
    #[error("{0} is a path of this machine, and the daemon is on another one; say it from / on")]
    Relative(PathBuf),
    #[error("{} has no name that can be written in JSON", .0.display())]
    NotText(PathBuf),
    #[error("there is no directory to which {path} belongs")]
    NoDirectory {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the options cannot be put into words")]
    Json(#[from] serde_json::Error),
    #[error("two NICs have the id {0}")]
    TwoNics(String),
}

impl SpecError {
    /// Whether it is the command line that is wrong, and not a file.
    pub(crate) fn is_wrong_command_line(&self) -> bool {
        !matches!(self, Self::File(_) | Self::NotATable)
    }
}

/// A NIC as an option says it; keys are those of the file and of the API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NicArgument {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<KindWord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bridge: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vlan: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mac: Option<MacAddress>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mtu: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    queue_pairs: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_tx_rate: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min_tx_rate: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    virtual_functions: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    doorbell: Option<DoorbellMode>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rescue: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failover: Option<StandByArgument>,
}

/// What stands by for a NIC: a path is a device that is there, all else what one is made of.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
enum StandByArgument {
    Path(PathBuf),
    From(String),
}

impl From<String> for StandByArgument {
    fn from(text: String) -> Self {
        match text.starts_with('/') {
            true => Self::Path(text.into()),
            false => Self::From(text),
        }
    }
}

impl Serialize for StandByArgument {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        match self {
            Self::Path(path) => map.serialize_entry("path", path)?,
            Self::From(from) => map.serialize_entry("from", from)?,
        }
        map.end()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindWord {
    Auto,
    Vf,
    Sf,
}

/// Why an option is no NIC.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NicArgumentError {
    #[error(transparent)]
    KeyValue(#[from] KeyValueError),
    #[error("say one of from=NIC, path=/dev/vhost-vdpa-N and device=NAME")]
    Source,
}

impl std::str::FromStr for NicArgument {
    type Err = NicArgumentError;

    fn from_str(text: &str) -> Result<Self, NicArgumentError> {
        let nic: Self = from_key_value(text)?;
        let given = [nic.from.is_some(), nic.path.is_some(), nic.device.is_some()];
        match given.into_iter().filter(|given| *given).count() {
            1 => Ok(nic),
            _ => Err(NicArgumentError::Source),
        }
    }
}

impl NicArgument {
    /// The body that asks for it, under this name.
    pub(crate) fn body(&self, id: &str, node: &Address) -> Result<Value, SpecError> {
        let mut nic = self.clone();
        nic.id = Some(id.to_owned());
        if let Some(path) = &mut nic.path {
            *path = absolute(path, node)?;
        }
        Ok(serde_json::to_value(nic)?)
    }
}

/// The first of `net0`, `net1`, … that is not among these.
pub(crate) fn free_nic_id(taken: &[String]) -> String {
    let mut number = 0_u64;
    loop {
        let id = format!("net{number}");
        if !taken.contains(&id) {
            return id;
        }
        number += 1;
    }
}

/// The body that asks for the machine. Paths are this command's, so they are sent from the root on.
pub(super) fn body(arguments: &Arguments, node: &Address) -> Result<Value, SpecError> {
    let mut body = match &arguments.file {
        Some(file) => of_file(file, node)?,
        None => of_options(arguments, node)?,
    };
    if arguments.stopped {
        body.insert("state".to_owned(), json!("Stopped"));
    }
    if let Some(restart) = arguments.restart {
        body.insert("restart".to_owned(), json!(restart.word()));
    }
    Ok(Value::Object(body))
}

fn of_file(file: &Path, node: &Address) -> Result<Map<String, Value>, SpecError> {
    let Value::Object(mut body) = config_file::read(file)? else {
        return Err(SpecError::NotATable);
    };
    for key in ["kernel", "initramfs"] {
        if let Some(value) = body.get_mut(key) {
            make_absolute(value, node)?;
        }
    }
    for list in ["disks", "nics"] {
        let entries = body.get_mut(list).and_then(Value::as_array_mut);
        for entry in entries.into_iter().flatten() {
            if let Some(path) = entry.get_mut("path") {
                make_absolute(path, node)?;
            }
        }
    }
    Ok(body)
}

fn of_options(arguments: &Arguments, node: &Address) -> Result<Map<String, Value>, SpecError> {
    let kernel = arguments.kernel.as_ref().ok_or(SpecError::NoKernel)?;
    let mut body = Map::new();
    body.insert("kernel".to_owned(), text(&absolute(kernel, node)?)?);
    if let Some(initramfs) = &arguments.initramfs {
        body.insert("initramfs".to_owned(), text(&absolute(initramfs, node)?)?);
    }
    let cmdline = arguments.cmdline.as_deref().unwrap_or(DEFAULT_CMDLINE);
    body.insert("cmdline".to_owned(), json!(cmdline));
    body.insert("cpus".to_owned(), serde_json::to_value(arguments.cpus)?);
    if !arguments.cpu.is_host() {
        body.insert("cpu".to_owned(), serde_json::to_value(arguments.cpu)?);
    }
    if let Some(affinity) = &arguments.cpu_affinity {
        body.insert("cpu_affinity".to_owned(), serde_json::to_value(affinity)?);
    }
    let memory: MemoryConfig = arguments.memory;
    body.insert("memory".to_owned(), serde_json::to_value(memory)?);
    let disks = arguments.disks.iter().map(|disk| disk_of(disk, node));
    let disks: Vec<Value> = disks.collect::<Result<_, _>>()?;
    body.insert("disks".to_owned(), disks.into());
    let mut taken: Vec<String> = Vec::new();
    for id in arguments.nics.iter().filter_map(|nic| nic.id.clone()) {
        if taken.contains(&id) {
            return Err(SpecError::TwoNics(id));
        }
        taken.push(id);
    }
    let mut nics = Vec::new();
    for nic in &arguments.nics {
        let id = nic.id.clone().unwrap_or_else(|| {
            let id = free_nic_id(&taken);
            taken.push(id.clone());
            id
        });
        nics.push(nic.body(&id, node)?);
    }
    body.insert("nics".to_owned(), nics.into());
    Ok(body)
}

fn disk_of(disk: &DiskConfig, node: &Address) -> Result<Value, SpecError> {
    let mut disk = disk.clone();
    disk.path = absolute(&disk.path, node)?;
    Ok(serde_json::to_value(disk)?)
}

fn make_absolute(value: &mut Value, node: &Address) -> Result<(), SpecError> {
    // What is no text the daemon refuses, and names it.
    if let Some(path) = value.as_str() {
        *value = text(&absolute(Path::new(path), node)?)?;
    }
    Ok(())
}

/// The daemon's working directory is not this command's.
pub(crate) fn absolute(path: &Path, node: &Address) -> Result<PathBuf, SpecError> {
    match node {
        Address::Https { .. } if path.is_relative() => Err(SpecError::Relative(path.to_owned())),
        _ => std::path::absolute(path).map_err(|source| SpecError::NoDirectory {
            path: path.to_owned(),
            source,
        }),
    }
}

fn text(path: &Path) -> Result<Value, SpecError> {
    let text = path.to_str();
    text.map(Value::from)
        .ok_or_else(|| SpecError::NotText(path.to_owned()))
}
