//! Undoes one step.
//!
//! Each step may have been done or not, undone by another process, or changed since. So each undo
//! checks first: a setting that this step did not make stays.

use super::error::{NicError, joined};
use super::nics::Nics;
use super::step::{Settings, Step};
use super::wait;
use crate::MgmtDeviceName;
use crate::devlink::{Devlink, FunctionOpstate, FunctionState, Handle, PortHandle};
use crate::error::existing;
use crate::link;
use crate::pci::Address;
use crate::sriov::Links;

/// The objects that stay unchanged, with the reason; `None` if all is undone.
type Undone = Result<Option<String>, NicError>;

impl Nics {
    /// Undoes one step.
    pub(super) fn undo(&self, name: &str, step: &Step) -> Undone {
        match step {
            Step::CountVirtualFunctions { physical, count } => self.uncount(*physical, *count),
            Step::SetVirtualFunction {
                physical,
                virtual_function,
                settings,
                former,
            } => self.unset(*physical, *virtual_function, settings, former),
            Step::BindFunction {
                function,
                driver,
                former_driver,
                former_override,
            } => self.unbind(
                *function,
                driver,
                former_driver.as_deref(),
                former_override.as_deref(),
            ),
            Step::AddPort {
                handle,
                pfnum,
                sfnum,
                port,
            } => self.delete_port(handle, *pfnum, *sfnum, port.as_ref()),
            Step::ActivatePort { port } => self.deactivate(port),
            Step::Serve { service } => self.unserve(name, service),
            Step::AddDevice { mgmtdev } => self.delete(name, mgmtdev),
            Step::Connect { attached } => {
                let left = attached.detach(&link::Links::open()?)?;
                Ok((!left.is_empty()).then(|| joined(&left)))
            }
        }
    }

    /// A vanished function needs no undoing; the driver may release an active one a moment later.
    fn deactivate(&self, port: &PortHandle) -> Undone {
        let devlink = Devlink::open()?;
        let now = || existing(devlink.port(port)).map(|port| port?.function);
        let Some(function) = now()? else {
            return Ok(None);
        };
        if function.state != Some(FunctionState::Inactive) {
            devlink.set_function(port, &FunctionState::Inactive.into())?;
        }
        let what = format!("the removal of the device of the port {port}");
        wait::until(
            &what,
            self.patience,
            || false,
            || (),
            || {
                let function = now()?;
                let attached =
                    function.is_some_and(|one| one.opstate == Some(FunctionOpstate::Attached));
                Ok((!attached).then_some(()))
            },
        )?;
        Ok(None)
    }

    fn delete_port(
        &self,
        handle: &Handle,
        pfnum: u16,
        sfnum: u32,
        port: Option<&PortHandle>,
    ) -> Undone {
        let devlink = Devlink::open()?;
        let ports = existing(devlink.ports_of(handle))?.unwrap_or_default();
        let mut ours = ports
            .iter()
            .filter(|one| one.sfnum(pfnum) == Some(sfnum))
            .filter(|one| port.is_none_or(|port| one.handle == *port));
        let Some(found) = ours.next() else {
            return Ok(None);
        };
        existing(devlink.delete_port(&found.handle))?;
        Ok(None)
    }

    fn delete(&self, name: &str, mgmtdev: &MgmtDeviceName) -> Undone {
        let Some(device) = existing(self.connection.device(name))? else {
            return Ok(None);
        };
        if device.mgmtdev != *mgmtdev {
            let other = device.mgmtdev;
            return Ok(Some(format!("another device {name}, on {other}")));
        }
        existing(self.connection.delete(name))?;
        Ok(None)
    }

    fn unbind(
        &self,
        address: Address,
        driver: &str,
        former_driver: Option<&str>,
        former_override: Option<&str>,
    ) -> Undone {
        let Some(function) = existing(self.pci.function(address))? else {
            return Ok(None);
        };
        let now = function.driver.as_deref();
        if let Some(now) = now.filter(|&now| now != driver && Some(now) != former_driver) {
            return Ok(Some(format!("{address} now has the driver {now}")));
        }
        if let Some(device) = function.vdpa_devices.first() {
            return Ok(Some(format!(
                "{address} has the vDPA device {device}, which is not this NIC's"
            )));
        }
        self.pci
            .restore(&function, driver, former_driver, former_override)?;
        Ok(None)
    }

    fn unset(
        &self,
        physical: Address,
        virtual_function: u32,
        settings: &Settings,
        former: &Settings,
    ) -> Undone {
        let Some(function) = existing(self.pci.function(physical))? else {
            return Ok(None);
        };
        let there = function.virtual_functions.iter();
        if !there.clone().any(|one| one.0 == virtual_function) {
            return Ok(None);
        }
        let interface = function
            .netdevs
            .first()
            .ok_or(NicError::NoInterface(physical))?;
        let links = Links::open()?;
        let link = links.link(interface)?;
        let mut all = link.virtual_functions.iter();
        let Some(now) = all.find(|one| one.index == virtual_function) else {
            return Ok(Some(format!(
                "the driver of {physical} does not report the settings of its virtual functions"
            )));
        };
        let now = Settings::former(&settings.list()?, now);
        let (back, changed) = former.where_still(&now, settings);
        links.set(interface, virtual_function, &back.list()?)?;
        Ok(changed.then(|| {
            format!(
                "settings of virtual function {virtual_function} of {physical} that have changed \
                 meanwhile"
            )
        }))
    }

    fn uncount(&self, physical: Address, count: u32) -> Undone {
        let Some(function) = existing(self.pci.function(physical))? else {
            return Ok(None);
        };
        let there = function.virtual_functions.len();
        if there == 0 {
            return Ok(None);
        }
        if u32::try_from(there) != Ok(count) {
            return Ok(Some(format!(
                "{physical} now has {there} virtual functions, not {count}"
            )));
        }
        if let Some(taken) = self.used(&function)? {
            return Ok(Some(format!(
                "the virtual functions of {physical}, because others use them: {taken}"
            )));
        }
        self.pci.set_virtual_functions(physical, 0)?;
        Ok(None)
    }
}
