//! Text as terminals show it.

/// The text without anything that a terminal obeys.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A hardware address: its bytes in hexadecimal, with colons.
pub(crate) fn address(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}
