//! The request for a NIC.

use super::port_queue::PortQueue;
use super::software::SOFTWARE;
use crate::connectivity::Connectivity;
use crate::sriov::Rates;
use crate::{Error, ErrorKind, MgmtDeviceName, NewDevice};

/// The base of a vDPA device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kind {
    /// Depends on the source: a management device itself; a subfunction of a NIC in switchdev mode;
    /// a virtual function of another NIC.
    #[default]
    Auto,
    /// A virtual function of a NIC (SR-IOV).
    VirtualFunction,
    /// A subfunction of a NIC in switchdev mode.
    Subfunction,
}

/// A NIC to create. For a field that is `None` the hardware or the kernel chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicRequest {
    /// Its name, also for the vDPA device.
    pub name: String,
    /// Its source: a physical function by address (`pci/0000:01:00.0`) or network interface, or a
    /// NIC by devlink handle. Also a management device that creates devices itself
    /// (`vdpasim_net`), or [`SOFTWARE`].
    pub from: String,
    /// Its owner, stored in the record so that the owner recognises it. Up to 256 bytes.
    pub owner: Option<String>,
    /// The base of the device.
    pub kind: Kind,
    /// Its address.
    pub mac: Option<[u8; 6]>,
    /// Its MTU, in bytes.
    pub mtu: Option<u16>,
    /// Its queue pairs.
    pub max_vqp: Option<u16>,
    /// Its virtio feature bits.
    pub device_features: Option<u64>,
    /// Its connection.
    pub connectivity: Option<Connectivity>,
    /// Limits on its transmit rate.
    pub rates: Option<Rates>,
    /// The number of virtual functions to create if the NIC has none. `None`: as many as possible,
    /// but at most eight.
    pub virtual_functions: Option<u32>,
    /// The tap of a software NIC, which exists or is created, and stays as it is. `None`: one of
    /// the NIC's name, created and deleted with it.
    pub tap: Option<String>,
    /// The share of a processor that each pair of a software NIC may spend on polling, in percent.
    /// `None`: it does not poll.
    pub poll_percent: Option<u8>,
    /// The queue of a port that a software NIC has instead of a tap.
    pub port: Option<PortQueue>,
}

impl NicRequest {
    /// A NIC for which the hardware or the kernel chooses everything.
    #[must_use]
    pub fn new(name: impl Into<String>, from: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            from: from.into(),
            owner: None,
            kind: Kind::Auto,
            mac: None,
            mtu: None,
            max_vqp: None,
            device_features: None,
            connectivity: None,
            rates: None,
            virtual_functions: None,
            tap: None,
            poll_percent: None,
            port: None,
        }
    }

    /// The vDPA device to add.
    ///
    /// # Errors
    /// `Invalid` for impossible values.
    pub fn device(&self, mgmtdev: MgmtDeviceName) -> Result<NewDevice, Error> {
        self.check_poll()?;
        let device = NewDevice::new(&self.name, mgmtdev)?.mac(self.mac)?;
        let device = device.mtu(self.mtu)?.max_vqp(self.max_vqp)?;
        Ok(device.device_features(self.device_features))
    }

    fn check_poll(&self) -> Result<(), Error> {
        let message = match self.poll_percent {
            None => return Ok(()),
            Some(_) if self.from != SOFTWARE => format!(
                "devices of {} do not poll: leave `poll` out, or create the NIC from `{SOFTWARE}`",
                self.from
            ),
            Some(1..=100) => return Ok(()),
            Some(percent) => {
                format!(
                    "cannot poll for {percent} % of a processor: give 1 to 100, or leave it out"
                )
            }
        };
        Err(Error::new(ErrorKind::Invalid, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_software_polls_and_for_a_share_of_a_processor() {
        let check = |from, poll_percent| {
            let request = NicRequest {
                poll_percent,
                ..NicRequest::new("nic0", from)
            };
            let device = request.device("any".parse().unwrap());
            device.map(drop).map_err(|error| error.to_string())
        };
        for poll in [None, Some(1), Some(100)] {
            check(SOFTWARE, poll).unwrap();
        }
        for poll in [0, 101] {
            let error = check(SOFTWARE, Some(poll)).unwrap_err();
            assert!(error.contains("give 1 to 100"), "{error}");
        }
        check("enp1s0", None).unwrap();
        let error = check("enp1s0", Some(30)).unwrap_err();
        assert!(error.contains("leave `poll` out"), "{error}");
    }
}
