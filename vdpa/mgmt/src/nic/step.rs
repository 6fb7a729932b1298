//! The steps from a NIC to a device, as data: each with everything needed to undo it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::phase::Phase;
use super::server::Service;
use crate::MgmtDeviceName;
use crate::connectivity::Attached;
use crate::devlink::{Handle, PortHandle};
use crate::error::{self, Error};
use crate::pci::Address;
use crate::sriov::{Rates, Setting, VirtualFunction};

/// A step that was begun, with the data needed to undo it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Step {
    /// Virtual functions of a physical function that had none were created. NICs on the same
    /// physical function each have this step, and the last one to be removed undoes it.
    CountVirtualFunctions {
        /// The physical function.
        physical: Address,
        /// Their number.
        count: u32,
    },
    /// Settings of a virtual function were changed through its physical one.
    SetVirtualFunction {
        /// The physical function.
        physical: Address,
        /// The virtual function's number.
        virtual_function: u32,
        /// The new settings.
        settings: Settings,
        /// The former settings, as far as the driver reported them.
        former: Settings,
    },
    /// A driver that is a vDPA parent was bound to a function.
    BindFunction {
        /// The function.
        function: Address,
        /// The driver.
        driver: String,
        /// The former driver.
        former_driver: Option<String>,
        /// The former driver override, if there was one.
        former_override: Option<String>,
    },
    /// The port of a new subfunction was added.
    AddPort {
        /// The NIC.
        handle: Handle,
        /// The number of its physical function.
        pfnum: u16,
        /// The subfunction's number, which was free.
        sfnum: u32,
        /// The port; `None` until the driver has reported it.
        port: Option<PortHandle>,
    },
    /// The subfunction behind the port was activated.
    ActivatePort {
        /// The port.
        port: PortHandle,
    },
    /// A process was started that serves a software NIC, with a tap and a VDUSE device.
    Serve {
        /// Its settings.
        service: Service,
    },
    /// The vDPA device was added. It has the NIC's name.
    AddDevice {
        /// Its management device.
        mgmtdev: MgmtDeviceName,
    },
    /// The function was connected.
    Connect {
        /// The changes for that.
        attached: Attached,
    },
}

impl fmt::Display for Step {
    /// The step, as a part of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CountVirtualFunctions { physical, count } => {
                write!(f, "{count} virtual functions of {physical}")
            }
            Self::SetVirtualFunction {
                physical,
                virtual_function,
                ..
            } => write!(
                f,
                "the settings of virtual function {virtual_function} of {physical}"
            ),
            Self::BindFunction {
                function, driver, ..
            } => write!(f, "the driver {driver} of {function}"),
            Self::AddPort { handle, sfnum, .. } => write!(f, "the subfunction {sfnum} of {handle}"),
            Self::ActivatePort { port } => write!(f, "the active function of the port {port}"),
            Self::Serve { service } => write!(f, "the process that serves {service}"),
            Self::AddDevice { mgmtdev } => write!(f, "the vDPA device on {mgmtdev}"),
            Self::Connect { attached } => {
                let what = attached.interface().unwrap_or("the virtual function");
                write!(f, "the connection of {what}")
            }
        }
    }
}

impl Step {
    /// The command that undoes it by hand; `name` is the NIC's.
    #[must_use]
    pub fn by_hand(&self, name: &str) -> String {
        match self {
            Self::CountVirtualFunctions { physical, .. } => {
                format!("bellhop vf count pci/{physical} 0")
            }
            Self::SetVirtualFunction {
                physical,
                virtual_function,
                former,
                ..
            } => format!("bellhop vf set pci/{physical} {virtual_function}{former}"),
            Self::BindFunction {
                function,
                driver,
                former_driver,
                ..
            } => match former_driver {
                Some(former) => format!("bellhop bind pci/{function} {former}"),
                None => format!("echo {function} >/sys/bus/pci/drivers/{driver}/unbind"),
            },
            Self::AddPort {
                port: Some(port), ..
            } => format!("bellhop port del {port}"),
            Self::AddPort {
                handle,
                pfnum,
                sfnum,
                port: None,
            } => format!(
                "bellhop port del {handle}/INDEX, if `bellhop port show` lists a port with pfnum \
                 {pfnum} sfnum {sfnum}"
            ),
            Self::ActivatePort { port } => {
                format!("bellhop port function set {port} state inactive")
            }
            Self::Serve { service } => {
                let process = format!("pkill -f \"bellhop swnic {name} --serve\"");
                match &service.tap {
                    Some(tap) => format!("{process}; ip link del {tap}"),
                    None => process,
                }
            }
            Self::AddDevice { .. } => format!("bellhop dev del {name}"),
            Self::Connect { attached } => match attached.interface() {
                Some(interface) => format!("ip link set {interface} down nomaster"),
                None => "bellhop vf set PF N vlan 0".to_owned(),
            },
        }
    }

    /// The phase of the step, and its object.
    pub(super) fn phase(&self) -> (Phase, String) {
        match self {
            Self::CountVirtualFunctions { physical, .. } => {
                (Phase::CountVirtualFunctions, physical.to_string())
            }
            Self::SetVirtualFunction {
                physical,
                virtual_function,
                ..
            } => (
                Phase::SetVirtualFunction,
                format!("{virtual_function} of {physical}"),
            ),
            Self::BindFunction { function, .. } => (Phase::BindFunction, function.to_string()),
            Self::AddPort { handle, sfnum, .. } => {
                (Phase::AddPort, format!("{handle} sfnum {sfnum}"))
            }
            Self::ActivatePort { port } => (Phase::ActivatePort, port.to_string()),
            Self::Serve { service } => (Phase::Serve, service.to_string()),
            Self::AddDevice { mgmtdev } => (Phase::AddDevice, mgmtdev.to_string()),
            Self::Connect { attached } => {
                let what = attached.interface().unwrap_or("the virtual function");
                (Phase::Connect, what.to_owned())
            }
        }
    }
}

/// Settings of a virtual function in a record. `None` is a setting that is not set, or unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The address.
    pub mac: Option<[u8; 6]>,
    /// Limits on its transmit rate: minimum and maximum, in Mbit/s.
    pub rates: Option<(u32, u32)>,
}

impl Settings {
    /// The settings of this list that a record has: address and rates.
    pub(super) fn of(settings: &[Setting]) -> Self {
        let mut all = Self::default();
        for setting in settings {
            match setting {
                Setting::Mac(mac) => all.mac = Some(*mac),
                Setting::Rates(rates) => all.rates = Some((rates.min, rates.max)),
                Setting::Vlan(_)
                | Setting::SpoofCheck(_)
                | Setting::LinkState(_)
                | Setting::Trust(_) => {}
            }
        }
        all
    }

    /// The driver's current values for these kinds of settings.
    pub(super) fn former(settings: &[Setting], now: &VirtualFunction) -> Self {
        let known: Vec<Setting> = settings
            .iter()
            .filter_map(|setting| setting.former(now))
            .collect();
        Self::of(&known)
    }

    /// The former settings to restore: those whose value `now` is still the one `set`. And whether
    /// others have changed one since.
    pub(super) fn where_still(&self, now: &Self, set: &Self) -> (Self, bool) {
        let (mac, mac_changed) = still(self.mac, now.mac, set.mac);
        let (rates, rates_changed) = still(self.rates, now.rates, set.rates);
        (Self { mac, rates }, mac_changed || rates_changed)
    }

    /// The settings to send.
    pub(super) fn list(&self) -> Result<Vec<Setting>, Error> {
        let mut list = Vec::new();
        list.extend(self.mac.map(Setting::Mac));
        if let Some((min, max)) = self.rates {
            list.push(Setting::Rates(Rates::new(min, max)?));
        }
        Ok(list)
    }
}

/// The value to restore, and whether others have changed it.
fn still<T: PartialEq>(former: Option<T>, now: Option<T>, set: Option<T>) -> (Option<T>, bool) {
    match set {
        None => (None, false),
        Some(_) if now == set => (former, false),
        Some(_) => (None, now != former),
    }
}

impl fmt::Display for Settings {
    /// In the syntax of `bellhop vf set`, with a space before each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(mac) = self.mac {
            write!(f, " mac {}", error::mac(mac))?;
        }
        if let Some((min, max)) = self.rates {
            write!(f, " max_tx_rate {max} min_tx_rate {min}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_come_back_as_they_were() {
        let list = [
            Setting::Mac([2, 0, 0, 0, 0, 7]),
            Setting::Rates(Rates { min: 10, max: 100 }),
        ];
        let settings = Settings::of(&list);
        assert_eq!(settings.list().unwrap(), list);
        assert_eq!(
            settings.to_string(),
            " mac 02:00:00:00:00:07 max_tx_rate 100 min_tx_rate 10"
        );
        let wrong = Settings {
            rates: Some((7, 6)),
            ..Settings::default()
        };
        assert!(wrong.list().is_err());
    }

    #[test]
    fn changes_of_others_are_kept() {
        assert_eq!(still(Some(1), Some(2), Some(2)), (Some(1), false));
        assert_eq!(still(Some(1), Some(1), Some(2)), (None, false));
        assert_eq!(still(Some(1), Some(3), Some(2)), (None, true));
        assert_eq!(still(None, Some(2), Some(2)), (None, false));
        assert_eq!(still(Some(1), Some(3), None), (None, false));
    }

    #[test]
    fn only_changed_settings_are_recorded() {
        let now = VirtualFunction {
            mac: Some([2, 0, 0, 0, 0, 9]),
            rates: Some(Rates { min: 0, max: 7 }),
            ..VirtualFunction::default()
        };
        let former = Settings::former(&[Setting::Rates(Rates { min: 0, max: 1 })], &now);
        let expected = Settings {
            rates: Some((0, 7)),
            ..Settings::default()
        };
        assert_eq!(former, expected);
    }
}
