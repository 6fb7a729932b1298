//! Opens functions of the host for the machine, on any thread.
//!
//! Owns KVM's device for VFIO, of which a VM has at most one. Owns the address spaces that open
//! functions share: one of iommufd, and one of a container. A function behind the guest's IOMMU has
//! its own. It must not know which functions the guest has.

use std::sync::{Arc, Weak};

use devices::vfio::{Dma, HostFunction, VfioOptions, has_iommufd};
use devices::virtio::backend::SharedMemory;
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vfio_ioctls::VfioDeviceFd;

use crate::config::{DeviceSource, VfioConfig};
use crate::host::Host;
use crate::{Error, kvm};

/// An open function, before it is attached.
#[derive(Debug)]
pub(super) struct Function {
    /// Its configuration. Its `id` is set.
    pub(super) config: VfioConfig,
    pub(super) host: HostFunction,
    /// The NUMA node of the host to which it is attached, if the host reports one.
    pub(super) numa_node: Option<u16>,
}

/// See the module.
pub(super) struct Passthrough {
    vm: Arc<VmFd>,
    shared: Mutex<Shared>,
}

/// What the functions of the machine share.
#[derive(Default)]
struct Shared {
    /// Kept after the last function, since older kernels never let go of it.
    kvm: Option<Arc<VfioDeviceFd>>,
    /// Weak, so that the last function unpins guest RAM.
    container: Weak<Dma>,
    iommufd: Weak<Dma>,
}

impl Shared {
    /// The address space that functions share.
    fn space(&mut self, iommufd: bool) -> &mut Weak<Dma> {
        if iommufd {
            &mut self.iommufd
        } else {
            &mut self.container
        }
    }
}

vdpa::opaque_debug!(Passthrough, this => vm: this.vm);

impl Passthrough {
    pub(super) fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            shared: Mutex::default(),
        }
    }

    /// Opens and resets a function. The first one pins `memory`, which takes long.
    ///
    /// # Errors
    /// The function cannot be given to a guest; the text has the remedy. Nothing has changed. KVM's
    /// device may stay if sysfs shows a usable function.
    pub(super) fn open(
        &self,
        config: &VfioConfig,
        memory: &SharedMemory,
    ) -> Result<Function, Error> {
        let id = config.name();
        let (path, fd) = match &config.source {
            DeviceSource::Path(path) => (path.as_path(), None),
            DeviceSource::Descriptor(descriptor) => {
                let fd = descriptor.duplicate();
                let fd = fd.map_err(Error::failed("duplicating a descriptor"))?;
                (descriptor.path(), Some(fd))
            }
            DeviceSource::Number(number) => {
                return Err(Error::no_descriptor(&format!("VFIO device {id}"), *number));
            }
        };
        let iommufd = config.iommufd && has_iommufd(path);
        let options = VfioOptions {
            id: id.clone(),
            path: path.to_owned(),
            fd,
            allow_pf: config.allow_pf,
        };
        let unusable =
            |source| Error::unusable(format!("cannot use VFIO device {id}")).because(source);
        // Before KVM's device is created, which stays.
        options.check().map_err(unusable)?;
        let dma = if config.iommu {
            // Its address space is its own.
            self.new_dma(&mut self.shared.lock(), memory, iommufd, true)?
        } else {
            self.dma(memory, iommufd)?
        };
        let host = HostFunction::open(options, &dma).map_err(unusable)?;
        Ok(Function {
            config: VfioConfig {
                id: Some(id),
                ..config.released()
            },
            host,
            numa_node: Host::new().node_at(path),
        })
    }

    /// Returns the address space that functions share.
    fn dma(&self, memory: &SharedMemory, iommufd: bool) -> Result<Arc<Dma>, Error> {
        let mut shared = self.shared.lock();
        if let Some(dma) = shared.space(iommufd).upgrade() {
            return Ok(dma);
        }
        let dma = self.new_dma(&mut shared, memory, iommufd, false)?;
        *shared.space(iommufd) = Arc::downgrade(&dma);
        Ok(dma)
    }

    fn new_dma(
        &self,
        shared: &mut Shared,
        memory: &SharedMemory,
        iommufd: bool,
        translated: bool,
    ) -> Result<Arc<Dma>, Error> {
        let kvm = match &shared.kvm {
            Some(kvm) => kvm.clone(),
            None => shared.kvm.insert(kvm::vfio::create(&self.vm)?).clone(),
        };
        let dma = Dma::new(kvm, memory.clone(), iommufd, translated);
        let dma = dma.map_err(|source| Error::unusable("cannot use VFIO").because(source))?;
        Ok(Arc::new(dma))
    }
}
