//! KVM's statistics of a vCPU: `KVM_GET_STATS_FD` (Linux 5.14, `Documentation/virt/kvm/api.rst`,
//! 4.133).
//!
//! ```text
//!   0            header: sizes and offsets, 24 bytes
//!   id_offset    name of the object, name_size bytes
//!   desc_offset  one descriptor per statistic: 16 bytes and a name of name_size
//!   data_offset  the values, u64 each; a descriptor holds the offset of its own
//! ```
//! Owns the file descriptor and its format, which is checked before use. It must not know the
//! meaning of a number. The descriptor can be read at any time, even while the vCPU runs, but only
//! in the process that created the VM.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use kvm_bindings::{
    KVM_STATS_TYPE_CUMULATIVE, KVM_STATS_TYPE_MASK, kvm_stats_desc, kvm_stats_header,
};
use vmm_sys_util::ioctl::ioctl;

use crate::Error;

/// The request. In its own module because the macro writes no documentation.
mod request {
    #![allow(missing_docs, reason = "the macro writes no documentation")]
    use kvm_bindings::KVMIO;
    use vmm_sys_util::ioctl_io_nr;

    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}
use request::KVM_GET_STATS_FD;

const HEADER_SIZE: usize = size_of::<kvm_stats_header>();
const DESCRIPTOR_SIZE: usize = size_of::<kvm_stats_desc>();
/// More than any kernel has; limits the allocation.
const MAX_DESCRIPTORS: u32 = 4096;
const MAX_NAME_SIZE: u32 = 1024;

/// The statistics of one vCPU.
#[derive(Debug)]
pub struct Statistics {
    file: File,
    /// Name and position in the file of each cumulative counter.
    counters: Vec<(String, u64)>,
}

impl Statistics {
    /// Opens the statistics of a vCPU that does not run now; `None` on kernels without them.
    ///
    /// # Errors
    /// No descriptor is left, or the format is not the documented one.
    pub fn open(vcpu: &impl AsRawFd) -> Result<Option<Self>, Error> {
        let failed = |source: io::Error| Error::failed("KVM_GET_STATS_FD")(source);
        // SAFETY: needed because there is no safe interface to this ioctl. It has no argument, so
        // the kernel does not access our memory.
        let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::ENOTTY | libc::EINVAL) => Ok(None),
                _ => Err(failed(error)),
            };
        }
        // SAFETY: needed to have the descriptor closed. The ioctl has just created it for this
        // caller alone.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let counters = counters(&file).map_err(failed)?;
        Ok(Some(Self { file, counters }))
    }

    /// Returns all counters with their present values.
    ///
    /// # Errors
    /// The read failed.
    pub fn read(&self) -> Result<Vec<(String, u64)>, Error> {
        let value = |(name, position): &(String, u64)| {
            let mut bytes = [0; 8];
            self.file.read_exact_at(&mut bytes, *position)?;
            Ok((name.clone(), u64::from_ne_bytes(bytes)))
        };
        self.counters
            .iter()
            .map(value)
            .collect::<io::Result<_>>()
            .map_err(Error::failed("reading the vCPU's statistics"))
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the kernel's statistics have {what}"),
    )
}

/// The four bytes at `offset` of a structure that is long enough.
fn word(bytes: &[u8], offset: usize) -> u32 {
    let field = bytes.get(offset..offset + 4);
    field
        .and_then(|field| field.try_into().ok())
        .map_or(0, u32::from_ne_bytes)
}

/// Reads header and descriptors. Skips histograms and all values that are not plain counts.
fn counters(file: &impl FileExt) -> io::Result<Vec<(String, u64)>> {
    let mut header = [0; HEADER_SIZE];
    file.read_exact_at(&mut header, 0)?;
    let name_size = word(&header, offset_of!(kvm_stats_header, name_size));
    let count = word(&header, offset_of!(kvm_stats_header, num_desc));
    let descriptors = word(&header, offset_of!(kvm_stats_header, desc_offset));
    let data = word(&header, offset_of!(kvm_stats_header, data_offset));
    if count > MAX_DESCRIPTORS {
        return Err(malformed("too many descriptors"));
    }
    let name_len = usize::try_from(name_size)
        .ok()
        .filter(|_| name_size <= MAX_NAME_SIZE)
        .ok_or_else(|| malformed("too long names"))?;
    let mut descriptor = vec![0; DESCRIPTOR_SIZE + name_len];
    let mut counters = Vec::new();
    let mut position = u64::from(descriptors);
    for _ in 0..count {
        file.read_exact_at(&mut descriptor, position)?;
        position += u64::try_from(descriptor.len()).map_err(|_| malformed("too long names"))?;
        let (fields, name) = descriptor.split_at(DESCRIPTOR_SIZE);
        let kind = word(fields, offset_of!(kvm_stats_desc, flags)) & KVM_STATS_TYPE_MASK;
        let values = fields
            .get(offset_of!(kvm_stats_desc, size)..)
            .and_then(|rest| rest.first_chunk())
            .map_or(0, |size| u16::from_ne_bytes(*size));
        if kind != KVM_STATS_TYPE_CUMULATIVE || values != 1 {
            continue;
        }
        let end = name.iter().position(|byte| *byte == 0);
        let name = name.get(..end.unwrap_or(name.len())).unwrap_or_default();
        let offset = word(fields, offset_of!(kvm_stats_desc, offset));
        counters.push((
            String::from_utf8_lossy(name).into_owned(),
            u64::from(data) + u64::from(offset),
        ));
    }
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of the kernel's format in memory.
    struct Bytes(Vec<u8>);

    impl FileExt for Bytes {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let start = usize::try_from(offset).unwrap().min(self.0.len());
            let count = buffer.len().min(self.0.len() - start);
            buffer[..count].copy_from_slice(&self.0[start..start + count]);
            Ok(count)
        }
        fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
            unreachable!()
        }
    }

    const NAME: usize = 16;

    fn file(header: [u32; 6], descriptors: &[(u32, u16, u32, &str)]) -> Bytes {
        let mut bytes: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
        for (flags, size, offset, name) in descriptors {
            bytes.extend(flags.to_ne_bytes());
            bytes.extend(0i16.to_ne_bytes());
            bytes.extend(size.to_ne_bytes());
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(0u32.to_ne_bytes());
            let mut field = [0; NAME];
            field[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(field);
        }
        Bytes(bytes)
    }

    #[test]
    fn finds_plain_counters_only() {
        let header = [0, 16, 4, 24, 24, 1000];
        let file = file(
            header,
            &[
                (0, 1, 8, "exits"),
                (1, 1, 16, "guest_mode"),
                (4, 32, 24, "halt_hist"),
                (0x20, 1, 288, "a_name_of_16byte"),
            ],
        );
        assert_eq!(
            counters(&file).unwrap(),
            [
                ("exits".to_owned(), 1008),
                ("a_name_of_16byte".to_owned(), 1288)
            ]
        );
    }

    #[test]
    fn a_strange_format_is_an_error() {
        for header in [
            [0, 16, u32::MAX, 24, 24, 0],
            [0, u32::MAX, 1, 24, 24, 0],
            [0, 16, 2, 24, 24, 0],
            [0, 16, 1, 24, u32::MAX, 0],
        ] {
            let file = file(header, &[(0, 1, u32::MAX, "x")]);
            assert!(counters(&file).is_err(), "{header:?}");
        }
        assert!(counters(&Bytes(vec![0; 23])).is_err());
        let file = file([0, 16, 1, 24, 24, u32::MAX], &[(0, 1, u32::MAX, "x")]);
        assert_eq!(counters(&file).unwrap()[0].1, 2 * u64::from(u32::MAX));
    }
}
