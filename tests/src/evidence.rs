//! Evidence about a VMM that does not answer or end: its threads as the kernel sees them, and KVM's
//! events for its vCPUs.
//!
//! This module owns the text that a test's error carries. It enables KVM's tracepoints for a
//! moment, so it is only for a guest that the test gives up (see [`crate::kvm_trace`]).

use crate::emulator;
use crate::error::report;
use crate::files;
use crate::kvm_trace;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The process ID of the kernel's thread that starts the others.
const KTHREADD: &str = "2";

/// Collects evidence about the process `pid`, in lines. An unreadable item is named in its place.
pub fn of(pid: u32) -> String {
    let kvm = kvm_trace::sample().unwrap_or_else(|error| report(&error));
    let fault = emulator::marked(&kvm);
    format!("the threads of the VMM:\n{}\n{kvm}{fault}", threads(pid))
}

/// Evidence for a test that panics, whose guest may still run. It leaves out KVM's events unless a
/// vCPU seems to loop.
pub fn of_running(pid: u32) -> String {
    match kvm_trace::counters() {
        Ok(counters) if emulator::may_loop(&counters) => of(pid),
        Ok(counters) => format!("the threads of the VMM:\n{}\n{counters}", threads(pid)),
        Err(error) => report(&error),
    }
}

/// Evidence about this lab host, for a file of tests that exceeds its time limit. It has the
/// threads of each process, and those of the kernel that cannot be interrupted.
pub fn of_all() -> String {
    let processes = match files::list(Path::new("/proc")) {
        Ok(entries) => entries.iter().filter_map(|path| process(path)).collect(),
        Err(error) => report(&error),
    };
    let kvm = kvm_trace::sample().unwrap_or_else(|error| report(&error));
    let fault = emulator::marked(&kvm);
    format!("{processes}{kvm}{fault}\n")
}

/// The threads of the process at this entry of `/proc`. A thread of the kernel counts only if it
/// cannot be interrupted.
fn process(entry: &Path) -> Option<String> {
    let pid: u32 = entry.file_name()?.to_str()?.parse().ok()?;
    let (state, parent) = state(entry);
    let of_kernel = [parent.as_str(), &pid.to_string()].contains(&KTHREADD);
    (!of_kernel || state == "D")
        .then(|| format!("the threads of the process {pid}:\n{}", threads(pid)))
}

/// One line for each thread: ID, name, state, kernel wait channel, system call, kernel stack.
fn threads(pid: u32) -> String {
    let tasks = match files::list(&PathBuf::from(format!("/proc/{pid}/task"))) {
        Ok(tasks) => tasks,
        Err(error) => return report(&error),
    };
    let mut all = String::new();
    for task in &tasks {
        // A thread may exit during the scan.
        let id = task.file_name().unwrap_or_default().display();
        let _ = writeln!(
            all,
            "{id} {} state {} wchan {} syscall {} stack {}",
            line_of(task, "comm"),
            state(task).0,
            line_of(task, "wchan"),
            line_of(task, "syscall"),
            line_of(task, "stack"),
        );
    }
    all
}

/// A file's lines joined into one, or the reason why it cannot be read.
fn line_of(task: &Path, file: &str) -> String {
    match files::read_text(&task.join(file)) {
        Ok(text) => text.trim().replace('\n', " < "),
        Err(error) => format!("({})", report(&error)),
    }
}

/// The letter of proc(5), such as R or D, and the ID of the parent process.
fn state(task: &Path) -> (String, String) {
    let stat = files::read_text(&task.join("stat")).unwrap_or_default();
    // The name before them may contain anything, even parentheses.
    let (_, rest) = stat.rsplit_once(')').unwrap_or(("", "? ?"));
    let mut fields = rest.split_whitespace().map(str::to_owned);
    (
        fields.next().unwrap_or_default(),
        fields.next().unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    #[test]
    fn each_thread_has_a_line() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::Builder::new().name("evidence-2".to_owned());
        let other = other.spawn(move || stopped.recv()).unwrap();
        let mut threads = super::threads(std::process::id());
        // A new thread gets its name a moment after its start.
        while !threads.contains("evidence-2") {
            threads = super::threads(std::process::id());
        }
        assert!(threads.lines().count() >= 2, "{threads}");
        assert!(
            threads.lines().all(|line| line.contains(" state ")),
            "{threads}"
        );
        drop(stop);
        other.join().unwrap().unwrap_err();
        assert!(super::threads(u32::MAX).contains("cannot"));
    }

    #[test]
    fn a_process_is_listed_and_an_idle_thread_of_the_kernel_is_not() {
        let of = |pid: u32| super::process(&PathBuf::from(format!("/proc/{pid}")));
        assert!(of(std::process::id()).unwrap().contains(" state "));
        assert_eq!(super::process(Path::new("/proc/self")), None);
        let kthreadd = super::KTHREADD.parse().unwrap();
        assert_eq!(of(kthreadd), None);
    }
}
