//! Small bzImages, whole, truncated and hostile.

use std::io::Cursor;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::tests::{MIB, copy_refused, filled_ram, refused, sample_bzimage};

const LOADABLE: AddressRange = AddressRange {
    start: MIB,
    len: 63 * MIB,
};

fn parse(bytes: &[u8]) -> Result<BzImageKernel, Error> {
    BzImageKernel::parse(&mut Cursor::new(bytes), bytes.len() as u64, LOADABLE)
}

/// The sample with `bytes` at `at`.
fn patched(at: usize, bytes: &[u8]) -> Result<BzImageKernel, Error> {
    let mut image = sample_bzimage();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    parse(&image)
}

#[test]
fn loads_where_the_kernel_wants_it() {
    let image = sample_bzimage();
    let kernel = parse(&image).unwrap();
    assert_eq!(kernel.entry(), 16 * MIB + 0x200);
    assert_eq!(kernel.cmdline_max(), 2047);
    assert_eq!(kernel.initramfs_max(), 0x7fff_ffff);
    assert_eq!(kernel.extent.len, 8 * MIB);
    let (_, ram) = filled_ram(64 * MIB, 0xee);
    kernel
        .load(&mut Cursor::new(&image[..]), ram.memory())
        .unwrap();
    let mut bytes = [0; 0x401];
    ram.memory()
        .read_slice(&mut bytes, GuestAddress(16 * MIB))
        .unwrap();
    assert_eq!(bytes[..0x400], [0x90; 0x400]);
    assert_eq!(bytes[0x400], 0xee);
}

#[test]
fn data_behind_the_kernel_is_left_in_the_file() {
    let mut image = sample_bzimage();
    image.extend_from_slice(&[0x55; 100]);
    assert_eq!(parse(&image).unwrap().payload.len, 0x400);
}

#[test]
fn cut_at_any_length_it_is_an_error() {
    let image = sample_bzimage();
    // The last paragraph may be short by up to 15 bytes.
    for len in 0..image.len() - 15 {
        assert!(
            refused(parse(&image[..len])).contains("is truncated"),
            "cut to {len} bytes"
        );
    }
    assert!(parse(&image[..image.len() - 15]).is_ok());
}

#[test]
fn shrinking_between_check_and_load_is_an_error() {
    let image = sample_bzimage();
    let kernel = parse(&image).unwrap();
    let (_, ram) = filled_ram(64 * MIB, 0);
    for len in 0..image.len() {
        assert!(
            copy_refused(kernel.load(&mut Cursor::new(&image[..len]), ram.memory()))
                .contains("is truncated")
        );
    }
}

#[test]
fn refuses_hostile_headers() {
    // setup_sects: more than the file has.
    assert!(refused(patched(0x1f1, &[0xff])).contains("is truncated"));
    // syssize: more than the file has, nothing at all, nothing at the entry point.
    assert!(refused(patched(0x1f4, &[0xff; 4])).contains("is truncated"));
    for syssize in [0_u32, 1, 0x20] {
        assert!(refused(patched(0x1f4, &syssize.to_le_bytes())).contains("it is damaged"));
    }
    // An old protocol, no 64-bit entry, a zImage.
    for (at, bytes) in [(0x206, [0x0b, 2]), (0x236, [0, 0]), (0x211, [0, 0])] {
        assert!(refused(patched(at, &bytes)).contains("without a 64-bit entry point"));
    }
    // A header that ends before xloadflags: its byte counts as 0.
    assert!(refused(patched(0x201, &[0x10])).contains("without a 64-bit entry point"));
    // The alignment, the address, the size.
    for alignment in [0_u32, 3] {
        assert!(refused(patched(0x230, &alignment.to_le_bytes())).contains("it is damaged"));
    }
    assert!(refused(patched(0x258, &0_u64.to_le_bytes())).contains("its load address"));
    for address in [64 * MIB, 1 << 40, 0xffff_ffff_ffe0_0000] {
        assert!(refused(patched(0x258, &address.to_le_bytes())).contains("it does not fit"));
    }
    assert!(refused(patched(0x260, &[0xff; 4])).contains("it does not fit"));
    // An init_size below the file's size is ignored.
    let kernel = patched(0x260, &[0; 4]).unwrap();
    assert_eq!(kernel.extent.len, 0x400);
}

proptest! {
    /// After any change of the header: no panic, and an accepted kernel stays inside its memory.
    #[test]
    fn changed_headers_do_no_harm(
        changes in proptest::collection::vec((0x1f1usize..0x280, any::<u8>()), 1..8)
    ) {
        let mut image = sample_bzimage();
        for (at, byte) in changes {
            image[at] = byte;
        }
        if let Ok(kernel) = parse(&image) {
            prop_assert!(kernel.extent.start >= LOADABLE.start);
            prop_assert!(kernel.extent.end() <= LOADABLE.end());
            prop_assert!(kernel.payload.len <= kernel.extent.len);
            prop_assert!(kernel.payload.end() <= image.len() as u64);
        }
    }
}
