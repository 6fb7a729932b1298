//! Virtual functions of the SR-IOV rig's NIC as vDPA devices, for tests in the lab host.
//!
//! ```text
//!   SriovNic::enable: virtual functions made, virtio-pci on each
//!      └─ VfDevice::add: unbind ─▶ several queues ─▶ vp-vdpa ─▶ vdpa dev add ─▶ /dev/vhost-vdpa-N
//!         dropped: vdpa dev del ─▶ unbind ─▶ virtio-pci again
//!   dropped: no virtual functions
//! ```
//! *Several queues*: QEMU's NIC has one queue pair until a driver negotiates MQ. vp_vdpa reads the
//! number of queues at probe, before any driver negotiates. So this module negotiates MQ in
//! between, through the function's registers (virtio 1.3, 4.1.4.3). Real hardware does not need
//! that.
//!
//! It owns what it creates and removes all of it. The management tool is iproute2's `vdpa`.

use crate::agent::protocol::Request;
use crate::agent::request;
use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use crate::rig::vf_mac;
use crate::sim::{self, PREFIX, device_file, require_lab, vdpa};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

mod registers;

use registers::Registers;

/// PCI devices, by sysfs.
pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";

/// Vendor of virtio devices (virtio 1.3, 4.1.2).
const VIRTIO_VENDOR: &str = "0x1af4";

/// The initial driver of a virtual function.
const NET_DRIVER: &str = "virtio-pci";

/// The driver that creates vDPA devices on virtio functions.
const VDPA_DRIVER: &str = "vp-vdpa";

/// How long a driver may take.
pub(crate) const DRIVER_LIMIT: Duration = Duration::from_secs(20);

/// The NIC with its virtual functions. Dropping it removes them.
#[derive(Debug)]
pub struct SriovNic {
    /// The physical function's directory.
    directory: PathBuf,
    /// The MAC address of a virtual function.
    mac: fn(usize) -> String,
}

impl SriovNic {
    /// Creates `count` virtual functions of the first virtio NIC that supports them.
    ///
    /// # Errors
    /// [`Error::Missing`] where there is no such NIC, or where it already has functions;
    /// [`Error::File`] when the kernel refuses.
    pub fn enable(count: u32) -> Result<Self> {
        require_lab()?;
        Self::enable_at(physical_function()?, count, vf_mac)
    }

    /// Like [`Self::enable`], of the NIC in `directory`, whose functions have the addresses `mac`.
    pub(crate) fn enable_at(
        directory: PathBuf,
        count: u32,
        mac: fn(usize) -> String,
    ) -> Result<Self> {
        let control = directory.join("sriov_numvfs");
        if attribute(&directory, "sriov_numvfs")? != "0" {
            return Err(Error::missing(
                format!("{} has virtual functions already", directory.display()),
                format!("unless a process needs them: echo 0 >{}", control.display()),
            ));
        }
        let started = Instant::now();
        // EBUSY until the physical function's own driver runs.
        while let Err(error) = std::fs::write(&control, count.to_string()) {
            let busy = error.raw_os_error() == Some(libc::EBUSY);
            if !busy || started.elapsed() > DRIVER_LIMIT {
                return Err(Error::file("write to", control)(error));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { directory, mac })
    }

    /// A virtual function, counted from 0.
    ///
    /// # Errors
    /// [`Error::File`] where there are fewer.
    pub fn vf(&self, index: usize) -> Result<VirtualFunction<'_>> {
        let link = self.directory.join(format!("virtfn{index}"));
        let target = std::fs::read_link(&link).map_err(Error::file("read", &link))?;
        let address = target
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .ok_or_else(|| Error::invalid(link.display().to_string(), "it links to nothing"))?;
        Ok(VirtualFunction {
            directory: Path::new(DEVICES).join(&address),
            address,
            index,
            mac: (self.mac)(index),
            nic: PhantomData,
        })
    }
}

impl Drop for SriovNic {
    fn drop(&mut self) {
        notice::left_behind(files::write(&self.directory.join("sriov_numvfs"), "0"));
    }
}

/// A virtual function with any driver.
#[derive(Debug, Clone)]
pub struct VirtualFunction<'nic> {
    directory: PathBuf,
    address: String,
    index: usize,
    mac: String,
    nic: PhantomData<&'nic SriovNic>,
}

impl VirtualFunction<'_> {
    /// Its PCI address, such as "0000:01:00.1".
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The MAC address that the rig gave it.
    pub fn mac(&self) -> String {
        self.mac.clone()
    }

    /// The name of its link, for [`set_link`].
    pub fn link(&self) -> String {
        format!("vf{}", self.index)
    }

    /// Its network interface in the host, while its initial driver has it.
    ///
    /// # Errors
    /// [`Error::Missing`] without one.
    pub fn interface(&self) -> Result<String> {
        let devices = files::list(&self.directory)?.into_iter();
        let interfaces = devices.filter_map(|device| files::list(&device.join("net")).ok());
        let name = interfaces.flatten().find_map(|interface| {
            let name = interface.file_name()?.to_str()?;
            Some(name.to_owned())
        });
        name.ok_or_else(|| {
            Error::missing(
                format!("{} has no network interface", self.address),
                format!("bind it to {NET_DRIVER}"),
            )
        })
    }

    /// The driver that it is bound to.
    pub fn driver(&self) -> Option<String> {
        driver_of(&self.directory)
    }

    /// Unbinds it from its driver and binds it to another one.
    ///
    /// # Errors
    /// [`Error::File`] when the kernel refuses; [`Error::Missing`] when the driver does not take
    /// it.
    pub fn bind(&self, driver: &str) -> Result<()> {
        self.unbind()?;
        self.override_driver(driver)?;
        self.probe()?;
        self.expect_driver(driver)
    }

    /// Unbinds it from its driver, if it has one.
    fn unbind(&self) -> Result<()> {
        if self.driver().is_some() {
            files::write(&self.directory.join("driver/unbind"), &self.address)?;
        }
        Ok(())
    }

    /// Allows only this driver to bind it; any driver if the name is empty.
    fn override_driver(&self, driver: &str) -> Result<()> {
        files::write(
            &self.directory.join("driver_override"),
            format!("{driver}\n"),
        )
    }

    fn probe(&self) -> Result<()> {
        files::write(Path::new("/sys/bus/pci/drivers_probe"), &self.address)
    }

    fn expect_driver(&self, driver: &str) -> Result<()> {
        let started = Instant::now();
        while self.driver().as_deref() != Some(driver) {
            if started.elapsed() > DRIVER_LIMIT {
                return Err(Error::missing(
                    format!("{driver} did not take {}", self.address),
                    "is its module loaded? The kernel's log (dmesg) says more",
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns it to its initial driver, unless the host has removed it.
    fn give_back(&self) -> Result<()> {
        if !self.directory.exists() {
            return Ok(());
        }
        self.unbind()?;
        self.override_driver("")?;
        self.probe()
    }
}

/// A virtual function bound to vp_vdpa, with as many queues as it supports: a management device,
/// without a device yet. Dropping it returns the function to its initial driver.
#[derive(Debug)]
pub struct ManagedFunction<'nic> {
    function: VirtualFunction<'nic>,
    queues: u16,
}

impl<'nic> ManagedFunction<'nic> {
    /// Binds the function to vp_vdpa.
    ///
    /// # Errors
    /// [`Error::Missing`] when a driver other than virtio-pci has the function; [`Error::File`].
    pub fn bind(function: VirtualFunction<'nic>) -> Result<Self> {
        if let Some(driver) = function.driver().filter(|driver| driver != NET_DRIVER) {
            return Err(Error::missing(
                format!("{} is bound to {driver}", function.address),
                format!("unless that driver must keep it: bind it to {NET_DRIVER}"),
            ));
        }
        function.unbind()?;
        // From here on a failure must not leave it half bound.
        let mut managed = Self {
            function,
            queues: 0,
        };
        let function = &managed.function;
        managed.queues = Registers::open(&function.directory)?.negotiate_queues()?;
        function.override_driver(VDPA_DRIVER)?;
        function.probe()?;
        function.expect_driver(VDPA_DRIVER)?;
        Ok(managed)
    }

    /// The management device's name: `pci/ADDRESS`.
    pub fn mgmtdev(&self) -> String {
        format!("pci/{}", self.function.address)
    }
}

impl Drop for ManagedFunction<'_> {
    fn drop(&mut self) {
        notice::left_behind(self.function.give_back());
    }
}

/// A vDPA device on a virtual function, bound to vhost-vdpa. Dropping it returns the function to
/// its initial driver.
#[derive(Debug)]
pub struct VfDevice<'nic> {
    managed: ManagedFunction<'nic>,
    name: String,
    path: PathBuf,
}

impl<'nic> VfDevice<'nic> {
    /// Creates the device, with as many queues as the function supports.
    ///
    /// # Errors
    /// Those of [`ManagedFunction::bind`]; [`Error::Program`] with the tool's message;
    /// [`Error::File`].
    pub fn add(function: VirtualFunction<'nic>) -> Result<Self> {
        let mut device = Self {
            name: format!("{PREFIX}vf{}", function.index),
            path: PathBuf::new(),
            managed: ManagedFunction::bind(function)?,
        };
        let mgmtdev = device.managed.mgmtdev();
        vdpa(&["dev", "add", "name", &device.name, "mgmtdev", &mgmtdev])?;
        device.path = device_file(&device.name)?;
        Ok(device)
    }

    /// The virtual function.
    pub fn function(&self) -> &VirtualFunction<'nic> {
        &self.managed.function
    }

    /// The device's name on the vdpa bus.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its `/dev/vhost-vdpa-N`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of its queues, the control queue included.
    pub fn queues(&self) -> u16 {
        self.managed.queues
    }
}

impl Drop for VfDevice<'_> {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            sim::remove(&self.name);
        }
    }
}

/// Pulls the cable of a link (`vf0` to `vf3`) from outside, or plugs it in.
///
/// # Errors
/// Those of [`request::ask`].
pub fn set_link(link: &str, up: bool) -> Result<()> {
    request::ask(&Request::SetLink {
        link: link.to_owned(),
        up,
    })
}

/// The driver of the PCI function in `directory`.
pub(crate) fn driver_of(directory: &Path) -> Option<String> {
    let target = std::fs::read_link(directory.join("driver")).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

fn attribute(directory: &Path, name: &str) -> Result<String> {
    Ok(files::read_text(&directory.join(name))?.trim().to_owned())
}

/// The directory of the virtio NIC that supports virtual functions.
fn physical_function() -> Result<PathBuf> {
    files::list(Path::new(DEVICES))?
        .into_iter()
        .find(|directory| {
            directory.join("sriov_numvfs").exists()
                && attribute(directory, "vendor").is_ok_and(|vendor| vendor == VIRTIO_VENDOR)
        })
        .ok_or_else(|| {
            Error::missing(
                "there is no virtio NIC with SR-IOV here",
                "run it in the lab host with `--rig sriov`; `cargo lab setup` says whether this \
                 QEMU can emulate one",
            )
        })
}
