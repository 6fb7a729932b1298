//! A machine as it is put into words for the daemon: options or a file become the body of `PUT /v1/vms/{name}`.

use std::path::{Path, PathBuf};

use bellhop_api::node::{Desired, NicId, NicSettings, Restart};
use serde_json::{Map, Value, json};

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

/// The body that asks for a NIC, under this name.
pub(crate) fn nic_body(nic: &NicSettings, id: &str, node: &Address) -> Result<Value, SpecError> {
    let mut nic = nic.clone();
    if let Some(path) = &mut nic.path {
        *path = absolute(path, node)?;
    }
    let mut body = serde_json::to_value(nic)?;
    body["id"] = id.into();
    Ok(body)
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
        body.insert("state".to_owned(), json!(Desired::Stopped));
    }
    if let Some(restart) = arguments.restart {
        body.insert("restart".to_owned(), json!(Restart::from(restart)));
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
    let config = arguments.machine.config();
    let mut config = config.ok_or(SpecError::NoKernel)?;
    for path in std::iter::once(&mut config.kernel).chain(&mut config.initramfs) {
        *path = absolute(path, node)?;
        text(path)?;
    }
    for disk in &mut config.disks {
        disk.path = absolute(&disk.path, node)?;
    }
    let Value::Object(mut body) = serde_json::to_value(config)? else {
        return Err(SpecError::NotATable);
    };
    // The daemon has NICs instead, and this command no option.
    body.remove("vdpa");
    body.remove("ring_watch");
    let mut taken: Vec<String> = Vec::new();
    for id in arguments
        .nics
        .iter()
        .filter_map(|nic| nic.id.as_ref().map(NicId::to_string))
    {
        if taken.contains(&id) {
            return Err(SpecError::TwoNics(id));
        }
        taken.push(id);
    }
    let mut nics = Vec::new();
    for nic in &arguments.nics {
        let id = nic.id.as_ref().map(NicId::to_string).unwrap_or_else(|| {
            let id = free_nic_id(&taken);
            taken.push(id.clone());
            id
        });
        nics.push(nic_body(nic, &id, node)?);
    }
    body.insert("nics".to_owned(), nics.into());
    Ok(body)
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
