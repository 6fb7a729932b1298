//! Creates a subfunction of a NIC in switchdev mode, up to its management device.
//!
//! ```text
//!   port added (pcisf) ──> address, rates ──> active ──> its device appears (nested devlink)
//!        ──> is it a management device? ──no──> enable_vnet, reload ──> it becomes one
//! ```
//!
//! Address and rates are deleted with the port, parameters with the subfunction. So only the port
//! and its state are steps to undo.

use super::error::NicError;
use super::making::Making;
use super::nics::Nics;
use super::origin::is_switchdev;
use super::phase::Phase;
use super::request::NicRequest;
use super::step::Step;
use crate::devlink::{
    Cmode, Devlink, FunctionOpstate, FunctionSettings, FunctionState, Handle, NewSubfunction,
    ParamValue, Port, PortHandle, RateObject, RateSettings, ReloadAction,
};
use crate::journal::Outcome;
use crate::{ErrorKind, MgmtDeviceName};

/// The parameter that makes an instance support vDPA devices (devlink-params.rst).
const ENABLE_VNET: &str = "enable_vnet";

/// Bytes per second of 1 Mbit/s.
const BYTES_PER_MBIT: u64 = 125_000;

/// Maximum attempts with another number, if another process was faster.
const ATTEMPTS: u32 = 8;

impl Nics {
    /// Checks whether a subfunction can be created, as far as that is known before any change.
    pub(super) fn check_subfunction(
        &self,
        request: &NicRequest,
        handle: &Handle,
    ) -> Result<(), NicError> {
        if request.virtual_functions.is_some() {
            return Err(NicError::NoSuchKind(
                handle.to_string(),
                "virtual functions to count",
            ));
        }
        if is_switchdev(handle)? {
            Ok(())
        } else {
            Err(NicError::NotSwitchdev(handle.clone()))
        }
    }
}

impl Making<'_> {
    /// All phases from a NIC to a vDPA device on a subfunction. Returns its port.
    pub(super) fn subfunction(
        &mut self,
        request: &NicRequest,
        handle: &Handle,
        pfnum: u16,
    ) -> Result<PortHandle, NicError> {
        self.phase = Phase::AddPort;
        let devlink = Devlink::open()?;
        let port = self.add_port(&devlink, handle, pfnum)?;
        let name = port.to_string();
        self.phase(Phase::ConfigurePort, &name, |_| {
            configure(&devlink, &port, request)
        })?;
        self.activate(&devlink, &port)?;
        let instance = self.phase(Phase::AwaitSubfunction, &name, |making| {
            making.wait(&format!("the device of the port {port}"), || {
                attached(&devlink.port(&port)?)
            })
        })?;
        let mgmtdev: MgmtDeviceName = instance.to_string().parse()?;
        self.phase(Phase::EnableVnet, &instance.to_string(), |making| {
            if making.nics.has_mgmt_device(&mgmtdev)? {
                Ok(())
            } else {
                enable_vnet(&devlink, &instance)
            }
        })?;
        self.await_mgmt_device(&mgmtdev)?;
        self.add_device_with_address(request, &mgmtdev, request.mac.is_some())?;
        Ok(port)
    }

    fn add_port(
        &mut self,
        devlink: &Devlink,
        handle: &Handle,
        pfnum: u16,
    ) -> Result<PortHandle, NicError> {
        let mut attempts = 0;
        loop {
            let sfnum = number(devlink, handle, pfnum)?;
            attempts += 1;
            match self.add_numbered_port(devlink, handle, pfnum, sfnum) {
                Err(error) if attempts < ATTEMPTS && is_taken(&error) => {}
                added => return added,
            }
        }
    }

    fn add_numbered_port(
        &mut self,
        devlink: &Devlink,
        handle: &Handle,
        pfnum: u16,
        sfnum: u32,
    ) -> Result<PortHandle, NicError> {
        let step = |port| Step::AddPort {
            handle: handle.clone(),
            pfnum,
            sfnum,
            port,
        };
        let subfunction = NewSubfunction {
            pfnum,
            sfnum: Some(sfnum),
            ..NewSubfunction::default()
        };
        let done = self.step(step(None), |_| {
            match devlink.add_port(handle, &subfunction) {
                Ok(port) => Outcome::Done(port.handle),
                Err(error) => match error.kind() {
                    ErrorKind::NoAnswer { sent: true }
                    | ErrorKind::Malformed
                    | ErrorKind::Failed => Outcome::Unknown(error.into()),
                    _ => Outcome::NotDone(error.into()),
                },
            }
        });
        let port = done?;
        self.replace_last(step(Some(port.clone())))?;
        Ok(port)
    }

    fn activate(&mut self, devlink: &Devlink, port: &PortHandle) -> Result<(), NicError> {
        let step = Step::ActivatePort { port: port.clone() };
        self.step(step, |_| {
            // Deactivating it twice does no harm.
            let active = devlink.set_function(port, &FunctionState::Active.into());
            active.map_err(NicError::from).into()
        })
    }
}

/// The number for the next subfunction.
pub(super) fn next_number(handle: &Handle, pfnum: u16) -> Result<u32, NicError> {
    number(&Devlink::open()?, handle, pfnum)
}

fn number(devlink: &Devlink, handle: &Handle, pfnum: u16) -> Result<u32, NicError> {
    let ports = devlink.ports_of(handle)?;
    free_number(&ports, pfnum).ok_or_else(|| NicError::NoSfnum(handle.clone()))
}

/// The lowest free number of a subfunction.
fn free_number(ports: &[Port], pfnum: u16) -> Option<u32> {
    let taken: std::collections::BTreeSet<u32> =
        ports.iter().filter_map(|port| port.sfnum(pfnum)).collect();
    (1..=u32::MAX).find(|number| !taken.contains(number))
}

fn is_taken(error: &NicError) -> bool {
    matches!(error, NicError::Mgmt(error) if error.kind() == ErrorKind::NameTaken)
}

fn configure(devlink: &Devlink, port: &PortHandle, request: &NicRequest) -> Result<(), NicError> {
    if request.mac.is_some() {
        let settings = FunctionSettings {
            hw_addr: request.mac,
            ..FunctionSettings::default()
        };
        devlink.set_function(port, &settings)?;
    }
    if let Some(rates) = request.rates {
        let settings = RateSettings {
            tx_share: Some(u64::from(rates.min) * BYTES_PER_MBIT),
            tx_max: Some(u64::from(rates.max) * BYTES_PER_MBIT),
            ..RateSettings::default()
        };
        devlink.set_rate(&RateObject::Leaf(port.clone()), &settings)?;
    }
    Ok(())
}

/// The instance of a port's function, once its driver has attached.
fn attached(port: &Port) -> Result<Option<Handle>, NicError> {
    let Some(function) = &port.function else {
        return Err(NicError::NoSubfunction(port.handle.clone()));
    };
    if function.opstate != Some(FunctionOpstate::Attached) {
        return Ok(None);
    }
    match &function.devlink {
        Some(nested) if nested.namespace.is_some() => Err(NicError::Elsewhere(port.handle.clone())),
        Some(nested) => Ok(Some(nested.handle.clone())),
        None => Ok(None),
    }
}

/// Makes an instance support vDPA devices. An instance without the parameter supports them already.
fn enable_vnet(devlink: &Devlink, instance: &Handle) -> Result<(), NicError> {
    let on = ParamValue::Flag(true);
    if let Err(error) = devlink.param(instance, ENABLE_VNET) {
        return match error.kind() {
            ErrorKind::NoParam | ErrorKind::NotSupported => Ok(()),
            _ => Err(error.into()),
        };
    }
    devlink.set_param(instance, ENABLE_VNET, Cmode::Driverinit, &on)?;
    devlink.reload(instance, ReloadAction::DriverReinit)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devlink::{Flavour, PciNumbers};

    fn port(index: u32, pfnum: u16, sfnum: u32) -> Port {
        let handle: Handle = "pci/0000:06:00.0".parse().unwrap();
        Port {
            handle: handle.port(index),
            port_type: None,
            desired_type: None,
            netdev: None,
            ibdev: None,
            flavour: Some(Flavour::PciSf {
                pci: PciNumbers {
                    controller: None,
                    pfnum,
                    external: None,
                },
                sfnum,
            }),
            splittable: None,
            lanes: None,
            function: None,
        }
    }

    #[test]
    fn the_lowest_free_number_is_chosen() {
        assert_eq!(free_number(&[], 0), Some(1));
        let ports = [port(1, 0, 1), port(2, 0, 3), port(3, 1, 2)];
        assert_eq!(free_number(&ports, 0), Some(2));
        assert_eq!(free_number(&ports, 1), Some(1));
    }

    #[test]
    fn a_port_without_a_function_is_not_waited_for() {
        assert!(matches!(
            attached(&port(1, 0, 1)),
            Err(NicError::NoSubfunction(_))
        ));
    }
}
