//! NICs and paths in the form of the daemon's API.

use std::path::{Path, PathBuf};

use bellhop_api::node::NicSettings;
use bellhop_common::client::Address;
use bellhop_common::error::Error;
use serde_json::Value;

use crate::commands::machine_arguments::json_of;

/// The request body for a NIC of this name.
pub(crate) fn nic_body(nic: &NicSettings, id: &str, node: &Address) -> Result<Value, Error> {
    let mut nic = nic.clone();
    if let Some(path) = &mut nic.path {
        *path = absolute(path, node)?;
    }
    let mut body = json_of(&nic)?;
    body["id"] = id.into();
    Ok(body)
}

/// The first of `{kind}0`, `{kind}1`, … that is not taken.
pub(super) fn free_id(kind: &str, taken: &[String]) -> String {
    let mut number = 0_u64;
    loop {
        let id = format!("{kind}{number}");
        if !taken.contains(&id) {
            return id;
        }
        number += 1;
    }
}

/// Makes a path absolute, because the daemon has another working directory.
pub(crate) fn absolute(path: &Path, node: &Address) -> Result<PathBuf, Error> {
    let shown = path.display();
    match node {
        Address::Https { .. } | Address::Ssh { .. } if path.is_relative() => Err(Error::wrong(
            format!("{shown}: use an absolute path; the daemon runs on another host"),
        )),
        _ => std::path::absolute(path).map_err(|source| {
            Error::wrong(format!("cannot make {shown} an absolute path")).because(source)
        }),
    }
}
