//! The ioctls on an open device, one call each.
//!
//! The only `unsafe` of the device module is here: the call from a typed ioctl of [`crate::uapi`]
//! to the kernel. The order of calls and the meaning of values belong to the callers.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ref};

use crate::uapi::{
    self, Plain, Read, ReadWrite, VHOST_FILE_UNBIND, Write, vhost_vring_file, vhost_vring_state,
};

/// Bytes of `struct vhost_vdpa_config` before its data.
const CONFIG_HEADER: usize = 8;
const _: () = assert!(size_of::<uapi::vhost_vdpa_config>() == CONFIG_HEADER);

/// An open vhost-vdpa file description, shared with the IOTLB.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    /// `None` after [`Device::close`](super::Device::close).
    pub(crate) file: Option<Arc<File>>,
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// The kernel's argument that binds an eventfd: its number, or -1 to unbind.
fn raw(eventfd: Option<&EventFd>) -> RawFd {
    eventfd.map_or(VHOST_FILE_UNBIND, AsRawFd::as_raw_fd)
}

impl Handle {
    /// # Errors
    /// EBADF: it was closed.
    pub(crate) fn file(&self) -> io::Result<&File> {
        let file = self.file.as_deref();
        file.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    pub(crate) fn call(&self, request: Plain) -> io::Result<()> {
        let file = self.file()?;
        // SAFETY: there is no safe interface to ioctls. A `Plain` takes no argument, so the kernel
        // accesses no memory of this process.
        check(unsafe { ioctl(file, request.number()) })
    }

    pub(crate) fn read<T>(&self, request: Read<T>, mut value: T) -> io::Result<T> {
        let file = self.file()?;
        // SAFETY: there is no safe interface to ioctls. `Read<T>` is created only in `uapi`, for
        // requests where the kernel writes one `T` (its size is part of the number). Every bit
        // pattern is a valid `T` there. `value` is one, and exclusively borrowed during the call.
        check(unsafe { ioctl_with_mut_ref(file, request.number(), &mut value) })?;
        Ok(value)
    }

    pub(crate) fn write<T>(&self, request: Write<T>, value: &T) -> io::Result<()> {
        let file = self.file()?;
        // SAFETY: there is no safe interface to ioctls. `Write<T>` is created only in `uapi`, for
        // requests where the kernel reads one `T`, which `value` is. None of these types holds a
        // pointer into this process.
        check(unsafe { ioctl_with_ref(file, request.number(), value) })
    }

    pub(crate) fn exchange<T>(&self, request: ReadWrite<T>, mut value: T) -> io::Result<T> {
        let file = self.file()?;
        // SAFETY: as for `read`; the kernel reads the same `T` before.
        check(unsafe { ioctl_with_mut_ref(file, request.number(), &mut value) })?;
        Ok(value)
    }

    pub(crate) fn status(&self) -> io::Result<u8> {
        self.read(uapi::get_status(), 0)
    }

    pub(crate) fn set_status(&self, status: u8) -> io::Result<()> {
        self.write(uapi::set_status(), &status)
    }

    /// Reads a value of one queue.
    pub(crate) fn vring_state(
        &self,
        request: ReadWrite<vhost_vring_state>,
        index: u16,
    ) -> io::Result<u32> {
        let index = u32::from(index);
        Ok(self
            .exchange(request, vhost_vring_state { index, num: 0 })?
            .num)
    }

    /// Sets a value of one queue or group.
    pub(crate) fn set_vring_state(
        &self,
        request: Write<vhost_vring_state>,
        index: u32,
        num: u32,
    ) -> io::Result<()> {
        self.write(request, &vhost_vring_state { index, num })
    }

    /// Binds an eventfd to one queue, or unbinds the bound one.
    pub(crate) fn set_vring_file(
        &self,
        request: Write<vhost_vring_file>,
        index: u16,
        eventfd: Option<&EventFd>,
    ) -> io::Result<()> {
        let file = vhost_vring_file {
            index: u32::from(index),
            fd: raw(eventfd),
        };
        self.write(request, &file)
    }

    pub(crate) fn set_config_call(&self, eventfd: Option<&EventFd>) -> io::Result<()> {
        self.write(uapi::set_config_call(), &raw(eventfd))
    }

    /// Reads device configuration. The caller has checked the bounds.
    pub(crate) fn config(&self, offset: u32, data: &mut [u8]) -> io::Result<()> {
        let mut buffer = config_buffer(offset, data)?;
        let (file, request) = (self.file()?, uapi::get_config().number());
        // SAFETY: there is no safe interface to ioctls. The kernel reads the
        // header, whose `len` is the number of bytes that follow it in
        // `buffer`, and writes that many there. `u8` has no invalid values,
        // and the kernel needs no alignment for its copies.
        check(unsafe { ioctl_with_mut_ptr(file, request, buffer.as_mut_ptr()) })?;
        data.copy_from_slice(&buffer[CONFIG_HEADER..]);
        Ok(())
    }

    /// Writes device configuration. The caller has checked the bounds.
    pub(crate) fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        let mut buffer = config_buffer(offset, data)?;
        let (file, request) = (self.file()?, uapi::set_config().number());
        // SAFETY: as for `config`, except that the kernel only reads.
        check(unsafe { ioctl_with_mut_ptr(file, request, buffer.as_mut_ptr()) })
    }
}

/// `struct vhost_vdpa_config` followed by a copy of `data`.
fn config_buffer(offset: u32, data: &[u8]) -> io::Result<Vec<u8>> {
    let len = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut buffer = Vec::with_capacity(CONFIG_HEADER + data.len());
    buffer.extend_from_slice(&offset.to_ne_bytes());
    buffer.extend_from_slice(&len.to_ne_bytes());
    buffer.extend_from_slice(data);
    Ok(buffer)
}
