//! Formats sizes in messages: `512 MiB`, `1.5 GiB`, `100 bytes`.

use std::fmt;

/// A number of bytes that prints with a suitable binary unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteCount(pub(crate) u64);

const UNITS: [(u64, &str); 4] = [
    (1 << 40, "TiB"),
    (1 << 30, "GiB"),
    (1 << 20, "MiB"),
    (1 << 10, "KiB"),
];

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        for (unit, name) in UNITS {
            if bytes >= unit {
                let whole = bytes / unit;
                // Rounded down: a message must not claim more than there is.
                let tenth = (bytes % unit) / (unit / 10).max(1);
                return match tenth.min(9) {
                    0 => write!(f, "{whole} {name}"),
                    tenth => write!(f, "{whole}.{tenth} {name}"),
                };
            }
        }
        match bytes {
            1 => write!(f, "1 byte"),
            _ => write!(f, "{bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ByteCount;

    #[test]
    fn chooses_the_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            ((1 << 30) - 1, "1023.9 MiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(ByteCount(bytes).to_string(), text);
        }
    }
}
