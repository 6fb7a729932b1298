//! Scheduler accounts of each thread of a process: `/proc/PID/task/TID/schedstat`, nanoseconds on a
//! processor and nanoseconds of waiting for one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::files;

/// One thread's account since its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// The thread's name.
    pub name: String,
    /// Time on a processor.
    pub ran: Duration,
    /// Time ready to run while other threads ran.
    pub waited: Duration,
}

/// The accounts of all threads that the process has now, by their directory.
///
/// # Errors
/// [`Error::File`] if there is no such process; [`Error::Invalid`] for an answer in an unexpected
/// format.
pub fn accounts(pid: u32) -> Result<BTreeMap<PathBuf, Account>> {
    let mut all = BTreeMap::new();
    for task in files::list(&PathBuf::from(format!("/proc/{pid}/task")))? {
        // A thread may exit during the scan.
        let (Ok(name), Ok(times)) = (
            files::read_text(&task.join("comm")),
            files::read_text(&task.join("schedstat")),
        ) else {
            continue;
        };
        all.insert(task, account(name.trim(), &times)?);
    }
    Ok(all)
}

fn account(name: &str, schedstat: &str) -> Result<Account> {
    let wrong = || {
        Error::invalid(
            "/proc/PID/task/TID/schedstat",
            format!("it says {schedstat:?}"),
        )
    };
    let mut numbers = schedstat
        .split_whitespace()
        .map(|word| word.parse().map(Duration::from_nanos));
    let mut next = || numbers.next().and_then(|number| number.ok());
    Ok(Account {
        name: name.to_owned(),
        ran: next().ok_or_else(wrong)?,
        waited: next().ok_or_else(wrong)?,
    })
}

/// The percentage of their runnable time that the process's threads waited for a processor; 0 for a
/// process that never ran.
///
/// # Errors
/// As [`accounts`].
pub fn waited_percent(pid: u32) -> Result<u128> {
    let all = accounts(pid)?;
    let sum = |of: fn(&Account) -> Duration| all.values().map(of).sum::<Duration>().as_nanos();
    let (ran, waited) = (sum(|one| one.ran), sum(|one| one.waited));
    Ok((100 * waited).checked_div(ran + waited).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_have_two_times() {
        let one = account("CPU 0/KVM", "6817054477 583189395 20374\n").unwrap();
        assert_eq!(one.ran, Duration::from_nanos(6_817_054_477));
        assert_eq!(one.waited, Duration::from_nanos(583_189_395));
        assert!(account("x", "").is_err());
        assert!(account("x", "1 y 2").is_err());
    }

    #[test]
    fn this_process_has_threads() {
        let own = std::process::id();
        assert!(!accounts(own).unwrap().is_empty());
        assert!(waited_percent(own).unwrap() <= 100);
        assert!(accounts(u32::MAX).is_err());
    }
}
