//! Created NICs as listings.

use vdpa_mgmt::nic::{MadeNic, State, Step, server};
use vdpa_mgmt::{ClassConfig, Connection};

use crate::listing::{Entry, Layout, Listing};
use crate::text::address;

/// A listing of NICs.
///
/// # Errors
/// The kernel does not answer.
pub fn listing(nics: &[MadeNic]) -> Result<Listing, vdpa_mgmt::Error> {
    let mut entries = Vec::new();
    if !nics.is_empty() {
        let connection = Connection::open()?;
        entries.extend(nics.iter().map(|nic| entry(nic, &connection)));
    }
    Ok(Listing {
        section: "nic",
        layout: Layout::Line,
        entries,
    })
}

/// A NIC with all known fields.
fn entry(nic: &MadeNic, connection: &Connection) -> Entry {
    let mut entry = Entry::new(nic.name())
        .with_text("from", nic.from())
        .with_text(
            "state",
            match nic.state() {
                State::Made => "made",
                State::Making => "making",
                State::Removing => "removing",
            },
        )
        .with_some("owner", nic.owner());
    for step in nic.steps() {
        entry = match step {
            Step::CountVirtualFunctions { physical, count } => entry
                .with_text("pf", format!("pci/{physical}"))
                .with_number("vfs", Some(*count)),
            Step::SetVirtualFunction {
                virtual_function, ..
            } => entry.with_number("vf", Some(*virtual_function)),
            Step::BindFunction {
                function, driver, ..
            } => entry
                .with_text("function", format!("pci/{function}"))
                .with_text("driver", driver),
            Step::AddPort { sfnum, port, .. } => entry
                .with_some("port", port.as_ref().map(ToString::to_string))
                .with_number("sfnum", Some(*sfnum)),
            Step::ActivatePort { .. } => entry,
            Step::Serve { service } => {
                // Without a right to read the lock the process is unknown.
                let pid = server::holder(nic.name()).ok().flatten();
                let pid = pid.and_then(|pid| u32::try_from(pid.as_raw_pid()).ok());
                let port = service.port.as_ref();
                let poll = Some(service.poll_percent).filter(|percent| *percent > 0);
                entry
                    .with_some("tap", service.tap.as_deref())
                    .with_some("port", port.map(|port| port.interface.as_str()))
                    .with_number("queue", port.map(|port| port.queue))
                    .with_number("poll", poll)
                    .with_number("pid", pid)
            }
            Step::AddDevice { mgmtdev } => entry.with_text("mgmtdev", mgmtdev.to_string()),
            Step::Connect { attached } => entry.with_some("representor", attached.interface()),
        };
    }
    let Some(mgmtdev) = nic.mgmtdev() else {
        return entry;
    };
    let device = connection.device(nic.name());
    if !device.is_ok_and(|device| device.mgmtdev == *mgmtdev) {
        return entry.with_flag("exists", Some(false));
    }
    if let Ok(device) = vdpa_mgmt::bus::Bus::default().device(nic.name()) {
        entry = match device.path() {
            Some(path) => entry.with_text("path", path.display().to_string()),
            None => entry.with_text("bus_driver", device.driver.as_deref().unwrap_or("none")),
        };
    }
    match connection.config(nic.name()).map(|config| config.class) {
        Ok(ClassConfig::Net(net)) => entry
            .with_some("mac", net.mac.map(|mac| address(&mac)))
            .with_number("mtu", net.mtu)
            .with_number("max_vq_pairs", net.max_vq_pairs),
        _ => entry,
    }
}
