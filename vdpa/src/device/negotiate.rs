//! From an opened device to one with features: taking ownership, assigning
//! groups to address spaces, negotiating.
//!
//! It must not know rings; the diagram of the states is in the parent module.

use super::info::{query_group, refused};
use super::{
    ACCESS_PLATFORM, ACKNOWLEDGE, DRIVER, Device, DeviceError, DeviceInfo, FEATURES_OK, Failed,
    Negotiated, Opened, Owned, VERSION_1,
};
use crate::iotlb::{DeviceSink, Iotlb, IotlbLimits};
use crate::uapi::{self, BackendFeatures};

impl Device<Opened> {
    /// Makes this process the owner and asks the device what it can do. All
    /// backend features that this crate knows are acknowledged.
    ///
    /// # Errors
    /// Whatever the device refuses.
    pub fn own(self) -> Result<(Device<Owned>, Iotlb), Failed<Opened>> {
        self.own_with(BackendFeatures::all())
    }

    /// As [`Device::own`], but acknowledges no backend feature outside `wanted`.
    ///
    /// # Errors
    /// Whatever the device refuses. The device comes back only if it did not
    /// get its owner: there is no way to give ownership up but to close.
    pub fn own_with(
        self,
        wanted: BackendFeatures,
    ) -> Result<(Device<Owned>, Iotlb), Failed<Opened>> {
        if let Err(source) = self.handle.call(uapi::set_owner()) {
            let error = match source.raw_os_error() {
                Some(libc::EBUSY) => DeviceError::Owned { source },
                _ => DeviceError::Refused {
                    operation: "VHOST_SET_OWNER",
                    source,
                },
            };
            return Err(self.failed(error));
        }
        match self.introduce(wanted) {
            Ok(owned) => {
                let limits = IotlbLimits {
                    range: owned.info.iova_range,
                    address_spaces: owned.info.address_spaces,
                    features: owned.acked,
                };
                let sink = DeviceSink {
                    handle: self.handle.clone(),
                };
                Ok((self.with_state(|_| owned), Iotlb::new(sink, limits)))
            }
            Err(error) => Err(Failed {
                device: None,
                error,
            }),
        }
    }

    fn introduce(&self, wanted: BackendFeatures) -> Result<Owned, DeviceError> {
        let offered = refused(
            "VHOST_GET_BACKEND_FEATURES",
            self.handle.read(uapi::get_backend_features(), 0),
        )?;
        // Bits that this crate does not know are not acknowledged: who knows
        // what they would ask of us.
        let offered = BackendFeatures::from_bits_truncate(offered);
        if !offered.contains(BackendFeatures::IOTLB_MSG_V2) {
            return Err(DeviceError::Needed {
                feature: "the backend feature IOTLB_MSG_V2",
            });
        }
        let mut acked = offered & (wanted | BackendFeatures::IOTLB_MSG_V2);
        if !acked.contains(BackendFeatures::IOTLB_ASID) {
            // The kernel refuses DESC_ASID without it.
            acked.remove(BackendFeatures::DESC_ASID);
        }
        refused(
            "VHOST_SET_BACKEND_FEATURES",
            self.handle
                .write(uapi::set_backend_features(), &acked.bits()),
        )?;
        let info = DeviceInfo::query(&self.handle, self.identity, acked, offered)?;
        Ok(Owned {
            info: Box::new(info),
            acked,
        })
    }
}

impl Device<Owned> {
    /// Whether the device tells and takes positions in its rings: it is asked for that of
    /// queue 0, whose rings nobody has set up yet.
    #[must_use]
    pub fn keeps_ring_positions(&self) -> bool {
        let position = self.handle.vring_state(uapi::get_vring_base(), 0);
        position.is_ok()
    }

    /// Puts a queue group into an address space. Lasts until the next reset.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchGroup`], or whatever the device refuses.
    pub fn set_group_asid(&mut self, group: u32, asid: u32) -> Result<(), DeviceError> {
        self.group_asid(group, asid)
    }

    /// Walks the status to FEATURES_OK with `features` (virtio 1.3, 3.1.1).
    ///
    /// VERSION_1 must be among them. ACCESS_PLATFORM is added where it is
    /// offered: the device reaches memory through its IOTLB, whatever a guest
    /// believes. Groups are asked again, because the place of a control queue,
    /// and so its group, depends on the features on some parents (mlx5).
    ///
    /// # Errors
    /// The device refused, and was reset.
    pub fn negotiate(self, features: u64) -> Result<Device<Negotiated>, Failed<Owned>> {
        let offered = self.info().features;
        let features = features | (offered & ACCESS_PLATFORM);
        if features & !offered != 0 {
            let missing = features & !offered;
            return Err(self.failed(DeviceError::NotOffered { missing }));
        }
        if features & VERSION_1 == 0 {
            return Err(self.failed(DeviceError::Needed {
                feature: "the feature VIRTIO_F_VERSION_1",
            }));
        }
        let mut device = self;
        match device.walk_to_features_ok(features) {
            Ok(()) => Ok(device.with_state(|owned| Negotiated { owned, features })),
            Err(error) => Err(device.fall_back(error)),
        }
    }

    fn walk_to_features_ok(&mut self, features: u64) -> Result<(), DeviceError> {
        self.add_status(ACKNOWLEDGE)?;
        self.add_status(DRIVER)?;
        refused(
            "VHOST_SET_FEATURES",
            self.handle.write(uapi::set_features(), &features),
        )?;
        self.add_status(FEATURES_OK).map_err(|error| match error {
            DeviceError::Status { shown, .. } if shown & FEATURES_OK == 0 => {
                DeviceError::FeaturesRefused { features }
            }
            other => other,
        })?;
        let Owned { info, acked } = &mut self.state;
        for (index, queue) in (0..=u16::MAX).zip(&mut info.queues) {
            let group = uapi::get_vring_group();
            queue.group = query_group(&self.handle, group, index, info.groups)?;
            if acked.contains(BackendFeatures::DESC_ASID) {
                let group = uapi::get_vring_desc_group();
                queue.descriptor_group = query_group(&self.handle, group, index, info.groups)?;
            }
        }
        Ok(())
    }
}
