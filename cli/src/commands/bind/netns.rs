//! `bellhop bind DEV virtio_vdpa --netns NETNS`: a vDPA device as a container's network interface.

use bellhop_common::error::Error;
use bellhop_common::listing::Entry;
use bellhop_common::text::address;
use vdpa_mgmt::bus::{Bus, BusDevice};
use vdpa_mgmt::container::{Settings, VIRTIO_VDPA, give};
use vdpa_mgmt::link::{Link, Namespace};

/// The namespace and the name of the interface.
#[derive(Debug, clap::Args)]
pub(super) struct NetnsArguments {
    /// With virtio_vdpa: move the network interface into this network namespace and set it up. Give
    /// a name of `ip netns`, a process ID or a path
    #[arg(long, value_name = "NETNS")]
    netns: Option<String>,

    /// The name of the interface in that namespace
    #[arg(long, value_name = "NAME", requires = "netns")]
    link_name: Option<String>,
}

impl NetnsArguments {
    /// The requested namespace, if any.
    pub(super) fn namespace(
        &self,
        device: &str,
        driver: Option<&str>,
    ) -> Result<Option<Namespace>, Error> {
        let Some(netns) = &self.netns else {
            return Ok(None);
        };
        if driver != Some(VIRTIO_VDPA) || device.starts_with("pci/") {
            return Err(Error::wrong(
                "--netns needs a vDPA device and the driver virtio_vdpa, which gives it a network \
                 interface: `bellhop bind DEV virtio_vdpa --netns NETNS`",
            ));
        }
        Ok(Some(Namespace::find(netns)?))
    }

    /// Moves the device to the namespace.
    pub(super) fn give(
        &self,
        bus: &Bus,
        device: &BusDevice,
        namespace: &Namespace,
    ) -> Result<Link, vdpa_mgmt::Error> {
        let settings = Settings {
            link_name: self.link_name.clone(),
            ..Settings::default()
        };
        give(bus, &device.name, namespace, &settings)
    }
}

/// The device with its interface.
pub(super) fn describe(entry: Entry, namespace: &Namespace, link: &Link) -> Entry {
    entry
        .with_text("netns", namespace.name())
        .with_text("netdev", &link.name)
        .with_some("mac", link.mac.map(|mac| address(&mac)))
        .with_number("mtu", Some(link.mtu))
}
