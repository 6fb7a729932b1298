//! Durations with units for options: `300ms`, `90s`, `10m`, `1h`, `90d`.
//!
//! Owns the units. A number alone has the unit in its option's name.

use std::ops::RangeInclusive;

/// A unit, and its milliseconds.
type Unit = (&'static str, u64);

const MILLISECOND: Unit = ("ms", 1);
const SECOND: Unit = ("s", 1_000);
const UNITS: [Unit; 5] = [
    MILLISECOND,
    SECOND,
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
];

/// Parses a duration in seconds, which are the unit of a number alone.
pub(crate) fn seconds(range: RangeInclusive<u32>) -> impl Parser {
    move |text: &str| read(text, SECOND, &range)
}

/// Parses a duration in milliseconds, which are the unit of a number alone.
pub(crate) fn milliseconds(range: RangeInclusive<u32>) -> impl Parser {
    move |text: &str| read(text, MILLISECOND, &range)
}

/// The traits that clap requires of an option's parser.
pub(crate) trait Parser:
    Fn(&str) -> Result<u32, String> + Clone + Send + Sync + 'static
{
}

impl<T: Fn(&str) -> Result<u32, String> + Clone + Send + Sync + 'static> Parser for T {}

/// A duration in this unit.
fn read(text: &str, (name, size): Unit, range: &RangeInclusive<u32>) -> Result<u32, String> {
    let no_duration =
        || format!("{text:?} is not a duration: give a number and ms, s, m, h or d, such as 90s");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.strip_prefix(digits).unwrap_or_default();
    let unit = match unit {
        "" => Some(size),
        unit => UNITS.iter().find(|one| one.0 == unit).map(|one| one.1),
    };
    // `parse` alone would take "+1".
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let unit = unit.filter(|_| is_number).ok_or_else(no_duration)?;
    let (min, max) = range.clone().into_inner();
    let out_of_range = || format!("{text} is outside the range from {min}{name} to {max}{name}");
    let whole: u64 = digits.parse().map_err(|_| out_of_range())?;
    let whole = whole.checked_mul(unit).ok_or_else(out_of_range)?;
    if !whole.is_multiple_of(size) {
        return Err(format!("{text} is not a whole number of {name}"));
    }
    let count = u32::try_from(whole / size).ok();
    count
        .filter(|count| range.contains(count))
        .ok_or_else(out_of_range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        let limit = seconds(1..=86_400);
        for (text, wanted) in [
            ("90s", 90),
            ("90", 90),
            ("10m", 600),
            ("1h", 3600),
            ("1d", 86_400),
            ("2000ms", 2),
        ] {
            assert_eq!(limit(text).unwrap(), wanted, "{text}");
        }
        let downtime = milliseconds(0..=u32::MAX);
        for (text, wanted) in [("300ms", 300), ("300", 300), ("2s", 2000), ("0", 0)] {
            assert_eq!(downtime(text).unwrap(), wanted, "{text}");
        }
        for (text, part) in [
            ("", "not a duration"),
            ("s", "not a duration"),
            ("+1s", "not a duration"),
            ("1.5s", "not a duration"),
            ("1 s", "not a duration"),
            ("1w", "not a duration"),
            ("0", "from 1s to 86400s"),
            ("25h", "from 1s to 86400s"),
            ("99999999999999999999h", "from 1s to 86400s"),
            ("9999999999999999999m", "from 1s to 86400s"),
            ("1500ms", "whole number of s"),
        ] {
            let error = limit(text).unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
