//! Text for terminals, and times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The text without control characters for a terminal.
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

/// The time since 1970 by the host's clock.
#[must_use]
pub fn since_1970() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// A time, in seconds since 1970, in UTC in the form of ISO 8601: `2026-11-21T21:45:00Z`.
#[must_use]
pub fn utc(time: u64) -> String {
    let (days, seconds) = (time / 86_400, time % 86_400);
    // Years begin in March, so leap days are at their ends; eras have 400 years.
    let days = days.saturating_add(719_468);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = match month {
        0..=9 => (month + 3, 0),
        _ => (month - 9, 1),
    };
    let year = era * 400 + year + carry;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_date() {
        // date -u -d @N +%Y-%m-%dT%H:%M:%SZ
        for (time, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_297_500, "2026-11-21T21:45:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(time), text);
        }
    }
}
