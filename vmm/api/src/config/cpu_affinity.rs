//! The host CPUs of each vCPU.
//!
//! Owns the notation. Files and the API use lists of numbers (`[[0, 1], [2]]`). The command line
//! uses the kernel's list format with a colon between vCPUs (`0-1:2`). It must not know which CPUs
//! the host has.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a list of CPUs is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CpuAffinityError {
    /// Not in the kernel's list format.
    #[error("{0:?} is not a list of numbers such as 0-3,8")]
    Malformed(String),
    /// A number that no host CPU has.
    #[error("there is no CPU {0}: a host has at most {max}", max = HostCpus::MAX)]
    TooLarge(u64),
    /// An empty list: the vCPU could not run.
    #[error("a vCPU needs at least one CPU of the host")]
    Empty,
    /// The number of lists differs from that of vCPUs, and is not zero.
    #[error(
        "cpu_affinity has {lists} lists for {cpus} vCPUs; it needs one list for each vCPU, in \
         their order"
    )]
    Count {
        /// The number of lists.
        lists: usize,
        /// The number of vCPUs.
        cpus: u8,
    },
}

/// CPUs of the host, by their numbers in `/sys/devices/system/cpu`; at least one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeSet<u64>", into = "BTreeSet<u16>")]
pub struct HostCpus(BTreeSet<u16>);

impl HostCpus {
    /// The number of CPUs that can be named: `sched_setaffinity` takes one `cpu_set_t`.
    pub const MAX: u16 = 1024;

    /// Their numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        self.0.iter().copied()
    }
}

impl TryFrom<BTreeSet<u64>> for HostCpus {
    type Error = CpuAffinityError;

    fn try_from(numbers: BTreeSet<u64>) -> Result<Self, CpuAffinityError> {
        if numbers.is_empty() {
            return Err(CpuAffinityError::Empty);
        }
        numbers
            .into_iter()
            .map(|number| match u16::try_from(number) {
                Ok(small) if small < Self::MAX => Ok(small),
                _ => Err(CpuAffinityError::TooLarge(number)),
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl From<HostCpus> for BTreeSet<u16> {
    fn from(cpus: HostCpus) -> Self {
        cpus.0
    }
}

impl FromStr for HostCpus {
    type Err = CpuAffinityError;

    fn from_str(text: &str) -> Result<Self, CpuAffinityError> {
        parse_list(text)
            .ok_or_else(|| CpuAffinityError::Malformed(text.to_owned()))?
            .try_into()
    }
}

impl fmt::Display for HostCpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_list(self.iter()))
    }
}

/// Parses numbers in the kernel's list format (`0-3,8`), as in its files; `None` if the text has
/// another form. A range may contain at most [`HostCpus::MAX`] numbers.
pub fn parse_list(text: &str) -> Option<BTreeSet<u64>> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u64>().ok()).flatten()
    };
    let mut numbers = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last - first >= u64::from(HostCpus::MAX) {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Formats ascending numbers in the kernel's list format.
pub fn show_list(numbers: impl IntoIterator<Item = impl Into<u32>>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers.into_iter().map(Into::into) {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let show = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    let shown: Vec<String> = ranges.iter().map(show).collect();
    shown.join(",")
}

/// One list for each vCPU, in order; no lists if vCPUs may run on all CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuAffinity(Vec<HostCpus>);

impl CpuAffinity {
    /// Whether vCPUs may run on all CPUs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The list of each vCPU.
    #[must_use]
    pub fn lists(&self) -> &[HostCpus] {
        &self.0
    }

    /// Checks that there is one list for each of these vCPUs, or none.
    ///
    /// # Errors
    /// [`CpuAffinityError::Count`].
    pub fn check(&self, cpus: u8) -> Result<(), CpuAffinityError> {
        match self.0.len() {
            0 => Ok(()),
            lists if lists == usize::from(cpus) => Ok(()),
            lists => Err(CpuAffinityError::Count { lists, cpus }),
        }
    }
}

impl FromStr for CpuAffinity {
    type Err = CpuAffinityError;

    fn from_str(text: &str) -> Result<Self, CpuAffinityError> {
        text.split(':')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_as_the_kernel_has_them() {
        let affinity: CpuAffinity = "0-1:2:7,3-5".parse().unwrap();
        let json = serde_json::to_string(&affinity).unwrap();
        assert_eq!(json, "[[0,1],[2],[3,4,5,7]]");
        assert_eq!(
            serde_json::from_str::<CpuAffinity>(&json).unwrap(),
            affinity
        );
        assert_eq!(affinity.lists()[2].to_string(), "3-5,7");
        assert_eq!("1023".parse::<HostCpus>().unwrap().to_string(), "1023");
    }

    #[test]
    fn invalid_lists_are_refused() {
        for text in [
            "",
            ":",
            "0:",
            "a",
            "-1",
            "1-",
            "3-1",
            "0-99999",
            "+1",
            "1,,2",
            " 1",
            "1 ",
            "0-1-2",
            "99999999999999999999",
        ] {
            let error = text.parse::<CpuAffinity>().unwrap_err();
            assert!(matches!(error, CpuAffinityError::Malformed(_)), "{text}");
        }
        assert_eq!(
            "1024".parse::<HostCpus>(),
            Err(CpuAffinityError::TooLarge(1024))
        );
        for (json, words) in [
            ("[[]]", "at least one CPU"),
            ("[[1024]]", "no CPU 1024"),
            ("[[18446744073709551615]]", "no CPU 18446744073709551615"),
            ("[[-1]]", "-1"),
            ("[0]", "expected a sequence"),
            ("[[\"0-1\"]]", "expected u64"),
        ] {
            let error = serde_json::from_str::<CpuAffinity>(json).unwrap_err();
            assert!(error.to_string().contains(words), "{json}: {error}");
        }
    }

    #[test]
    fn each_vcpu_has_a_list_or_none_has() {
        let two: CpuAffinity = "0:1".parse().unwrap();
        two.check(2).unwrap();
        CpuAffinity::default().check(5).unwrap();
        for cpus in [1, 3] {
            let error = two.check(cpus).unwrap_err().to_string();
            assert!(error.contains("needs one list for each vCPU"), "{error}");
        }
    }
}
