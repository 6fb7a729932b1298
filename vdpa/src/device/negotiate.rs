//! From an opened device to one with features: takes ownership, assigns groups to address spaces,
//! negotiates.
//!
//! Rings are in `run.rs`, and the diagram of the states is in `state.rs`.

use super::info::{ask, query_group, query_max_size};
use super::{
    ACCESS_PLATFORM, ACKNOWLEDGE, DRIVER, Device, FEATURES_OK, Operation, VERSION_1, other_status,
};
use crate::Error;
use crate::iotlb::{DeviceSink, Iotlb, IotlbLimits};
use crate::uapi::{self, BackendFeatures};

impl Device {
    /// Makes this process the owner and reads the device's properties. Acknowledges all backend
    /// features that this crate knows.
    ///
    /// # Errors
    /// As [`Device::own_with`].
    pub fn own(self) -> Result<(Self, Iotlb), Error> {
        self.own_with(BackendFeatures::all())
    }

    /// As [`Device::own`], but acknowledges no backend feature outside `wanted`.
    ///
    /// # Errors
    /// The device refuses a request. It is closed then: ownership cannot be given up in another
    /// way.
    pub fn own_with(mut self, wanted: BackendFeatures) -> Result<(Self, Iotlb), Error> {
        self.perform(Operation::Own, |device| device.take_ownership(wanted))?;
        let limits = IotlbLimits {
            range: self.info.iova_range,
            address_spaces: self.info.address_spaces,
            features: self.acked,
        };
        let sink = DeviceSink {
            handle: self.handle.clone(),
        };
        Ok((self, Iotlb::new(sink, limits)))
    }

    fn take_ownership(&mut self, wanted: BackendFeatures) -> Result<(), Error> {
        self.handle.call(uapi::set_owner()).map_err(|source| {
            if source.raw_os_error() != Some(libc::EBUSY) {
                return Error::refused("VHOST_SET_OWNER")(source);
            }
            Error::other(
                "the device's file descriptor has an owner already: open the device afresh",
            )
            .because(source)
        })?;
        let request = uapi::get_backend_features();
        let offered = ask(&self.handle, "VHOST_GET_BACKEND_FEATURES", request, 0)?;
        // Bits unknown to this crate are not acknowledged: they could require unknown behaviour.
        let offered = BackendFeatures::from_bits_truncate(offered);
        if !offered.contains(BackendFeatures::IOTLB_MSG_V2) {
            return Err(needed("the backend feature IOTLB_MSG_V2"));
        }
        let mut acked = offered & (wanted | BackendFeatures::IOTLB_MSG_V2);
        if !acked.contains(BackendFeatures::IOTLB_ASID) {
            // The kernel refuses DESC_ASID without IOTLB_ASID.
            acked.remove(BackendFeatures::DESC_ASID);
        }
        self.handle
            .write(uapi::set_backend_features(), &acked.bits())
            .map_err(Error::refused("VHOST_SET_BACKEND_FEATURES"))?;
        self.info = self.info.query(&self.handle, acked, offered)?;
        self.acked = acked;
        Ok(())
    }

    /// Whether the device reports and accepts positions in its rings. The test uses queue 0, whose
    /// rings are not set up yet.
    ///
    /// # Errors
    /// The device is not in [`State::Owned`](super::State::Owned).
    pub fn keeps_ring_positions(&self) -> Result<bool, Error> {
        self.check(Operation::Probe)?;
        let position = self.handle.vring_state(uapi::get_vring_base(), 0);
        Ok(position.is_ok())
    }

    /// Puts a queue group into an address space. Lasts until the next reset.
    ///
    /// # Errors
    /// No such group, no such address space, or the device refuses.
    pub fn set_group_asid(&mut self, group: u32, asid: u32) -> Result<(), Error> {
        self.check(Operation::AssignGroup)?;
        let address_spaces = if self.acked.contains(BackendFeatures::IOTLB_ASID) {
            self.info.address_spaces
        } else {
            1
        };
        if group >= self.info.groups || asid >= address_spaces {
            return Err(Error::other(format!(
                "group {group} cannot be in address space {asid}: the device has {} groups and \
                 {address_spaces} address spaces",
                self.info.groups
            )));
        }
        self.handle
            .set_vring_state(uapi::set_group_asid(), group, asid)
            .map_err(Error::refused("VHOST_VDPA_SET_GROUP_ASID"))
    }

    /// Moves the status to FEATURES_OK with `features` (virtio 1.3, 3.1.1).
    ///
    /// VERSION_1 must be among them. ACCESS_PLATFORM is added if the device offers it: the device
    /// accesses memory through its IOTLB, whatever a guest assumes. Groups and the largest rings
    /// are read again. The features decide the index of the control queue, and so its group (mlx5),
    /// and which queue has a ring of its size (vp_vdpa).
    ///
    /// # Errors
    /// The features are impossible; or the device refused, and was reset.
    pub fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        self.check(Operation::Negotiate)?;
        let offered = self.info.features;
        let features = features | (offered & ACCESS_PLATFORM);
        if features & !offered != 0 {
            let missing = features & !offered;
            return Err(Error::other(format!(
                "the device does not offer the features {missing:#x}"
            )));
        }
        if features & VERSION_1 == 0 {
            return Err(needed("the feature VIRTIO_F_VERSION_1"));
        }
        self.perform(Operation::Negotiate, |device| {
            device.walk_to_features_ok(features)
        })
    }

    fn walk_to_features_ok(&mut self, features: u64) -> Result<(), Error> {
        self.add_status(ACKNOWLEDGE)?;
        self.add_status(DRIVER)?;
        self.handle
            .write(uapi::set_features(), &features)
            .map_err(Error::refused("VHOST_SET_FEATURES"))?;
        let (wanted, shown) = self.try_status(FEATURES_OK)?;
        if shown & FEATURES_OK == 0 {
            return Err(Error::other(format!(
                "the device does not accept the features {features:#x}"
            )));
        }
        if shown & wanted != wanted {
            return Err(other_status(wanted, shown));
        }
        let groups = self.info.groups;
        for (index, queue) in (0..=u16::MAX).zip(&mut self.info.queues) {
            queue.max_size = query_max_size(&self.handle, index, queue.max_size);
            let group = uapi::get_vring_group();
            queue.group = query_group(&self.handle, group, index, groups)?;
            if self.acked.contains(BackendFeatures::DESC_ASID) {
                let group = uapi::get_vring_desc_group();
                queue.descriptor_group = query_group(&self.handle, group, index, groups)?;
            }
        }
        self.features = features;
        Ok(())
    }
}

/// The device lacks a feature that this crate requires.
fn needed(feature: &str) -> Error {
    Error::other(format!(
        "the device does not offer {feature}, which is needed"
    ))
}
