//! The kernel requests that connect a function: a trait, so that tests can let every request fail
//! without a NIC.

use crate::error::Error;
use crate::link::{Link, Links, PortVlan, VlanId};
use crate::sriov::{self, Setting, Vlan};

/// Requests to the kernel. Each does the same as the method of [`Links`] of that name.
pub(super) trait Kernel {
    fn link(&self, name: &str) -> Result<Link, Error>;
    fn link_at(&self, index: u32) -> Result<Link, Error>;
    fn vlans(&self, link: &Link) -> Result<Vec<PortVlan>, Error>;
    fn set_up(&self, link: &Link) -> Result<(), Error>;
    fn set_down(&self, link: &Link) -> Result<(), Error>;
    fn set_mtu(&self, link: &Link, mtu: u32) -> Result<(), Error>;
    fn set_master(&self, link: &Link, master: &Link) -> Result<(), Error>;
    fn clear_master(&self, link: &Link) -> Result<(), Error>;
    fn add_vlan(&self, link: &Link, vlan: PortVlan) -> Result<(), Error>;
    fn remove_vlan(&self, link: &Link, vlan: VlanId) -> Result<(), Error>;
    /// The VLAN that the NIC assigns to a virtual function; none if its driver does not report it.
    fn function_vlan(&self, physical: &str, number: u32) -> Result<Option<Vlan>, Error>;
    fn set_function_vlan(&self, physical: &str, number: u32, vlan: Vlan) -> Result<(), Error>;
}

impl Kernel for Links {
    fn link(&self, name: &str) -> Result<Link, Error> {
        self.link(name)
    }

    fn link_at(&self, index: u32) -> Result<Link, Error> {
        self.link_at(index)
    }

    fn vlans(&self, link: &Link) -> Result<Vec<PortVlan>, Error> {
        self.vlans(link)
    }

    fn set_up(&self, link: &Link) -> Result<(), Error> {
        self.set_up(link)
    }

    fn set_down(&self, link: &Link) -> Result<(), Error> {
        self.set_down(link)
    }

    fn set_mtu(&self, link: &Link, mtu: u32) -> Result<(), Error> {
        self.set_mtu(link, mtu)
    }

    fn set_master(&self, link: &Link, master: &Link) -> Result<(), Error> {
        self.set_master(link, master)
    }

    fn clear_master(&self, link: &Link) -> Result<(), Error> {
        self.clear_master(link)
    }

    fn add_vlan(&self, link: &Link, vlan: PortVlan) -> Result<(), Error> {
        self.add_vlan(link, vlan)
    }

    fn remove_vlan(&self, link: &Link, vlan: VlanId) -> Result<(), Error> {
        self.remove_vlan(link, vlan)
    }

    fn function_vlan(&self, physical: &str, number: u32) -> Result<Option<Vlan>, Error> {
        let link = sriov::Links::from(self.clone()).link(physical)?;
        let mut functions = link.virtual_functions.into_iter();
        Ok(functions
            .find(|function| function.index == number)
            .and_then(|function| function.vlan))
    }

    fn set_function_vlan(&self, physical: &str, number: u32, vlan: Vlan) -> Result<(), Error> {
        sriov::Links::from(self.clone()).set(physical, number, &[Setting::Vlan(vlan)])
    }
}
