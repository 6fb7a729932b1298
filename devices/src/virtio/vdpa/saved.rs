//! The saved form of a vhost-vdpa device, apart from the live types.

use serde::{Deserialize, Serialize};
use vdpa::control_queue::ControlState;
use vdpa::device::VringBase;

use crate::Error;
use crate::virtio::backend::SavedState;
use crate::virtio::saved_state;
use crate::virtio::userspace_queue::SavedQueue;

/// Name and version of the saved state.
pub(super) const STATE_NAME: &str = "virtio-vdpa";
pub(super) const STATE_VERSION: u32 = 2;

/// The position at which one ring continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedRing {
    pub(super) index: u16,
    pub(super) base: VringBase,
}

/// The control queue: the commands that the device acknowledged, and the guest's ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedControl {
    pub(super) state: ControlState,
    /// `None`: the guest has no control queue.
    pub(super) guest: Option<SavedQueue>,
}

/// A whole device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) device_type: u32,
    pub(super) features: u64,
    /// The data queues.
    pub(super) rings: Vec<SavedRing>,
    /// The address that the guest sees.
    pub(super) mac: Option<[u8; 6]>,
    /// The guest was asked to announce itself and has not acknowledged it.
    pub(super) announce: bool,
    pub(super) control: Option<SavedControl>,
}

impl Saved {
    pub(super) fn encode(&self) -> Result<SavedState, Error> {
        saved_state::encode(STATE_NAME, STATE_VERSION, self)
    }

    pub(super) fn decode(state: &SavedState) -> Result<Self, Error> {
        saved_state::decode(state, STATE_NAME, STATE_VERSION)
    }
}
