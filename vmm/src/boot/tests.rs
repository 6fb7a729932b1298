//! Whole boots from files, and the synthetic kernels that other tests share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use linux_loader::bootparam::boot_params;
use linux_loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};

use super::*;
use crate::layout::{ACPI_TABLES, BOOT_PAGE_TABLES, HIGH_RAM_START, PAGE_SIZE};
use crate::memory::GuestRam;
use vdpa::causes::in_one_line;

pub(super) const MIB: u64 = 1 << 20;

/// The text of the error; empty on success.
pub(super) fn refused<T>(outcome: Result<T, Error>) -> String {
    outcome
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

/// The same for a copy into memory.
pub(super) fn copy_refused(outcome: Result<(), file::CopyError>) -> String {
    match outcome {
        Err(file::CopyError::File(error)) => error.to_string(),
        other => format!("{other:?}"),
    }
}

/// RAM of `size` bytes; the ranges that a boot touches are filled with `byte` first, as if another
/// system had run before.
pub(super) fn filled_ram(size: u64, byte: u8) -> (Layout, GuestRam) {
    let layout = Layout::new(size, 40).unwrap();
    let ram = GuestRam::new(&layout, None).unwrap();
    if byte != 0 {
        for (start, len) in [(0, HIGH_RAM_START), (16 * MIB, MIB), (size - MIB, MIB)] {
            let bytes = vec![byte; usize::try_from(len).unwrap()];
            ram.memory()
                .write_slice(&bytes, GuestAddress(start))
                .unwrap();
        }
    }
    (layout, ram)
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A PVH kernel: 32 bytes of code at 16 MiB with 12,256 bytes of BSS.
///
/// ```text
///   0    ELF header      64   PT_LOAD      120  PT_NOTE
///   176  note (20 bytes)      196  code (32 bytes)
/// ```
pub(super) fn sample_elf() -> Vec<u8> {
    let mut elf = vec![0; 228];
    put(&mut elf, 0, b"\x7fELF\x02\x01\x01");
    put(&mut elf, 16, &2_u16.to_le_bytes());
    put(&mut elf, 18, &62_u16.to_le_bytes());
    put(&mut elf, 24, &(16 * MIB).to_le_bytes());
    put(&mut elf, 32, &64_u64.to_le_bytes());
    put(&mut elf, 54, &56_u16.to_le_bytes());
    put(&mut elf, 56, &2_u16.to_le_bytes());
    for (at, kind, offset, filesz, memsz) in [
        (64, 1_u32, 196_u64, 32_u64, 0x3000_u64),
        (120, 4, 176, 20, 20),
    ] {
        put(&mut elf, at, &kind.to_le_bytes());
        put(&mut elf, at + 8, &offset.to_le_bytes());
        put(&mut elf, at + 24, &(16 * MIB).to_le_bytes());
        put(&mut elf, at + 32, &filesz.to_le_bytes());
        put(&mut elf, at + 40, &memsz.to_le_bytes());
        put(&mut elf, at + 48, &4_u64.to_le_bytes());
    }
    put(&mut elf, 176, &[4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
    put(&mut elf, 188, b"Xen\0");
    put(&mut elf, 192, &0x100_0008_u32.to_le_bytes());
    put(&mut elf, 196, &[0x90; 32]);
    elf
}

/// A bzImage with one setup sector and 1 KiB of code for 16 MiB, which needs 8 MiB to decompress
/// itself.
pub(super) fn sample_bzimage() -> Vec<u8> {
    let mut image = vec![0; 0x400 + 0x400];
    put(&mut image, 0, b"MZ");
    put(&mut image, 0x1f1, &[1]);
    put(&mut image, 0x1f4, &0x40_u32.to_le_bytes());
    put(&mut image, 0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x20f_u16.to_le_bytes());
    put(&mut image, 0x211, &[1]);
    put(&mut image, 0x214, &0x10_0000_u32.to_le_bytes());
    put(&mut image, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut image, 0x230, &0x20_0000_u32.to_le_bytes());
    put(&mut image, 0x234, &[1, 21]);
    put(&mut image, 0x236, &0x3_u16.to_le_bytes());
    put(&mut image, 0x238, &2047_u32.to_le_bytes());
    put(&mut image, 0x250, &0xdead_0000_u64.to_le_bytes());
    put(&mut image, 0x258, &(16 * MIB).to_le_bytes());
    put(&mut image, 0x260, &0x80_0000_u32.to_le_bytes());
    put(&mut image, 0x400, &[0x90; 0x400]);
    image
}

/// A directory of its own for one test, removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let path = std::env::temp_dir().join(format!(
            "bellhop-boot-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn boot_error(kernel: &Path, initramfs: Option<&Path>, cmdline: &str) -> String {
    let (layout, ram) = filled_ram(64 * MIB, 0);
    let source = BootSource {
        kernel,
        initramfs,
        cmdline,
    };
    let error = in_one_line(&load(ram.memory(), &layout, &source).unwrap_err());
    let checked = check(layout.ram_size(), &source).unwrap_err();
    assert_eq!(in_one_line(&checked), error);
    error
}

fn c_string(ram: &GuestRam, address: u64) -> Vec<u8> {
    (address..)
        .map(|at| ram.memory().read_obj::<u8>(GuestAddress(at)).unwrap())
        .take_while(|byte| *byte != 0)
        .collect()
}

#[test]
fn pvh_start_info_names_everything_and_a_second_boot_is_the_same() {
    let directory = Directory::new();
    let kernel = directory.file("vmlinux", &sample_elf());
    let initramfs = directory.file("initramfs", &[0x42; 5000]);
    // The second boot finds used memory with a longer command line.
    let (layout, ram) = filled_ram(64 * MIB, 0xee);
    for _ in 0..2 {
        let source = BootSource {
            kernel: &kernel,
            initramfs: Some(&initramfs),
            cmdline: "console=ttyS0 quiet",
        };
        check(layout.ram_size(), &source).unwrap();
        let booted = load(ram.memory(), &layout, &source).unwrap();
        assert_eq!(
            booted.entry,
            EntryPoint::Pvh {
                entry: 0x100_0008,
                start_info: BOOT_PVH_START_INFO
            }
        );
        let info: hvm_start_info = ram
            .memory()
            .read_obj(GuestAddress(BOOT_PVH_START_INFO))
            .unwrap();
        assert_eq!((info.magic, info.version, info.flags), (0x336e_c578, 1, 0));
        assert_eq!(info.rsdp_paddr, ACPI_TABLES);
        assert_eq!(c_string(&ram, info.cmdline_paddr), b"console=ttyS0 quiet");
        assert_eq!(info.nr_modules, 1);
        let module: hvm_modlist_entry = ram
            .memory()
            .read_obj(GuestAddress(info.modlist_paddr))
            .unwrap();
        let place = booted.initramfs.unwrap();
        assert_eq!((module.paddr, module.size), (place.start, 5000));
        assert_eq!(place.start, 64 * MIB - 2 * PAGE_SIZE);
        let mut content = vec![0; 5000];
        ram.memory()
            .read_slice(&mut content, GuestAddress(place.start))
            .unwrap();
        assert_eq!(content, [0x42; 5000]);
        for (index, expected) in layout.memory_map().into_iter().enumerate() {
            let entry: hvm_memmap_table_entry = ram
                .memory()
                .read_obj(GuestAddress(info.memmap_paddr + 24 * index as u64))
                .unwrap();
            assert_eq!(
                (entry.addr, entry.size, entry.type_),
                (
                    expected.range.start,
                    expected.range.len,
                    expected.kind.code()
                )
            );
        }
        assert_eq!(
            usize::try_from(info.memmap_entries).unwrap(),
            layout.memory_map().len()
        );
        let bss: u64 = ram
            .memory()
            .read_obj(GuestAddress(16 * MIB + 0x2000))
            .unwrap();
        assert_eq!(bss, 0);
        ram.memory()
            .write_slice(&[0xee; 0x1000], GuestAddress(16 * MIB + 0x2000))
            .unwrap();
    }
}

#[test]
fn zero_page_is_the_kernels_header_completed() {
    let directory = Directory::new();
    let mut image = sample_bzimage();
    put(&mut image, 0x22c, &0x27f_ffff_u32.to_le_bytes());
    let kernel = directory.file("vmlinuz", &image);
    let initramfs = directory.file("initramfs", &[0x42; 5000]);
    let (layout, ram) = filled_ram(64 * MIB, 0xee);
    let source = BootSource {
        kernel: &kernel,
        initramfs: Some(&initramfs),
        cmdline: "quiet",
    };
    let booted = load(ram.memory(), &layout, &source).unwrap();
    assert_eq!(
        booted.entry,
        EntryPoint::Linux64 {
            entry: 16 * MIB + 0x200,
            zero_page: BOOT_ZERO_PAGE
        }
    );
    let params: boot_params = ram.memory().read_obj(GuestAddress(BOOT_ZERO_PAGE)).unwrap();
    assert_eq!({ params.hdr.header }, 0x5372_6448);
    assert_eq!(params.hdr.type_of_loader, 0xff);
    assert_eq!(params.sentinel, 0);
    assert_eq!({ params.acpi_rsdp_addr }, ACPI_TABLES);
    assert_eq!({ params.hdr.setup_data }, 0, "not from the file");
    assert_eq!(c_string(&ram, u64::from(params.hdr.cmd_line_ptr)), b"quiet");
    let place = booted.initramfs.unwrap();
    // Not above the header's limit, although there is more RAM.
    assert_eq!(place.start, 40 * MIB - 2 * PAGE_SIZE);
    assert_eq!(u64::from(params.hdr.ramdisk_image), place.start);
    assert_eq!({ params.hdr.ramdisk_size }, 5000);
    let map = layout.memory_map();
    assert_eq!(usize::from(params.e820_entries), map.len());
    let table = params.e820_table;
    for (entry, expected) in table.iter().zip(map) {
        assert_eq!(
            ({ entry.addr }, { entry.size }, { entry.r#type }),
            (
                expected.range.start,
                expected.range.len,
                expected.kind.code()
            )
        );
    }
}

/// Walks the page tables like the processor.
fn translate(ram: &GuestRam, address: u64) -> Option<u64> {
    let mut table = BOOT_PAGE_TABLES;
    for (shift, leaf) in [(39, false), (30, false), (21, true)] {
        let index = (address >> shift) & 511;
        let entry: u64 = ram
            .memory()
            .read_obj(GuestAddress(table + index * 8))
            .unwrap();
        if entry & 1 == 0 {
            return None;
        }
        assert_eq!(entry & (1 << 7) != 0, leaf);
        assert_eq!(entry & 0b10, 0b10);
        table = entry & 0x000f_ffff_ffff_f000;
    }
    Some(table | (address & 0x1f_ffff))
}

#[test]
fn page_tables_map_4_gib_to_itself_and_no_more() {
    let (_, ram) = filled_ram(64 * MIB, 0xee);
    linux64::write_page_tables(ram.memory()).unwrap();
    for address in (0..4 << 30).step_by(1 << 20) {
        assert_eq!(translate(&ram, address + 7), Some(address + 7));
    }
    for address in [4_u64 << 30, 511 << 30, 1 << 39, 511 << 39] {
        assert_eq!(translate(&ram, address), None);
    }
}

#[test]
fn wrong_files_are_named() {
    let directory = Directory::new();
    let good = directory.file("vmlinux", &sample_elf());
    let path = |name: &str| directory.0.join(name);
    for (file, expected) in [
        (path("nothing"), "cannot open it: No such file"),
        (directory.0.clone(), "is a directory"),
        (PathBuf::from("/dev/null"), "is not a regular file"),
        (directory.file("empty", b""), "is empty"),
        (directory.file("gzip", &[0x1f, 0x8b, 8, 0]), "but gzip data"),
        (
            directory.file("text", b"hello"),
            "unknown data that begins with 68 65 6c 6c",
        ),
        (directory.file("cut", &sample_elf()[..100]), "is truncated"),
        (
            directory.file("cut-bz", &sample_bzimage()[..0x500]),
            "is truncated",
        ),
    ] {
        let text = boot_error(&file, None, "");
        let start = format!("cannot boot the kernel {}: ", file.display());
        assert!(
            text.starts_with(&start) && text.contains(expected),
            "{text}"
        );
    }
    for (file, expected) in [
        (path("nothing"), "cannot open it: No such file"),
        (directory.0.clone(), "is a directory"),
        (directory.file("empty", b""), "is empty"),
    ] {
        let text = boot_error(&good, Some(&file), "");
        let start = format!("cannot use the initramfs {}: ", file.display());
        assert!(
            text.starts_with(&start) && text.contains(expected),
            "{text}"
        );
    }
}

#[test]
fn an_elf_without_the_note_is_refused_with_a_remedy() {
    let directory = Directory::new();
    let mut elf = sample_elf();
    put(&mut elf, 184, &[17]);
    let text = boot_error(&directory.file("vmlinux", &elf), None, "");
    assert!(
        text.contains("without a PVH note") && text.contains("CONFIG_PVH=y"),
        "{text}"
    );
}

#[test]
fn an_initramfs_larger_than_memory_is_refused_unread() {
    let directory = Directory::new();
    let kernel = directory.file("vmlinux", &sample_elf());
    let initramfs = directory.file("initramfs", b"");
    let file = File::options().write(true).open(&initramfs).unwrap();
    for len in [100 * MIB, 1 << 42] {
        file.set_len(len).unwrap();
        let text = boot_error(&kernel, Some(&initramfs), "");
        assert!(
            text.contains("does not fit") && text.contains("64 MiB of memory"),
            "{text}"
        );
    }
}

#[test]
fn a_pipe_does_not_block() {
    let directory = Directory::new();
    let path = directory.0.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert!(boot_error(&path, None, "").contains("is not a regular file"));
}

#[test]
fn the_command_line_is_bounded_by_the_kernel_and_by_us() {
    let directory = Directory::new();
    let elf = directory.file("vmlinux", &sample_elf());
    let mut greedy = sample_bzimage();
    put(&mut greedy, 0x238, &[0xff; 4]);
    let greedy = directory.file("vmlinuz", &greedy);
    let (layout, ram) = filled_ram(64 * MIB, 0xee);
    for (kernel, max) in [(&elf, 2047), (&greedy, 0xffff)] {
        let cmdline = "x".repeat(max);
        let source = BootSource {
            kernel,
            initramfs: None,
            cmdline: &cmdline,
        };
        load(ram.memory(), &layout, &source).unwrap();
        assert_eq!(c_string(&ram, BOOT_CMDLINE).len(), max);
        let text = boot_error(kernel, None, &"x".repeat(max + 1));
        assert_eq!(
            text,
            format!(
                "the kernel command line has {} bytes, but this kernel takes up to {max}",
                max + 1
            )
        );
    }
    assert!(boot_error(&elf, None, "a\0b").contains("NUL byte at position 1"));
}
