//! ELF kernels (`vmlinux`) with a PVH entry point.
//!
//! Owns the reading of ELF headers and notes. An [`ElfKernel`] has passed all checks: every segment
//! is inside the file and, after [`ElfKernel::parse`], inside the given range. It must not know the
//! structures that the kernel gets at entry.
//!
//! The structures come from `linux-loader`, whose `Elf::load` is not used for three reasons. It
//! leaves the part of a segment beyond the file's content (BSS) as the previous boot left it. It
//! loses a PVH note when another note segment follows. Its errors name neither the segment nor the
//! missing amount.

use std::io::{Read, Seek, SeekFrom};

use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE};
use vdpa::memory::GuestMemory;
use vm_memory::{ByteValued, ReadVolatile};

use super::error::{damaged, no_room, too_low, unreadable};
use super::file::{self, CopyError};
use crate::Error;
use crate::layout::AddressRange;

/// `e_ident[EI_CLASS]`: 64-bit objects.
const ELFCLASS64: u8 = 2;
/// `e_ident[EI_DATA]`: little-endian.
const ELFDATA2LSB: u8 = 1;
/// `e_machine`: x86-64.
const EM_X86_64: u16 = 62;
/// More program headers than any kernel has (they have about five).
const PROGRAM_HEADERS_MAX: u16 = 128;
/// More bytes of notes than any kernel has (they have about 500).
const NOTES_MAX: u64 = 64 << 10;
/// Note type of the 32-bit PVH entry point (`XEN_ELFNOTE_PHYS32_ENTRY`).
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// A part of the file and its range in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    /// Range in the file; inside it.
    file: AddressRange,
    /// Range in guest-physical memory; at least as long as `file`.
    memory: AddressRange,
}

/// A checked ELF kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ElfKernel {
    segments: Vec<Segment>,
    /// The PVH entry point, inside a segment.
    pub(super) entry: u32,
    /// From the first to the last byte of all segments.
    pub(super) extent: AddressRange,
}

impl ElfKernel {
    /// Reads and checks the headers of a file of `len` bytes. The kernel must fit inside
    /// `loadable`.
    pub(super) fn parse<R: Read + Seek>(
        reader: &mut R,
        len: u64,
        loadable: AddressRange,
    ) -> Result<Self, Error> {
        let header: Elf64_Ehdr = read_at(reader, len, 0)?;
        check_header(&header)?;

        let mut segments = Vec::new();
        let mut entry = None;
        let mut total: u64 = 0;
        for index in 0..header.e_phnum {
            let offset = u64::from(index)
                .checked_mul(size_of::<Elf64_Phdr>() as u64)
                .and_then(|offset| header.e_phoff.checked_add(offset))
                .ok_or_else(|| damaged("its program headers lie outside any file"))?;
            let program: Elf64_Phdr = read_at(reader, len, offset)?;
            match program.p_type {
                PT_LOAD if program.p_memsz > 0 => {
                    let segment = check_segment(&program, len, loadable)?;
                    // Limits the work: overlapping segments could each be as large as RAM.
                    total = total.saturating_add(segment.memory.len);
                    segments.push(segment);
                }
                PT_NOTE if entry.is_none() => {
                    entry = find_pvh_note(&read_notes(reader, len, &program)?, program.p_align)?;
                }
                _ => {}
            }
        }
        let extent = extent(&segments).ok_or_else(|| damaged("it has nothing to load"))?;
        if total > loadable.len {
            return Err(no_room(total, extent.start, loadable.len));
        }
        let entry = entry.ok_or_else(|| {
            Error::unusable(
                "it is an ELF file without a PVH note: build the kernel with CONFIG_PVH=y or use \
                 its bzImage",
            )
        })?;
        let inside = |segment: &Segment| {
            segment.memory.overlaps(&AddressRange {
                start: u64::from(entry),
                len: 1,
            })
        };
        if !segments.iter().any(inside) {
            return Err(damaged("its PVH entry point lies outside of it"));
        }
        Ok(Self {
            segments,
            entry,
            extent,
        })
    }

    /// Reads the segments into memory.
    pub(super) fn load<R: ReadVolatile + Seek>(
        &self,
        reader: &mut R,
        memory: &GuestMemory,
    ) -> Result<(), CopyError> {
        // First the parts that the file does not fill: on a reboot the memory holds the previous
        // kernel's data. All of them before the content, so that a segment's tail cannot erase
        // another segment.
        for Segment { file, memory: to } in &self.segments {
            file::zero_guest(memory, to.start + file.len, to.len - file.len)
                .map_err(CopyError::Memory)?;
        }
        for Segment { file, memory: to } in &self.segments {
            reader
                .seek(SeekFrom::Start(file.start))
                .map_err(|error| CopyError::File(unreadable(error)))?;
            file::copy_to_guest(reader, memory, to.start, file.len)?;
        }
        Ok(())
    }
}

/// Reads a structure at `offset`, which must be inside the `len` bytes of the file.
fn read_at<T: ByteValued, R: Read + Seek>(
    reader: &mut R,
    len: u64,
    offset: u64,
) -> Result<T, Error> {
    let size = size_of::<T>() as u64;
    file::check_inside(offset, size, len)?;
    reader.seek(SeekFrom::Start(offset)).map_err(unreadable)?;
    T::read_exact_from(reader).map_err(unreadable)
}

fn check_header(header: &Elf64_Ehdr) -> Result<(), Error> {
    let [_, _, _, _, class, order, ..] = header.e_ident;
    if (class, order, header.e_machine) != (ELFCLASS64, ELFDATA2LSB, EM_X86_64) {
        return Err(Error::unusable("it is an ELF file, but not for x86-64"));
    }
    if usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>() {
        return Err(damaged("its program headers have an unknown size"));
    }
    if header.e_phnum > PROGRAM_HEADERS_MAX {
        return Err(damaged("it has too many program headers"));
    }
    Ok(())
}

/// Checks one PT_LOAD against the file and the memory.
fn check_segment(program: &Elf64_Phdr, len: u64, loadable: AddressRange) -> Result<Segment, Error> {
    if program.p_filesz > program.p_memsz {
        return Err(damaged("a segment is longer in the file than in memory"));
    }
    file::check_inside(program.p_offset, program.p_filesz, len)?;
    if program.p_paddr < loadable.start {
        return Err(too_low(program.p_paddr, loadable.start));
    }
    match program.p_paddr.checked_add(program.p_memsz) {
        Some(end) if end <= loadable.end() => Ok(Segment {
            file: AddressRange {
                start: program.p_offset,
                len: program.p_filesz,
            },
            memory: AddressRange {
                start: program.p_paddr,
                len: program.p_memsz,
            },
        }),
        _ => {
            let available = loadable.end().saturating_sub(program.p_paddr);
            Err(no_room(program.p_memsz, program.p_paddr, available))
        }
    }
}

/// From the first to the last address of the segments; `None` without segments.
fn extent(segments: &[Segment]) -> Option<AddressRange> {
    let start = segments.iter().map(|segment| segment.memory.start).min()?;
    let end = segments.iter().map(|segment| segment.memory.end()).max()?;
    Some(AddressRange {
        start,
        len: end - start,
    })
}

/// Reads a note segment; rejects one longer than [`NOTES_MAX`].
fn read_notes<R: Read + Seek>(
    reader: &mut R,
    len: u64,
    program: &Elf64_Phdr,
) -> Result<Vec<u8>, Error> {
    file::check_inside(program.p_offset, program.p_filesz, len)?;
    if program.p_filesz > NOTES_MAX {
        return Err(damaged("its notes are too long"));
    }
    reader
        .seek(SeekFrom::Start(program.p_offset))
        .map_err(unreadable)?;
    let mut notes = Vec::new();
    reader
        .by_ref()
        .take(program.p_filesz)
        .read_to_end(&mut notes)
        .map_err(unreadable)?;
    Ok(notes)
}

/// Searches a segment of notes for the PVH entry point. Each note is three 32-bit words (name
/// length, descriptor length, type), the name and the descriptor. Both are padded to `alignment`
/// (4, or 8 if the program header says so). A note that exceeds the segment ends the search.
fn find_pvh_note(notes: &[u8], alignment: u64) -> Result<Option<u32>, Error> {
    let alignment = if alignment == 8 { 8_usize } else { 4 };
    let word = |at: usize| {
        let bytes = notes.get(at..at.checked_add(4)?)?;
        bytes.try_into().ok().map(u32::from_le_bytes)
    };
    let mut at = 0_usize;
    let mut next = || {
        let name_len = usize::try_from(word(at)?).ok()?;
        let descriptor_len = usize::try_from(word(at.checked_add(4)?)?).ok()?;
        let kind = word(at.checked_add(8)?)?;
        let name_at = at.checked_add(12)?;
        let name = notes.get(name_at..name_at.checked_add(name_len)?)?;
        let descriptor_at = name_at
            .checked_add(name_len)?
            .checked_next_multiple_of(alignment)?;
        let descriptor = notes.get(descriptor_at..descriptor_at.checked_add(descriptor_len)?)?;
        at = descriptor_at
            .checked_add(descriptor_len)?
            .checked_next_multiple_of(alignment)?;
        Some((kind, name, descriptor))
    };
    while let Some((kind, name, descriptor)) = next() {
        if kind == XEN_ELFNOTE_PHYS32_ENTRY && name == b"Xen\0" {
            // The descriptor has the kernel's word size, 4 or 8 bytes.
            let address = match (
                <[u8; 4]>::try_from(descriptor),
                <[u8; 8]>::try_from(descriptor),
            ) {
                (Ok(word), _) => Some(u32::from_le_bytes(word)),
                (_, Ok(word)) => u32::try_from(u64::from_le_bytes(word)).ok(),
                _ => None,
            };
            return match address {
                Some(address) => Ok(Some(address)),
                None => Err(damaged("its PVH note holds no 32-bit address")),
            };
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
