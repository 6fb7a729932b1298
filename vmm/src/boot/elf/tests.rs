//! Small ELF kernels, whole, truncated and hostile.

use std::io::Cursor;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::boot::tests::{MIB, copy_refused, filled_ram, refused, sample_elf};

const LOADABLE: AddressRange = AddressRange {
    start: MIB,
    len: 63 * MIB,
};

fn parse(bytes: &[u8]) -> Result<ElfKernel, Error> {
    ElfKernel::parse(&mut Cursor::new(bytes), bytes.len() as u64, LOADABLE)
}

/// The sample with `bytes` at `at`.
fn patched(at: usize, bytes: &[u8]) -> Result<ElfKernel, Error> {
    let mut elf = sample_elf();
    elf[at..at + bytes.len()].copy_from_slice(bytes);
    parse(&elf)
}

/// Offsets of fields of the sample's first program header (PT_LOAD).
mod load {
    pub(super) const OFFSET: usize = 64 + 8;
    pub(super) const PADDR: usize = 64 + 24;
    pub(super) const FILESZ: usize = 64 + 32;
    pub(super) const MEMSZ: usize = 64 + 40;
}
/// Offset of the file size in the second program header (PT_NOTE).
const NOTE_FILESZ: usize = 64 + 56 + 32;

#[test]
fn loads_segments_and_clears_the_rest() {
    let elf = sample_elf();
    let kernel = parse(&elf).unwrap();
    assert_eq!(kernel.entry, 0x100_0008);
    assert_eq!(
        kernel.extent,
        AddressRange {
            start: 16 * MIB,
            len: 0x3000
        }
    );
    let (_, ram) = filled_ram(64 * MIB, 0xee);
    kernel
        .load(&mut Cursor::new(&elf[..]), ram.memory())
        .unwrap();
    let mut bytes = [0; 0x3001];
    ram.memory()
        .read_slice(&mut bytes, GuestAddress(16 * MIB))
        .unwrap();
    assert_eq!(bytes[..32], [0x90; 32]);
    assert!(bytes[32..0x3000].iter().all(|byte| *byte == 0));
    assert_eq!(bytes[0x3000], 0xee);
}

#[test]
fn cut_at_any_length_it_is_an_error() {
    let elf = sample_elf();
    for len in 0..elf.len() {
        assert!(
            refused(parse(&elf[..len])).contains("is truncated"),
            "cut to {len} bytes"
        );
    }
}

#[test]
fn shrinking_between_check_and_load_is_an_error() {
    let elf = sample_elf();
    let kernel = parse(&elf).unwrap();
    let (_, ram) = filled_ram(64 * MIB, 0);
    for len in 0..elf.len() {
        let result = kernel.load(&mut Cursor::new(&elf[..len]), ram.memory());
        // The content of the only segment is at the end of the sample.
        assert!(copy_refused(result).contains("is truncated"));
    }
}

#[test]
fn refuses_hostile_headers() {
    let wrap = (u64::MAX - 8).to_le_bytes();
    let huge = (1_u64 << 40).to_le_bytes();
    // e_phoff wraps.
    assert!(refused(patched(32, &u64::MAX.to_le_bytes())).contains("is truncated"));
    assert!(patched(32, &(u64::MAX - 56).to_le_bytes()).is_err());
    // e_phnum, e_phentsize.
    assert!(refused(patched(56, &[0xff, 0xff])).contains("it is damaged"));
    assert!(refused(patched(54, &[57, 0])).contains("it is damaged"));
    assert!(refused(patched(56, &[0, 0])).contains("it is damaged"));
    // Another class, another byte order, another machine.
    for (at, byte) in [(4, 1), (5, 2), (18, 183)] {
        assert!(refused(patched(at, &[byte])).contains("not for x86-64"));
    }
    // The segment's offset in the file.
    for offset in [wrap, huge, u64::MAX.to_le_bytes()] {
        assert!(refused(patched(load::OFFSET, &offset)).contains("is truncated"));
    }
    // Its sizes.
    assert!(refused(patched(load::FILESZ, &wrap)).contains("it is damaged"));
    for memsz in [wrap, huge, (48 * MIB + 1).to_le_bytes()] {
        assert!(refused(patched(load::MEMSZ, &memsz)).contains("it does not fit"));
    }
    // Its address in memory: below 1 MiB, beyond RAM, wrapping.
    assert!(refused(patched(load::PADDR, &0x7000_u64.to_le_bytes())).contains("its load address"));
    for paddr in [(64 * MIB).to_le_bytes(), wrap, u64::MAX.to_le_bytes()] {
        assert!(refused(patched(load::PADDR, &paddr)).contains("it does not fit"));
    }
    // The notes.
    assert!(refused(patched(NOTE_FILESZ, &wrap)).contains("is truncated"));
    assert!(refused(patched(NOTE_FILESZ, &0_u64.to_le_bytes())).contains("without a PVH note"));
}

#[test]
fn many_segments_cannot_make_more_work_than_memory() {
    let mut elf = sample_elf();
    let segment = elf[64..120].to_vec();
    // 100 copies of a segment of 40 MiB after the content.
    let table = elf.len() as u64;
    for _ in 0..100 {
        let at = elf.len();
        elf.extend_from_slice(&segment);
        elf[at + 40..at + 48].copy_from_slice(&(40 * MIB).to_le_bytes());
    }
    elf[32..40].copy_from_slice(&table.to_le_bytes());
    elf[56..58].copy_from_slice(&100_u16.to_le_bytes());
    assert!(refused(parse(&elf)).contains("it does not fit"));
}

/// One note, padded to 4 bytes.
fn note(name: &[u8], descriptor: &[u8], kind: u32) -> Vec<u8> {
    let mut note = Vec::new();
    for word in [
        u32::try_from(name.len()).unwrap(),
        u32::try_from(descriptor.len()).unwrap(),
        kind,
    ] {
        note.extend_from_slice(&word.to_le_bytes());
    }
    for part in [name, descriptor] {
        note.extend_from_slice(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

#[test]
fn finds_the_pvh_note_among_others() {
    let entry = 0x123_4560_u32;
    let mut notes = note(b"GNU\0", &[1; 20], 3);
    notes.extend(note(b"Xen\0", b"linux\0", 6));
    notes.extend(note(b"Linux\0", &entry.to_le_bytes(), 18));
    assert_eq!(find_pvh_note(&notes, 4).unwrap(), None);
    notes.extend(note(b"Xen\0", &entry.to_le_bytes(), 18));
    assert_eq!(find_pvh_note(&notes, 4).unwrap(), Some(entry));
    // With the kernel's word size, and truncated anywhere.
    let long = note(b"Xen\0", &u64::from(entry).to_le_bytes(), 18);
    assert_eq!(find_pvh_note(&long, 4).unwrap(), Some(entry));
    for len in 0..long.len() {
        assert_eq!(find_pvh_note(&long[..len], 4).unwrap(), None);
    }
    for descriptor in [&[][..], &[1, 2], &[0xff; 8]] {
        assert!(find_pvh_note(&note(b"Xen\0", descriptor, 18), 4).is_err());
    }
}

#[test]
fn keeps_the_note_of_the_first_of_two_note_segments() {
    let mut elf = sample_elf();
    // A third program header: notes of length 0.
    let mut third = elf[120..176].to_vec();
    third[32..40].copy_from_slice(&0_u64.to_le_bytes());
    let table = elf.len() as u64;
    let both = elf[64..176].to_vec();
    elf.extend(both);
    elf.extend(third);
    elf[32..40].copy_from_slice(&table.to_le_bytes());
    elf[56..58].copy_from_slice(&3_u16.to_le_bytes());
    assert_eq!(parse(&elf).unwrap().entry, 0x100_0008);
}

#[test]
fn an_entry_outside_of_the_kernel_is_refused() {
    let mut elf = sample_elf();
    let at = elf
        .windows(4)
        .position(|word| word == [8, 0, 0, 1])
        .unwrap();
    elf[at..at + 4].copy_from_slice(&0xffff_fff0_u32.to_le_bytes());
    assert!(refused(parse(&elf)).contains("it is damaged"));
}

proptest! {
    #[test]
    fn arbitrary_notes_do_no_harm(
        notes in proptest::collection::vec(any::<u8>(), 0..256),
        alignment: u64,
    ) {
        let _ = find_pvh_note(&notes, alignment);
    }

    /// After any change of the headers: no panic, and an accepted kernel stays inside its memory.
    #[test]
    fn changed_headers_do_no_harm(
        changes in proptest::collection::vec((0usize..256, any::<u8>()), 1..8),
    ) {
        let mut elf = sample_elf();
        for (at, byte) in changes {
            let len = elf.len();
            elf[at % len] = byte;
        }
        if let Ok(kernel) = parse(&elf) {
            prop_assert!(kernel.extent.start >= LOADABLE.start);
            prop_assert!(kernel.extent.end() <= LOADABLE.end());
            let (_, ram) = filled_ram(64 * MIB, 0);
            kernel.load(&mut Cursor::new(&elf[..]), ram.memory()).unwrap();
        }
    }
}
