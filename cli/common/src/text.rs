//! Text as terminals show it.

/// The text without anything that a terminal obeys.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A hardware address: its bytes in hexadecimal, with colons.
#[must_use]
pub fn address(bytes: &[u8]) -> String {
    let bytes: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}
