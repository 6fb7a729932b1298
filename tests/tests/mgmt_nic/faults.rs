//! Watchers that let a NIC's making fail, and processes that are killed in it.

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

/// A place in a NIC's making.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The phase begins; its step, if it has one, is in the record and was not done.
    Before(Phase),
    /// It was done.
    After(Phase),
}

/// How a making ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It is stopped there.
    Stop,
    /// Somebody interrupts: at the first question behind the moment.
    Interrupt,
    /// The record cannot be kept any more.
    Record,
    /// The process dies.
    Kill,
}

/// Lets a making end at a moment.
pub(crate) struct Ending {
    pub(crate) at: Moment,
    pub(crate) end: End,
    pub(crate) store: Option<Box<dyn Observer>>,
    came: bool,
    asked: bool,
    /// What was kept last.
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

    /// Whether the moment came.
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
            // It is delivered before the call returns.
            unreachable!()
        }
    }

    fn interrupted(&mut self) -> bool {
        match self.end {
            End::Stop => self.came,
            // The first question is the moment's own.
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

/// How a making ends that returns.
const ENDS: [End; 3] = [End::Stop, End::Interrupt, End::Record];

/// Makes a NIC again and again; each time it ends at another moment, in another way, and everything is as before.
///
/// A round has each moment once. In three rounds each moment ends in each way: those are `soak`'s.
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
            // Nothing asks any more, and nothing is kept any more, behind the last one.
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

/// How a cycle ends: in each round each moment in another way.
fn end_of(cycle: usize, moments: usize) -> End {
    ENDS[(cycle % moments + cycle / moments) % ENDS.len()]
}

/// Has a process make a NIC and die at each of these moments, and removes what it left.
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
            // The name is taken meanwhile.
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

/// Makes a NIC with records in the usual place, and dies at a moment, in a process of its own: this
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

/// The other side of [`killed`]. Without the variables it is nobody's and does nothing.
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

/// Runs `bellhop` with these arguments, and sends it a signal when it has logged so many lines. Nothing if it
/// ended before.
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
