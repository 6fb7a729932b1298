//! A machine as it is put into words for the daemon: options or a file become the body of `PUT /v1/vms/{name}`.

use std::path::{Path, PathBuf};

use bellhop_api::node::{Desired, NicId, NicSettings, Restart};
use serde_json::{Map, Value, json};

use super::create::Arguments;
use crate::client::Address;
use crate::config_file;
use crate::error::Error;

/// The options cannot be put into words.
fn unwritable(source: serde_json::Error) -> Error {
    Error::wrong("the options cannot be put into words").because(source)
}

fn not_a_table() -> Error {
    Error::failed("the file says what machine it is in a table; this one has something else")
}

/// The body that asks for a NIC, under this name.
pub(crate) fn nic_body(nic: &NicSettings, id: &str, node: &Address) -> Result<Value, Error> {
    let mut nic = nic.clone();
    if let Some(path) = &mut nic.path {
        *path = absolute(path, node)?;
    }
    let mut body = serde_json::to_value(nic).map_err(unwritable)?;
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
pub(super) fn body(arguments: &Arguments, node: &Address) -> Result<Value, Error> {
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

fn of_file(file: &Path, node: &Address) -> Result<Map<String, Value>, Error> {
    let Value::Object(mut body) = config_file::read(file)? else {
        return Err(not_a_table());
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

fn of_options(arguments: &Arguments, node: &Address) -> Result<Map<String, Value>, Error> {
    let config = arguments.machine.config();
    let mut config = config
        .ok_or_else(|| Error::wrong("no kernel is given; say --kernel PATH or --file FILE"))?;
    for path in std::iter::once(&mut config.kernel).chain(&mut config.initramfs) {
        *path = absolute(path, node)?;
        text(path)?;
    }
    for disk in &mut config.disks {
        disk.path = absolute(&disk.path, node)?;
    }
    let Value::Object(mut body) = serde_json::to_value(config).map_err(unwritable)? else {
        return Err(not_a_table());
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
            return Err(Error::wrong(format!("two NICs have the id {id}")));
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

fn make_absolute(value: &mut Value, node: &Address) -> Result<(), Error> {
    // What is no text the daemon refuses, and names it.
    if let Some(path) = value.as_str() {
        *value = text(&absolute(Path::new(path), node)?)?;
    }
    Ok(())
}

/// The daemon's working directory is not this command's.
pub(crate) fn absolute(path: &Path, node: &Address) -> Result<PathBuf, Error> {
    let shown = path.display();
    match node {
        Address::Https { .. } if path.is_relative() => Err(Error::wrong(format!(
            "{shown} is a path of this machine, and the daemon is on another one; say it from / on"
        ))),
        _ => std::path::absolute(path).map_err(|source| {
            Error::wrong(format!("there is no directory to which {shown} belongs")).because(source)
        }),
    }
}

fn text(path: &Path) -> Result<Value, Error> {
    path.to_str().map(Value::from).ok_or_else(|| {
        let shown = path.display();
        Error::wrong(format!("{shown} has no name that can be written in JSON"))
    })
}
