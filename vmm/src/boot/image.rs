//! Identifies a file by its first bytes.
//!
//! Owns the magic numbers. Bellhop boots an ELF or a bzImage. It knows the others only to name them
//! in the error, because a wrong file is most often one of these.

use std::fmt;

/// Bytes from the start of a file that [`Magic::of`] needs.
pub(super) const PROBE_LEN: usize = 0x208;

/// Type of a file according to its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Magic {
    /// An ELF file: a `vmlinux`, if it has a PVH note.
    Elf,
    /// A Linux boot image for x86 (`vmlinuz`).
    BzImage,
    /// A known type that does not boot.
    Known(&'static str),
    /// An unknown type that begins with these bytes.
    Unknown([u8; 4]),
}

impl fmt::Display for Magic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elf => f.write_str("an ELF file"),
            Self::BzImage => f.write_str("a bzImage"),
            Self::Known(name) => f.write_str(name),
            Self::Unknown([a, b, c, d]) => {
                write!(
                    f,
                    "unknown data that begins with {a:02x} {b:02x} {c:02x} {d:02x}"
                )
            }
        }
    }
}

/// Offset, bytes, name. The first match counts, so longer and more specific ones come first.
const KNOWN: &[(usize, &[u8], &str)] = &[
    (
        0x38,
        b"ARM\x64",
        "an arm64 kernel Image; this host runs x86-64 guests",
    ),
    (
        0x38,
        b"RSC\x05",
        "a RISC-V kernel Image; this host runs x86-64 guests",
    ),
    (
        4,
        b"zimg",
        "a compressed EFI kernel image (zboot) of another architecture",
    ),
    (0, b"\x1f\x8b", "gzip data; unpack it first"),
    (0, b"\xfd7zXZ\0", "xz data; unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "zstd data; unpack it first"),
    (0, b"BZh", "bzip2 data; unpack it first"),
    (0, b"\x02\x21\x4c\x18", "lz4 data; unpack it first"),
    (0, b"\x04\x22\x4d\x18", "lz4 data; unpack it first"),
    (0, b"\x5d\0\0", "lzma data; unpack it first"),
    (0, b"\x27\x05\x19\x56", "a U-Boot uImage"),
    (0, b"\xd0\x0d\xfe\xed", "a device tree or FIT image"),
    (0, b"070701", "a cpio archive; is it the initramfs?"),
    (0, b"070702", "a cpio archive; is it the initramfs?"),
    (0, b"QFI\xfb", "a qcow2 disk image"),
    (0, b"hsqs", "a squashfs image"),
    (
        0,
        b"!<arch>",
        "a Debian package or ar archive; unpack it first",
    ),
    (0, b"\xed\xab\xee\xdb", "an RPM package; unpack it first"),
    (0, b"#!", "a script"),
    (0, b"MZ", "an EFI program, not a Linux kernel"),
];

impl Magic {
    /// Identifies a file by its start, at most [`PROBE_LEN`] bytes.
    pub(super) fn of(start: &[u8]) -> Self {
        let has = |offset: usize, magic: &[u8]| {
            start
                .get(offset..)
                .is_some_and(|rest| rest.starts_with(magic))
        };
        if has(0, b"\x7fELF") {
            return Self::Elf;
        }
        // Before "MZ": a bzImage with an EFI stub is both.
        if has(0x202, b"HdrS") {
            return Self::BzImage;
        }
        if let Some((_, _, name)) = KNOWN.iter().find(|(offset, magic, _)| has(*offset, magic)) {
            return Self::Known(name);
        }
        let mut first = [0; 4];
        for (to, from) in first.iter_mut().zip(start) {
            *to = *from;
        }
        Self::Unknown(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_kind_of_image() {
        assert_eq!(Magic::of(b"\x7fELF\x02"), Magic::Elf);
        let mut bzimage = [0; PROBE_LEN];
        bzimage[..2].copy_from_slice(b"MZ");
        assert!(Magic::of(&bzimage).to_string().contains("EFI program"));
        bzimage[0x202..0x206].copy_from_slice(b"HdrS");
        assert_eq!(Magic::of(&bzimage), Magic::BzImage);
        let mut arm64 = [0; 0x40];
        arm64[..2].copy_from_slice(b"MZ");
        arm64[0x38..0x3c].copy_from_slice(b"ARM\x64");
        assert!(Magic::of(&arm64).to_string().starts_with("an arm64"));
        assert!(Magic::of(&[0x1f, 0x8b]).to_string().starts_with("gzip"));
        assert_eq!(
            Magic::of(b"hi").to_string(),
            "unknown data that begins with 68 69 00 00"
        );
        assert_eq!(Magic::of(&[]), Magic::Unknown([0; 4]));
    }
}
