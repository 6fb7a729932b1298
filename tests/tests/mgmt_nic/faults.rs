//! Observers that make the creation of a NIC fail, and processes that are killed during it.

use std::io;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use lab::endurance::{cycles, soak};
use lab::notice::{Kind, notice};
use vdpa_mgmt::nic::{
    Activity, MadeNic, NicRequest, Nics, Observer, Phase, Progress, State, Store,
};

use super::host::{NAMES, Traces, record};
use super::support::{bellhop, complaint, printed, program};

/// A point in the creation of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The phase begins. Its step, if it has one, is in the record and not yet done.
    Before(Phase),
    /// The phase is done.
    After(Phase),
}

/// How a creation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The observer stops it there.
    Stop,
    /// An interrupt at the first check after the moment.
    Interrupt,
    /// The record can no longer be written.
    Record,
    /// The process is killed.
    Kill,
}

/// Ends a creation at a moment.
pub(crate) struct Ending {
    pub(crate) at: Moment,
    pub(crate) end: End,
    pub(crate) store: Option<Box<dyn Observer>>,
    came: bool,
    asked: bool,
    /// The last record.
    pub(crate) record: Option<MadeNic>,
}

impl Ending {
    pub(crate) fn new(at: Moment, end: End) -> Self {
        Self {
            at,
            end,
            store: None,
            came: false,
            asked: false,
            record: None,
        }
    }

    /// True if the moment was reached.
    pub(crate) fn came(&self) -> bool {
        self.came
    }
}

impl Observer for Ending {
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()> {
        if self.came && self.end == End::Record && nic.state() == State::Making {
            return Err(io::Error::other("no room for the record"));
        }
        self.record = Some(nic.clone());
        match &mut self.store {
            Some(store) => store.keep(nic),
            None => Ok(()),
        }
    }

    fn progress(&mut self, progress: &Progress<'_>) {
        let moment = match progress.activity {
            Activity::Begin(phase, _) => Moment::Before(phase),
            Activity::End(phase) => Moment::After(phase),
            Activity::Wait(_) | Activity::Undo(_) | Activity::Leave(_) => return,
        };
        if moment != self.at {
            return;
        }
        self.came = true;
        if self.end == End::Kill {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
            // The signal is delivered before the call returns.
            unreachable!()
        }
    }

    fn interrupted(&mut self) -> bool {
        match self.end {
            End::Stop => self.came,
            // The first check belongs to the moment itself.
            End::Interrupt => self.came && std::mem::replace(&mut self.asked, true),
            End::Record | End::Kill => false,
        }
    }
}

/// Both moments of these phases.
pub(crate) fn moments(phases: &[Phase]) -> Vec<Moment> {
    phases
        .iter()
        .flat_map(|&phase| [Moment::Before(phase), Moment::After(phase)])
        .collect()
}

/// The ends after which a creation returns.
const ENDS: [End; 3] = [End::Stop, End::Interrupt, End::Record];

/// Creates a NIC repeatedly. Each time the creation ends at another moment, in another way, and
/// afterwards everything is as before.
///
/// A round has each moment once. In three rounds, each moment ends in each way: only `soak` runs
/// them.
pub(crate) fn each_end_is_undone(request: &NicRequest, moments: &[Moment], before: &Traces) {
    let nics = Nics::open().unwrap();
    let count = moments.len();
    let rounds = if soak() { ENDS.len() } else { 1 };
    let cycles = usize::try_from(cycles().unwrap()).unwrap();
    let cycles = cycles.max(rounds * count);
    if cycles < ENDS.len() * count {
        let fails = (0..cycles).filter(|&cycle| end_of(cycle, count) == End::Stop);
        notice(
            Kind::Thinned,
            format!(
                "nic make: {} of {count} moments stop it, {cycles} of {} ends",
                fails.count(),
                ENDS.len() * count
            ),
        );
    }
    for number in 0..cycles {
        let at = moments[number % count];
        let end = end_of(number, count);
        let mut ending = Ending::new(at, end);
        match nics.make(request, &[], &mut ending) {
            Err(error) => {
                assert!(error.not_undone.is_empty(), "{at:?} {end:?}: {error}");
            }
            // After the last moment there are no more checks and no more records.
            Ok(made) => {
                assert!(end != End::Stop, "{at:?}");
                assert_eq!(made.state(), State::Made);
                nics.remove(&made, &mut ending).unwrap();
            }
        }
        assert!(ending.came(), "{at:?} did not come");
        let left = ending.record.map(|record| record.steps().len());
        assert!(left.unwrap_or_default() == 0, "{at:?} {end:?}: {left:?}");
        before.assert_same(&format!("{at:?} {end:?}"));
    }
}

/// How a cycle ends: in each round, each moment ends in another way.
fn end_of(cycle: usize, moments: usize) -> End {
    ENDS[(cycle % moments + cycle / moments) % ENDS.len()]
}

/// Lets a process create a NIC and die at each of these moments, and removes its leftovers.
pub(crate) fn each_death_is_undone(test: &str, from: &str, moments: &[Moment], before: &Traces) {
    let mut recorded = false;
    for (number, moment) in moments.iter().enumerate() {
        killed(test, from, number);
        if record(NAMES[0]).exists() {
            if !recorded {
                // The first step is recorded before it is done.
                before.assert_only_recorded(NAMES[0], &format!("killed at {moment:?}"));
                recorded = true;
            }
            let list = printed(&bellhop(&["nic", "list"]));
            assert!(list.contains("state making"), "{moment:?}: {list}");
            // The name is taken in the meantime.
            let again = ["nic", "make", "--from", from, "--name", NAMES[0]];
            complaint(&bellhop(&again), &["nic delete lab-nic0"]);
            printed(&bellhop(&["nic", "remove", NAMES[0]]));
        } else {
            // Before the first step.
            assert!(number <= 2, "{moment:?} left no record");
        }
        before.assert_same(&format!("killed at {moment:?}"));
    }
}

/// Creates a NIC with records in the usual place, and dies at a moment, in its own process: this
/// program again, with one test.
fn killed(test: &str, from: &str, moment: usize) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("LAB_KILL_AT", moment.to_string())
        .env("LAB_FROM", from)
        .output()
        .unwrap();
    use std::os::unix::process::ExitStatusExt as _;
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{output:?}");
}

/// The other side of [`killed`]. Without the variables it does nothing.
pub(crate) fn be_killed(request: impl Fn(&str) -> NicRequest, moments: &[Moment]) {
    let (Ok(moment), Ok(from)) = (std::env::var("LAB_KILL_AT"), std::env::var("LAB_FROM")) else {
        return;
    };
    let moment: usize = moment.parse().unwrap();
    let store = Store::open_default().unwrap().lock().unwrap();
    let others = store.nics().unwrap();
    let mut ending = Ending::new(moments[moment], End::Kill);
    ending.store = Some(Box::new(store));
    let made = Nics::open()
        .unwrap()
        .make(&request(&from), &others, &mut ending);
    panic!("it came to its end: {made:?}");
}

/// Runs `bellhop` with these arguments, and sends it a signal when it has logged this many lines.
/// Returns `None` if it ended before.
pub(crate) fn signalled(
    arguments: &[&str],
    lines: usize,
    signal: rustix::process::Signal,
) -> Option<Output> {
    let mut child = Command::new(program())
        .args(["--log-level", "info"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    for _ in 0..lines {
        if log.read_line(&mut line).unwrap() == 0 {
            let status = child.wait().unwrap();
            assert!(status.success(), "{line}");
            return None;
        }
    }
    let pid = rustix::process::Pid::from_child(&child);
    let _ = rustix::process::kill_process(pid, signal);
    io::Read::read_to_string(&mut log, &mut line).unwrap();
    let mut output = child.wait_with_output().unwrap();
    output.stderr = line.into_bytes();
    Some(output)
}
