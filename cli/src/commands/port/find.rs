//! Finds the port that an argument names.

use bellhop_common::error::Error;
use vdpa_mgmt::devlink::{Devlink, Port, PortHandle};

/// The port that an argument names.
pub(super) fn find(devlink: &Devlink, text: &str) -> Result<PortHandle, Error> {
    match text.parse() {
        Ok(port) => Ok(port),
        Err(_) => Ok(by_interface(devlink, text)?.handle),
    }
}

/// The port with this network interface.
pub(super) fn by_interface(devlink: &Devlink, name: &str) -> Result<Port, Error> {
    let none = || {
        Error::failed(format!(
            "{name:?} is no port: give BUS/DEVICE/INDEX or the name of its network interface; \
             `bellhop port show` lists both"
        ))
    };
    if name.contains('/') {
        return Err(none());
    }
    let mut ports = devlink.ports()?.into_iter();
    let found = ports.find(|port| {
        port.netdev
            .as_ref()
            .is_some_and(|netdev| netdev.name == name)
    });
    found.ok_or_else(none)
}
