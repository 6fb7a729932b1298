//! A vhost-vdpa device without a kernel, for tests of [`VdpaBackend`](super::VdpaBackend).
//!
//! This test program has `ioctl` and `write` of its own instead of libc's. In a thread that has
//! called [`enter`], they give requests of vhost and IOTLB messages to a [`Kernel`], whatever the
//! descriptor. Everything else reaches the real kernel. So the whole backend is the product's: only
//! the answers of the kernel are a model. The device has one queue, and moves no data by itself.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::raw::{c_int, c_ulong, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use vdpa::uapi::message::MESSAGE_SIZE;
use vdpa::uapi::{
    self, BackendFeatures, VHOST_IOTLB_INVALIDATE, VHOST_IOTLB_MSG_V2, VHOST_IOTLB_UPDATE,
    VHOST_VIRTIO,
};
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::GuestMemoryBackend as _;

use super::{DoorbellMode, VdpaBackend, VdpaOptions};
use crate::virtio::backend::SharedMemory;

/// The features that the device offers, and a driver accepts.
pub(crate) const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_F_ACCESS_PLATFORM;
const QUEUE_SIZE: u16 = 256;
const LAST_ADDRESS: u64 = (1 << 47) - 1;

/// Called before an INVALIDATE has its effect (false), and after.
pub(crate) type Gate = Arc<dyn Fn(bool) + Send + Sync>;

/// What the kernel knows of the device.
#[derive(Default)]
pub(crate) struct Kernel {
    pub(crate) status: u8,
    /// Sizes of the mappings by first address. An overlap is an error.
    pub(crate) mapped: BTreeMap<u64, u64>,
    /// IOTLB messages so far, refused ones included.
    pub(crate) messages: usize,
    /// The messages that it refuses.
    pub(crate) refused: Range<usize>,
    pub(crate) gate: Option<Gate>,
}

thread_local! {
    static KERNEL: RefCell<Option<Arc<Mutex<Kernel>>>> = const { RefCell::new(None) };
}

/// Gives the calling thread this kernel from now on.
pub(crate) fn enter(kernel: &Arc<Mutex<Kernel>>) {
    KERNEL.set(Some(Arc::clone(kernel)));
}

fn entered() -> Option<Arc<Mutex<Kernel>>> {
    KERNEL
        .try_with(|kernel| kernel.try_borrow().ok()?.clone())
        .ok()?
}

/// Opens the device of the calling thread's kernel, behind an IOMMU.
pub(crate) fn open(memory: &SharedMemory) -> VdpaBackend {
    let options = VdpaOptions {
        id: "fake".into(),
        // Any character device.
        path: PathBuf::from("/dev/null"),
        mac: None,
        mac_lock: false,
        standby: false,
        num_queues: None,
        doorbell: DoorbellMode::Off,
        iommu: true,
    };
    let end = memory.last_addr().0 + 1;
    VdpaBackend::open(&options, Arc::clone(memory), end).unwrap()
}

impl Kernel {
    /// The answer to an ioctl that reads, or the new value of one that exchanges.
    fn answer(&self, request: c_ulong) -> Option<Vec<u8>> {
        let backend = BackendFeatures::IOTLB_MSG_V2
            | BackendFeatures::IOTLB_BATCH
            | BackendFeatures::IOTLB_PERSIST
            | BackendFeatures::SUSPEND_AND_RESUME;
        let number = |value: u32| value.to_ne_bytes().to_vec();
        let answers = [
            (uapi::get_device_id().number(), number(VIRTIO_ID_RNG)),
            (
                uapi::get_features().number(),
                FEATURES.to_ne_bytes().to_vec(),
            ),
            (
                uapi::get_backend_features().number(),
                backend.bits().to_ne_bytes().to_vec(),
            ),
            (uapi::get_vqs_count().number(), number(1)),
            (
                uapi::get_vring_num().number(),
                QUEUE_SIZE.to_ne_bytes().to_vec(),
            ),
            (uapi::get_group_num().number(), number(1)),
            (uapi::get_as_num().number(), number(1)),
            (
                uapi::get_iova_range().number(),
                [0, LAST_ADDRESS].map(u64::to_ne_bytes).concat(),
            ),
            (
                uapi::get_vring_size().number(),
                [0, u32::from(QUEUE_SIZE)].map(u32::to_ne_bytes).concat(),
            ),
            (uapi::get_status().number(), vec![self.status]),
        ];
        let found = answers.into_iter().find(|(number, _)| *number == request);
        found.map(|(_, answer)| answer)
    }

    /// Takes an IOTLB message; false: it refuses.
    fn take(&mut self, message: &[u8]) -> bool {
        self.messages += 1;
        if self.refused.contains(&(self.messages - 1)) {
            return false;
        }
        let word = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
        let (iova, size) = (word(8), word(16));
        let end = iova + size;
        match message[33] {
            VHOST_IOTLB_UPDATE => {
                let overlaps = self
                    .mapped
                    .iter()
                    .any(|(&at, &len)| at < end && iova < at + len);
                assert!(!overlaps, "{iova:#x} is mapped");
                self.mapped.insert(iova, size);
            }
            VHOST_IOTLB_INVALIDATE => {
                self.mapped
                    .retain(|&at, &mut len| at >= end || iova >= at + len);
            }
            _ => {}
        }
        true
    }
}

/// Replaces that of libc.
///
/// # Safety
/// As that of libc.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let of_vhost = (request >> 8) & 0xff == c_ulong::from(VHOST_VIRTIO);
    let Some(kernel) = entered().filter(|_| of_vhost) else {
        // SAFETY: the caller's own arguments.
        let result = unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) };
        return c_int::try_from(result).unwrap_or(-1);
    };
    let mut kernel = kernel.lock();
    if let Some(answer) = kernel.answer(request) {
        // SAFETY: the argument of each of these requests has room for its answer.
        unsafe { std::ptr::copy_nonoverlapping(answer.as_ptr(), argument.cast(), answer.len()) };
    } else if request == uapi::set_status().number() {
        // SAFETY: the argument of this request is one byte.
        kernel.status = unsafe { *argument.cast() };
    }
    0
}

/// Replaces that of libc.
///
/// # Safety
/// As that of libc.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    let kernel = entered().filter(|_| len == MESSAGE_SIZE);
    let written = || {
        // SAFETY: the caller's own arguments.
        let written = unsafe { libc::syscall(libc::SYS_write, fd, bytes, len) };
        isize::try_from(written).unwrap_or(-1)
    };
    let Some(kernel) = kernel else {
        return written();
    };
    // SAFETY: the caller lends `len` bytes.
    let message = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) };
    if message[..4] != VHOST_IOTLB_MSG_V2.to_ne_bytes() {
        return written();
    }
    let gate = kernel.lock().gate.clone();
    let gate = gate.filter(|_| message[33] == VHOST_IOTLB_INVALIDATE);
    if let Some(gate) = &gate {
        gate(false);
    }
    let taken = kernel.lock().take(message);
    if let Some(gate) = &gate {
        gate(true);
    }
    if taken {
        return isize::try_from(len).unwrap_or(-1);
    }
    // SAFETY: the address of this thread's errno.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    -1
}
