//! The steps of creating a NIC, without doing any.

use std::fmt;

use super::error::NicError;
use super::nics::Nics;
use super::origin::Plan;
use super::phase::Phase;
use super::record::MadeNic;
use super::request::NicRequest;
use super::step::Settings;
use super::subfunction::next_number;
use super::virtual_function::settings;
use crate::MgmtDeviceName;
use crate::devlink::Handle;
use crate::pci::Address;

/// A planned step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedStep {
    /// The phase.
    pub phase: Phase,
    /// The object of the phase.
    pub what: String,
}

impl fmt::Display for PlannedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.phase, self.what)
    }
}

/// The base of the planned vDPA device.
enum Base {
    MgmtDevice(MgmtDeviceName),
    VirtualFunction {
        physical: Address,
        /// The number of virtual functions to create first.
        count: Option<u32>,
        /// The virtual function, if it can be chosen already.
        chosen: Option<(u32, Address)>,
        /// The driver to bind.
        driver: Option<&'static str>,
    },
    Subfunction {
        handle: Handle,
        sfnum: u32,
    },
    Software,
}

impl Nics {
    /// The steps of [`Nics::make`], as far as they are known before the first.
    ///
    /// # Errors
    /// The reason why it cannot be created.
    pub fn plan_steps(
        &self,
        request: &NicRequest,
        others: &[MadeNic],
    ) -> Result<Vec<PlannedStep>, NicError> {
        let base = match self.check(request, others)? {
            Plan::MgmtDevice(mgmtdev) => Base::MgmtDevice(mgmtdev),
            Plan::Software => Base::Software,
            Plan::VirtualFunction(physical) if physical.virtual_functions.is_empty() => {
                Base::VirtualFunction {
                    physical: physical.address,
                    count: Some(request.count(&physical)),
                    chosen: None,
                    driver: self.parent_of_virtio(&physical)?,
                }
            }
            Plan::VirtualFunction(physical) => {
                let (number, function) = self.choose(&physical)?;
                Base::VirtualFunction {
                    physical: physical.address,
                    count: None,
                    chosen: Some((number, function.address)),
                    driver: self.parent(&function)?,
                }
            }
            Plan::Subfunction { handle, pfnum } => Base::Subfunction {
                sfnum: next_number(&handle, pfnum)?,
                handle,
            },
        };
        Ok(steps(request, &base))
    }
}

fn steps(request: &NicRequest, base: &Base) -> Vec<PlannedStep> {
    let mut steps = Vec::new();
    let mut add = |phase, what| steps.push(PlannedStep { phase, what });
    let settings = settings(request);
    let words = Settings::of(&settings);
    let mgmtdev = match base {
        Base::MgmtDevice(mgmtdev) => mgmtdev.to_string(),
        Base::VirtualFunction {
            physical,
            count,
            chosen,
            driver,
        } => {
            if let Some(count) = count {
                add(
                    Phase::CountVirtualFunctions,
                    format!("{count} of {physical}"),
                );
            }
            let function = match chosen {
                Some((number, address)) => format!("{address}, number {number} of {physical}"),
                None => format!("the first free one of {physical}"),
            };
            add(Phase::ChooseVirtualFunction, function);
            if !settings.is_empty() {
                add(Phase::SetVirtualFunction, words.to_string());
            }
            if let Some(driver) = driver {
                add(Phase::BindFunction, (*driver).to_owned());
            }
            match chosen {
                Some((_, address)) => format!("pci/{address}"),
                None => "the virtual function".to_owned(),
            }
        }
        Base::Subfunction { handle, sfnum } => {
            let subfunction = format!("{handle} sfnum {sfnum}");
            add(Phase::AddPort, subfunction.clone());
            if !settings.is_empty() {
                add(Phase::ConfigurePort, words.to_string());
            }
            add(Phase::ActivatePort, subfunction);
            "the subfunction".to_owned()
        }
        Base::Software => {
            let tap = request.tap.as_ref().unwrap_or(&request.name);
            let port = request.port.as_ref().map(ToString::to_string);
            add(Phase::Serve, port.unwrap_or_else(|| format!("tap={tap}")));
            "vduse".to_owned()
        }
    };
    add(Phase::AddDevice, format!("{} on {mgmtdev}", request.name));
    if let Some(connectivity) = &request.connectivity {
        add(Phase::Connect, connectivity.to_string());
    }
    // The text of a setting begins with a space.
    for step in &mut steps {
        step.what = step.what.trim().to_owned();
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(request: &NicRequest, base: &Base) -> Vec<String> {
        let steps = steps(request, base);
        steps.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn steps_are_those_of_the_base() {
        let mut request = NicRequest::new("nic0", "enp1s0");
        let base = Base::MgmtDevice("vdpasim_net".parse().unwrap());
        let device = ["add the vDPA device (nic0 on vdpasim_net)"];
        assert_eq!(shown(&request, &base), device);

        request.mac = Some([2, 0, 0, 0, 0, 7]);
        request.connectivity = Some("bridge=br0,vlan=100".parse().unwrap());
        let physical = "0000:01:00.0".parse().unwrap();
        let base = Base::VirtualFunction {
            physical,
            count: Some(4),
            chosen: None,
            driver: Some("vp-vdpa"),
        };
        let counted = [
            "create virtual functions (4 of 0000:01:00.0)",
            "choose a virtual function (the first free one of 0000:01:00.0)",
            "set up the virtual function (mac 02:00:00:00:00:07)",
            "bind the function to a vDPA driver (vp-vdpa)",
            "add the vDPA device (nic0 on the virtual function)",
            "connect it (bridge=br0,vlan=100)",
        ];
        assert_eq!(shown(&request, &base), counted);

        request.mac = None;
        request.connectivity = None;
        let base = Base::VirtualFunction {
            physical,
            count: None,
            chosen: Some((1, "0000:01:00.2".parse().unwrap())),
            driver: None,
        };
        let chosen = [
            "choose a virtual function (0000:01:00.2, number 1 of 0000:01:00.0)",
            "add the vDPA device (nic0 on pci/0000:01:00.2)",
        ];
        assert_eq!(shown(&request, &base), chosen);

        let base = Base::Subfunction {
            handle: "pci/0000:06:00.0".parse().unwrap(),
            sfnum: 88,
        };
        let subfunction = [
            "add the port of a subfunction (pci/0000:06:00.0 sfnum 88)",
            "activate the subfunction (pci/0000:06:00.0 sfnum 88)",
            "add the vDPA device (nic0 on the subfunction)",
        ];
        assert_eq!(shown(&request, &base), subfunction);
    }
}
