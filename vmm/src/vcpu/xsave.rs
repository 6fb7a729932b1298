//! The XSAVE area of a vCPU (x87, SSE, AVX and the processor's other components):
//! `struct kvm_xsave`. Its length depends on the host (KVM_CAP_XSAVE2, Linux 5.17).
//!
//! Owns the lengths. The processor defines the area's content (Intel SDM volume 1, 13.4), and KVM
//! checks its header.

use kvm_bindings::Xsave;
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use crate::Error;

/// Bytes of an area on every host; `struct kvm_xsave` without its flexible end.
pub(super) const MIN_LEN: usize = 4096;
/// More than any processor needs (with AMX it is 11 KiB).
pub(super) const MAX_LEN: usize = 64 * 1024;

/// The header field with the components that differ from power-on (Intel SDM volume 1, 13.4.2).
const XSTATE_BV: std::ops::Range<usize> = 512..520;
/// Components of every processor.
const X87_SSE: u64 = 3;

/// Size of an area on this host: a multiple of 4.
pub(super) fn len(vm: &VmFd) -> Result<usize, Error> {
    let said = vm.check_extension_int(Cap::Xsave2);
    match usize::try_from(said).unwrap_or(0) {
        0 => Ok(MIN_LEN),
        len if len <= MAX_LEN => Ok(len.max(MIN_LEN).next_multiple_of(4)),
        _ => {
            let source = std::io::Error::other(format!("an XSAVE area of {said} bytes"));
            Err(Error::failed("KVM_CHECK_EXTENSION(KVM_CAP_XSAVE2)")(source))
        }
    }
}

/// Checks that [`write`] can write the area on a host with areas of `here` bytes.
pub(super) fn check(area: &[u8], here: usize) -> Result<(), Error> {
    if !(MIN_LEN..=MAX_LEN).contains(&area.len()) || !area.len().is_multiple_of(4) {
        return Err(Error::host(format!(
            "an XSAVE area of {} bytes: must be a multiple of 4 from 4096 to 65536",
            area.len()
        )));
    }
    match area.iter().rposition(|byte| *byte != 0) {
        Some(last) if last >= here => Err(Error::host(format!(
            "the guest uses an XSAVE area of {} bytes, but this host has {here}: its processor \
             lacks a feature that the guest has used",
            last + 1
        ))),
        _ => Ok(()),
    }
}

/// Reads the area, `len` bytes as [`len`] returned.
pub(super) fn read(fd: &VcpuFd, len: usize) -> Result<Vec<u8>, Error> {
    let mut area = buffer(&[], len)?;
    if len == MIN_LEN {
        // Fails where the area is longer, and works on kernels without KVM_GET_XSAVE2.
        let short = fd.get_xsave().map_err(Error::failed("KVM_GET_XSAVE"))?;
        return Ok(to_bytes(&short.region));
    }
    // SAFETY: needed because the kernel writes as many bytes as it reported for KVM_CAP_XSAVE2,
    // which the function cannot check. The buffer has that length, and this process never enables a
    // feature that would lengthen it (AMX, by arch_prctl).
    unsafe { fd.get_xsave2(&mut area) }.map_err(Error::failed("KVM_GET_XSAVE2"))?;
    let mut bytes = to_bytes(&area.as_fam_struct_ref().xsave.region);
    bytes.extend(to_bytes(area.as_slice()));
    Ok(bytes)
}

/// Marks all components that a guest with `xcr0` cannot have as in their power-on state. Before
/// Linux 6.6, KVM may mark protection keys as present, and a host without them would reject the
/// area.
pub(super) fn within(mut area: Vec<u8>, xcr0: u64) -> Vec<u8> {
    if let Some(there) = area.get_mut(XSTATE_BV) {
        let parts = (xcr0 | X87_SSE).to_le_bytes();
        for (byte, own) in there.iter_mut().zip(parts) {
            *byte &= own;
        }
    }
    area
}

/// Writes an area that [`check`] has passed for `len`, padded with zeros if it is shorter.
pub(super) fn write(fd: &VcpuFd, area: &[u8], len: usize) -> Result<(), Error> {
    let area = buffer(area, len)?;
    // SAFETY: needed because the kernel reads as many bytes as it reported for KVM_CAP_XSAVE2,
    // which the function cannot check. The buffer has that length, and this process never enables a
    // feature that would lengthen it (AMX, by arch_prctl).
    unsafe { fd.set_xsave2(&area) }.map_err(Error::failed("KVM_SET_XSAVE"))
}

/// A structure of `len` bytes (and its length before them) that begins with `bytes`.
fn buffer(bytes: &[u8], len: usize) -> Result<Xsave, Error> {
    let mut words = bytes.chunks_exact(4).map(|word| {
        let mut value = [0; 4];
        value.copy_from_slice(word);
        u32::from_le_bytes(value)
    });
    let extra = len.saturating_sub(MIN_LEN) / 4;
    let mut area = Xsave::new(extra)
        .map_err(std::io::Error::other)
        .map_err(Error::failed("KVM_GET_XSAVE2"))?;
    // SAFETY: needed because there is no other way to write the fixed part. The length of the
    // flexible part, which must not change, is another field.
    let fixed = unsafe { area.as_mut_fam_struct() };
    for (to, from) in fixed.xsave.region.iter_mut().zip(&mut words) {
        *to = from;
    }
    for (to, from) in area.as_mut_slice().iter_mut().zip(&mut words) {
        *to = from;
    }
    Ok(area)
}

fn to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        for length in [0, 1, 4095, 4097, 4098, MAX_LEN + 4] {
            let error = check(&vec![0; length], MIN_LEN).unwrap_err().to_string();
            assert!(
                error.contains(&format!("of {length} bytes: must be")),
                "{error}"
            );
        }
        let mut area = vec![0; MIN_LEN + 8];
        check(&area, MIN_LEN).unwrap();
        area[MIN_LEN - 1] = 1;
        check(&area, MIN_LEN).unwrap();
        area[MIN_LEN] = 1;
        let error = check(&area, MIN_LEN).unwrap_err().to_string();
        assert!(
            error.contains("of 4097 bytes, but this host has 4096"),
            "{error}"
        );
        check(&area, MIN_LEN + 4).unwrap();
    }

    #[test]
    fn parts_that_the_guest_cannot_have_are_not_reported() {
        let mut area = vec![0xff; MIN_LEN];
        area[XSTATE_BV].copy_from_slice(&0x2e7_u64.to_le_bytes());
        for (xcr0, left) in [
            (0_u64, 3),
            (7, 7),
            (0xe7, 0xe7),
            (0x2e7, 0x2e7),
            (u64::MAX, 0x2e7),
        ] {
            let within = within(area.clone(), xcr0);
            let said: [u8; 8] = within[XSTATE_BV].try_into().unwrap();
            assert_eq!(u64::from_le_bytes(said), left, "{xcr0:#x}");
            assert!(within[..512] == area[..512] && within[520..] == area[520..]);
        }
        assert_eq!(within(vec![1], 0), [1]);
    }

    #[test]
    fn a_buffer_is_as_long_as_asked_and_zero_behind_the_bytes() {
        let bytes: Vec<u8> = (0..MIN_LEN + 8)
            .map(|n| u8::try_from(n % 251).unwrap())
            .collect();
        for len in [MIN_LEN, MIN_LEN + 4, MIN_LEN + 8, MIN_LEN + 16] {
            let area = buffer(&bytes, len).unwrap();
            let mut back = to_bytes(&area.as_fam_struct_ref().xsave.region);
            back.extend(to_bytes(area.as_slice()));
            assert_eq!(back.len(), len);
            let common = len.min(bytes.len());
            assert_eq!(back[..common], bytes[..common]);
            assert!(back[common..].iter().all(|byte| *byte == 0));
        }
    }
}
