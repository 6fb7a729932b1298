//! Undoing steps, the last one first.
//!
//! Each step may have been done, or not, or have been undone by somebody else, or have been changed since. So
//! each looks first: what is not as this step made it is left alone.

use super::error::{NicError, NotUndone};
use super::observer::{Activity, Observer, Progress};
use super::record::MadeNic;
use super::step::{Settings, Step};
use super::subfunction::{sfnum_of, state};
use super::{Nics, Taken, wait};
use crate::mgmt::devlink::{
    Devlink, DevlinkError, FunctionOpstate, FunctionState, Handle, PortHandle,
};
use crate::mgmt::link;
use crate::mgmt::pci::{Address, PciError};
use crate::mgmt::sriov::Links;
use crate::mgmt::{MgmtDeviceName, MgmtError};

/// What undoing came to.
enum Undone {
    Yes,
    /// It is left as it is, and why.
    Left(String),
}

/// Undoes all steps. What could not be undone stays in the record, which is kept after each one.
pub(super) fn all(nics: &Nics, nic: &mut MadeNic, observer: &mut dyn Observer) -> Vec<NotUndone> {
    if nic.steps().is_empty() {
        return Vec::new();
    }
    let name = nic.name().to_owned();
    let mut not_undone: Vec<NotUndone> = Vec::new();
    let mut stopped = false;
    while let Some(step) = nic.pop() {
        let mut failed = None;
        if !stopped {
            let what = step.to_string();
            let mut tell = |activity| {
                let name = &name;
                observer.progress(&Progress { name, activity });
            };
            tell(Activity::Undo(&what));
            match one(nics, &name, &step) {
                Ok(Undone::Yes) => {}
                Ok(Undone::Left(why)) => tell(Activity::Leave(&why)),
                Err(error) => {
                    stopped = step.keeps_those_before();
                    failed = Some(error);
                }
            }
            if failed.is_none() {
                keep(nic, &not_undone, observer);
                continue;
            }
        }
        let by_hand = step.by_hand(&name);
        not_undone.push(NotUndone {
            step,
            by_hand,
            error: failed,
        });
    }
    let left = not_undone.iter().rev().map(|one| one.step.clone());
    nic.set_steps(left.collect());
    keep(nic, &[], observer);
    not_undone
}

/// Keeps what is still to be undone. An old record does no harm: it tells of steps that are
/// undone, which changes nothing the second time.
fn keep(nic: &MadeNic, not_undone: &[NotUndone], observer: &mut dyn Observer) {
    let mut nic = nic.clone();
    let steps = nic.steps().iter().cloned();
    let left = not_undone.iter().rev().map(|one| one.step.clone());
    nic.set_steps(steps.chain(left).collect());
    if let Err(error) = observer.keep(&nic) {
        tracing::warn!(name = nic.name(), %error, "the record is not up to date");
    }
}

fn one(nics: &Nics, name: &str, step: &Step) -> Result<Undone, NicError> {
    match step {
        Step::CountVirtualFunctions { physical, count } => nics.uncount(*physical, *count),
        Step::SetVirtualFunction {
            physical,
            virtual_function,
            settings,
            former,
        } => nics.unset(*physical, *virtual_function, settings, former),
        Step::BindFunction {
            function,
            driver,
            former_driver,
            former_override,
        } => nics.unbind(
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
        } => nics.delete_port(handle, *pfnum, *sfnum, port.as_ref()),
        Step::ActivatePort { port } => nics.deactivate(port),
        Step::AddDevice { mgmtdev } => nics.delete(name, mgmtdev),
        Step::Connect { attached } => {
            let left = attached.detach(&link::Links::open()?)?;
            let left: Vec<String> = left.iter().map(ToString::to_string).collect();
            Ok(match left.is_empty() {
                true => Undone::Yes,
                false => Undone::Left(left.join("; ")),
            })
        }
    }
}

impl Nics {
    /// A function that is gone needs no undoing; the driver may let go of an active one a moment later.
    fn deactivate(&self, port: &PortHandle) -> Result<Undone, NicError> {
        let devlink = Devlink::open()?;
        let now = || match devlink.port(port) {
            Err(DevlinkError::NoPort { .. } | DevlinkError::NoInstance { .. }) => Ok(None),
            port => Ok(port?.function),
        };
        let Some(function) = now().map_err(NicError::Devlink)? else {
            return Ok(Undone::Yes);
        };
        if function.state != Some(FunctionState::Inactive) {
            devlink.set_function(port, &state(FunctionState::Inactive))?;
        }
        let what = format!("the end of the device of the port {port}");
        wait::until(
            &what,
            self.patience,
            || false,
            || (),
            || {
                let function = now().map_err(NicError::Devlink)?;
                let attached =
                    function.is_some_and(|one| one.opstate == Some(FunctionOpstate::Attached));
                Ok((!attached).then_some(()))
            },
        )?;
        Ok(Undone::Yes)
    }

    fn delete_port(
        &self,
        handle: &Handle,
        pfnum: u16,
        sfnum: u32,
        port: Option<&PortHandle>,
    ) -> Result<Undone, NicError> {
        let devlink = Devlink::open()?;
        let ports = match devlink.ports_of(handle) {
            Err(DevlinkError::NoInstance { .. }) => return Ok(Undone::Yes),
            ports => ports?,
        };
        let mut ours = ports
            .iter()
            .filter(|one| sfnum_of(one, pfnum) == Some(sfnum))
            .filter(|one| port.is_none_or(|port| one.handle == *port));
        let Some(found) = ours.next() else {
            return Ok(Undone::Yes);
        };
        match devlink.delete_port(&found.handle) {
            Ok(()) | Err(DevlinkError::NoPort { .. }) => Ok(Undone::Yes),
            Err(error) => Err(error.into()),
        }
    }

    fn delete(&self, name: &str, mgmtdev: &MgmtDeviceName) -> Result<Undone, NicError> {
        match self.connection.device(name) {
            Err(MgmtError::NoDevice { .. }) => return Ok(Undone::Yes),
            Err(error) => return Err(error.into()),
            Ok(device) if device.mgmtdev != *mgmtdev => {
                let other = device.mgmtdev;
                return Ok(Undone::Left(format!(
                    "the device {name} is another one, on {other}"
                )));
            }
            Ok(_) => {}
        }
        match self.connection.delete(name) {
            Ok(()) | Err(MgmtError::NoDevice { .. }) => Ok(Undone::Yes),
            Err(error) => Err(error.into()),
        }
    }

    fn unbind(
        &self,
        address: Address,
        driver: &str,
        former_driver: Option<&str>,
        former_override: Option<&str>,
    ) -> Result<Undone, NicError> {
        let function = match self.pci.function(address) {
            Err(PciError::NoFunction(_)) => return Ok(Undone::Yes),
            function => function?,
        };
        let now = function.driver.as_deref();
        if let Some(now) = now.filter(|&now| now != driver && Some(now) != former_driver) {
            return Ok(Undone::Left(format!(
                "{address} has the driver {now} meanwhile"
            )));
        }
        if let Some(device) = function.vdpa_devices.first() {
            return Ok(Undone::Left(format!(
                "{address} has the vDPA device {device}, which is not this NIC's"
            )));
        }
        self.pci
            .restore(&function, driver, former_driver, former_override)?;
        Ok(Undone::Yes)
    }

    fn unset(
        &self,
        physical: Address,
        virtual_function: u32,
        settings: &Settings,
        former: &Settings,
    ) -> Result<Undone, NicError> {
        let function = match self.pci.function(physical) {
            Err(PciError::NoFunction(_)) => return Ok(Undone::Yes),
            function => function?,
        };
        let there = function.virtual_functions.iter();
        if !there.clone().any(|one| one.0 == virtual_function) {
            return Ok(Undone::Yes);
        }
        let interface = function
            .netdevs
            .first()
            .ok_or(NicError::NoInterface(physical))?;
        let links = Links::open()?;
        let link = links.link(interface)?;
        let mut all = link.virtual_functions.iter();
        let Some(now) = all.find(|one| one.index == virtual_function) else {
            return Ok(Undone::Left(format!(
                "the driver of {physical} does not tell the settings of its virtual functions"
            )));
        };
        let now = Settings::former(&settings.list()?, now);
        let (back, changed) = former.where_still(&now, settings);
        links.set(interface, virtual_function, &back.list()?)?;
        Ok(match changed {
            false => Undone::Yes,
            true => Undone::Left(format!(
                "settings of virtual function {virtual_function} of {physical} that were changed \
                 meanwhile"
            )),
        })
    }

    fn uncount(&self, physical: Address, count: u32) -> Result<Undone, NicError> {
        let function = match self.pci.function(physical) {
            Err(PciError::NoFunction(_)) => return Ok(Undone::Yes),
            function => function?,
        };
        let there = function.virtual_functions.len();
        if there == 0 {
            return Ok(Undone::Yes);
        }
        if u32::try_from(there) != Ok(count) {
            return Ok(Undone::Left(format!(
                "{physical} has {there} virtual functions meanwhile, not {count}"
            )));
        }
        if let Some(taken) = self.used(&function)? {
            return Ok(Undone::Left(in_use(physical, &taken)));
        }
        self.pci.set_virtual_functions(physical, 0)?;
        Ok(Undone::Yes)
    }
}

fn in_use(physical: Address, taken: &Taken) -> String {
    format!("the virtual functions of {physical}, because others use them: {taken}")
}
