//! Deletes the devices of a `bellhop swnic` that was killed.

use std::thread;

use bellhop_common::error::Error;
use vdpa::eventfd;
use vdpa::vduse::{Control, Device};
use vdpa_mgmt::{Connection, ErrorKind};

use super::{MGMTDEV, failed};

/// Deletes the devices `name`, unless a process serves or uses them. The tap of a killed process
/// ended with it.
pub(super) fn delete(connection: &Connection, control: &Control, name: &str) -> Result<(), Error> {
    let added = match connection.device(name) {
        Ok(device) if device.mgmtdev.to_string() != MGMTDEV => {
            return Err(Error::conflict(format!(
                "there is a vDPA device {name} on {}: choose another name",
                device.mgmtdev
            )));
        }
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error.into()),
    };
    if !Control::exists(name) {
        return Ok(());
    }
    let device = Device::open(name).map_err(failed)?;
    tracing::warn!(name, "deleting the NIC of a process that was killed");
    if added {
        let stop = eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
        thread::scope(|scope| {
            // A driver that is taken away resets the device, and waits for the answer. The device
            // is deleted without answers, too, but later.
            scope.spawn(|| drop(device.idle(eventfd::descriptor(&stop))));
            let deleted = connection.delete(name);
            let _ = stop.write(1);
            deleted
        })?;
    }
    drop(device);
    control.destroy(name).map_err(failed)
}
