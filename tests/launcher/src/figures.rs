//! Medians, percentiles and rates.

use std::time::Duration;

/// The middle value, the upper one of two middle values, or 0 without values.
pub fn median(values: &[f64]) -> f64 {
    percentile(values, 50)
}

/// The value that `percent` percent of all values do not exceed, or 0 without values.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let position = sorted.len() * percent / 100;
    let last = sorted.len().saturating_sub(1);
    sorted.get(position.min(last)).copied().unwrap_or_default()
}

/// Events per second, or 0 in no time.
pub fn per_second(count: u32, time: Duration) -> f64 {
    ratio(f64::from(count), time.as_secs_f64())
}

/// Microseconds for each of `count`, or 0 if `count` is 0.
pub fn microseconds_each(time: Duration, count: u32) -> f64 {
    ratio(time.as_secs_f64() * 1e6, f64::from(count))
}

/// Milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// `part / whole`, or 0 if `whole` is not positive.
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// For each round, the first figure divided by the second.
pub fn ratios(parts: &[f64], wholes: &[f64]) -> Vec<f64> {
    let pairs = parts.iter().zip(wholes);
    pairs.map(|(part, whole)| ratio(*part, *whole)).collect()
}

/// The value rounded to this many decimal places.
pub fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        assert_eq!(median(&[]).to_string(), "0");
        assert_eq!(median(&[3.0, 1.0, 2.0]).to_string(), "2");
        let all: Vec<f64> = (0..200).map(f64::from).collect();
        assert_eq!(percentile(&all, 99).to_string(), "198");
        assert_eq!(percentile(&all, 100).to_string(), "199");
    }

    #[test]
    fn rates_of_nothing_are_none() {
        assert_eq!(
            per_second(100, Duration::from_millis(500)).to_string(),
            "200"
        );
        assert_eq!(per_second(1, Duration::ZERO).to_string(), "0");
        assert_eq!(
            microseconds_each(Duration::from_millis(1), 4).to_string(),
            "250"
        );
        assert_eq!(median(&ratios(&[1.0, 6.0], &[4.0, 2.0])).to_string(), "3");
        assert_eq!(ratios(&[1.0], &[0.0]), [0.0]);
        assert_eq!(rounded(1.2345, 2).to_string(), "1.23");
    }
}
