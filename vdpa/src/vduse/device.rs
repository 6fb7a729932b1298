//! `/dev/vduse/NAME`: one call per request of the interface.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use super::control::{open, path};
#[cfg(any(test, feature = "fuzz"))]
use super::fake::Fake;
use super::message::{Message, from_kernel};
use crate::Error;
use crate::device::handle::Handle;
use crate::device::{VringAddresses, VringBase};
use crate::iova::DeviceAddress;
use crate::uapi::vduse::{
    self as uapi, REQUEST_SIZE, vduse_iotlb_entry, vduse_vq_config, vduse_vq_eventfd,
    vduse_vq_info, vduse_vq_state_packed,
};

/// devtmpfs shows the file a moment after the device is created.
const FILE_TIME: Duration = Duration::from_secs(5);

/// What the driver set for a queue. Nothing of it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueInfo {
    /// Entries.
    pub size: u32,
    /// The areas.
    pub addresses: VringAddresses,
    /// The position where the device begins.
    pub base: VringBase,
    /// Whether the driver enabled the queue.
    pub ready: bool,
}

/// An open device: this process serves it.
#[derive(Debug)]
pub struct Device {
    file: Arc<File>,
    handle: Handle,
    /// Answers instead of the kernel.
    #[cfg(any(test, feature = "fuzz"))]
    fake: Option<parking_lot::Mutex<Fake>>,
}

impl AsFd for Device {
    /// Readable when a message waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<File> for Device {
    /// The open file of a device, as a process that serves it inherits it.
    fn from(file: File) -> Self {
        let file = Arc::new(file);
        let handle = Handle {
            file: Some(Arc::clone(&file)),
        };
        Self {
            file,
            handle,
            #[cfg(any(test, feature = "fuzz"))]
            fake: None,
        }
    }
}

impl Device {
    /// Opens a device; one process at a time can.
    ///
    /// # Errors
    /// There is none of this name, another process has it open, or the rights are missing.
    pub fn open(name: &str) -> Result<Self, Error> {
        let begin = Instant::now();
        let file = loop {
            match open(name) {
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && begin.elapsed() < FILE_TIME =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                opened => break opened.map_err(no_access(&path(name)))?,
            }
        };
        Ok(Self::from(file))
    }

    /// Has a model answer all ioctls.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn set_fake(&mut self, fake: Fake) {
        self.fake = Some(parking_lot::Mutex::new(fake));
    }

    /// The model, if one answers.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn fake(&self) -> Option<parking_lot::MutexGuard<'_, Fake>> {
        self.fake.as_ref().map(parking_lot::Mutex::lock)
    }

    /// Sets the largest size of a queue.
    ///
    /// # Errors
    /// There is no such queue.
    pub fn set_up_queue(&self, index: u32, max_size: u16) -> Result<(), Error> {
        let config = vduse_vq_config {
            index,
            max_size,
            reserved: [0; 13],
        };
        self.handle
            .write(uapi::vq_setup(), &config)
            .map_err(Error::refused("VDUSE_VQ_SETUP"))
    }

    /// The features that the driver accepted. Valid after FEATURES_OK.
    ///
    /// # Errors
    /// The kernel declared the device broken.
    pub fn features(&self) -> Result<u64, Error> {
        #[cfg(any(test, feature = "fuzz"))]
        if let Some(fake) = self.fake() {
            return Ok(fake.features);
        }
        self.handle
            .read(uapi::dev_get_features(), 0)
            .map_err(Error::refused("VDUSE_DEV_GET_FEATURES"))
    }

    /// What the driver set for a queue of this format.
    ///
    /// # Errors
    /// As [`Device::features`], or there is no such queue.
    pub fn queue(&self, index: u32, packed: bool) -> Result<QueueInfo, Error> {
        #[cfg(any(test, feature = "fuzz"))]
        if let Some(fake) = self.fake() {
            return fake.queue(index);
        }
        let info = vduse_vq_info {
            index,
            num: 0,
            desc_addr: 0,
            driver_addr: 0,
            device_addr: 0,
            packed: vduse_vq_state_packed::default(),
            ready: 0,
        };
        let info = self.handle.exchange(uapi::vq_get_info(), info);
        let info = info.map_err(Error::refused("VDUSE_VQ_GET_INFO"))?;
        Ok(QueueInfo {
            size: info.num,
            addresses: VringAddresses {
                descriptor: DeviceAddress(info.desc_addr),
                driver: DeviceAddress(info.driver_addr),
                device: DeviceAddress(info.device_addr),
            },
            base: from_kernel(info.packed, packed),
            ready: info.ready != 0,
        })
    }

    /// Sets the eventfd for a queue's kicks, until the next reset. Kicks before are not lost.
    ///
    /// # Errors
    /// As [`Device::queue`].
    pub fn set_kick(&self, index: u32, kick: &EventFd) -> Result<(), Error> {
        #[cfg(any(test, feature = "fuzz"))]
        if let Some(mut fake) = self.fake() {
            return fake.set_kick(index, kick);
        }
        let fd = kick.as_raw_fd();
        self.handle
            .write(uapi::vq_setup_kickfd(), &vduse_vq_eventfd { index, fd })
            .map_err(Error::refused("VDUSE_VQ_SETUP_KICKFD"))
    }

    /// Interrupts the driver of a queue. `false`: it cannot be interrupted yet, because the kernel
    /// sets DRIVER_OK only after it has the answer. Try again.
    ///
    /// # Errors
    /// As [`Device::features`].
    pub fn interrupt(&self, index: u32) -> Result<bool, Error> {
        #[cfg(any(test, feature = "fuzz"))]
        if let Some(fake) = self.fake() {
            return fake.queue(index).map(|queue| queue.ready);
        }
        match self.handle.write(uapi::vq_inject_irq(), &index) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
            injected => injected
                .map(|()| true)
                .map_err(Error::refused("VDUSE_VQ_INJECT_IRQ")),
        }
    }

    /// The first mapping that ends at `from` or later, with its file.
    ///
    /// # Errors
    /// As [`Device::features`], or the limit of open files is reached.
    pub(super) fn mapping(&self, from: u64) -> Result<Option<(vduse_iotlb_entry, File)>, Error> {
        #[cfg(any(test, feature = "fuzz"))]
        if let Some(fake) = self.fake() {
            return fake.mapping(from);
        }
        let mut entry = vduse_iotlb_entry {
            offset: 0,
            start: from,
            last: u64::MAX,
            perm: 0,
        };
        // SAFETY: there is no safe interface to ioctls. The kernel reads and writes one
        // `vduse_iotlb_entry`, which is exclusively borrowed during the call.
        let fd =
            unsafe { ioctl_with_mut_ref(&*self.file, uapi::iotlb_get_fd().number(), &mut entry) };
        if fd >= 0 {
            // SAFETY: the kernel has just installed this descriptor for the caller alone.
            return Ok(Some((entry, unsafe { File::from_raw_fd(fd) })));
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
            error => Err(Error::refused("VDUSE_IOTLB_GET_FD")(error)),
        }
    }

    /// Checks that the kernel has not declared the device broken, which no process can repair.
    ///
    /// # Errors
    /// It has.
    pub fn check(&self) -> Result<(), Error> {
        let mut state = [PollFd::new(&self.file, PollFlags::empty())];
        poll(&mut state, Some(&Timespec::default()))
            .map_err(Error::context("cannot poll a VDUSE device"))?;
        let [is_broken] = state.map(|fd| fd.revents().contains(PollFlags::ERR));
        if is_broken { Err(broken()) } else { Ok(()) }
    }

    /// The next message, if one waits.
    ///
    /// # Errors
    /// The message cannot be read.
    pub fn message(&self) -> Result<Option<Message>, Error> {
        let mut bytes = [0; REQUEST_SIZE];
        match (&*self.file).read(&mut bytes) {
            Ok(REQUEST_SIZE) => Ok(Some(Message::decode(&bytes))),
            Ok(read) => Err(Error::other(format!(
                "a VDUSE message of {read} bytes: this kernel has another interface"
            ))),
            Err(error) if is_nothing(&error) => Ok(None),
            Err(error) => Err(cannot("read a VDUSE message")(error)),
        }
    }

    /// Answers each message with success until `stop` is readable, without serving a queue.
    ///
    /// # Errors
    /// As [`Device::message`], or the kernel declared the device broken.
    pub fn idle(&self, stop: BorrowedFd<'_>) -> Result<(), Error> {
        loop {
            let mut ready = [
                PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::context("cannot wait for messages")(error)),
            }
            let [messages, end] = ready.each_ref().map(|fd| !fd.revents().is_empty());
            if messages && let Some(message) = self.message()? {
                self.answer(&message, true, None)?;
            } else if end {
                return Ok(());
            } else {
                self.check()?;
            }
        }
    }

    /// Answers a message. [`Request::QueueState`](super::Request) needs the position.
    ///
    /// # Errors
    /// The kernel does not wait for it any more.
    pub fn answer(
        &self,
        message: &Message,
        done: bool,
        base: Option<VringBase>,
    ) -> Result<(), Error> {
        let written = (&*self.file).write_all(&message.answer(done, base));
        written.map_err(cannot("answer a VDUSE message"))
    }
}

/// The kernel fails all messages of a broken device, and reports an error of its file for ever.
pub(super) fn broken() -> Error {
    Error::other(
        "the kernel has declared the VDUSE device broken, because no process answered a message \
         in time: delete the NIC and create it again",
    )
}

fn cannot(verb: &str) -> impl FnOnce(io::Error) -> Error {
    let message = format!("cannot {verb}");
    move |error| Error::other(message).because(error)
}

/// Whether nothing waits now.
fn is_nothing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// For `map_err`: a file of VDUSE does not open.
pub(super) fn no_access(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
                "load the kernel's module with `modprobe vduse`"
            }
            Some(libc::EACCES | libc::EPERM) => "run this as root",
            Some(libc::EBUSY) => "another process serves this device",
            _ => "`bellhop doctor` checks the host",
        };
        let message = format!("cannot open {}: {remedy}", path.display());
        Error::other(message).because(error)
    }
}
