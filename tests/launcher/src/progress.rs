//! Shows progress of long work on standard error: one display for all steps that run at once.
//!
//! On a terminal each step has a line with its elapsed time and its latest output. A last line
//! shows the total and the estimate. Elsewhere a line every five seconds shows all of it, and each
//! step that took longer than a second prints a line when it ends. Output printed through
//! [`around`] never mixes with the display.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// A shorter step leaves no line behind.
const SHORT: Duration = Duration::from_secs(1);

/// Characters of a step's latest output in a line, where there is no terminal.
const SHOWN: usize = 60;

static TERMINAL: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);
static DISPLAY: LazyLock<Display> = LazyLock::new(Display::default);

/// Prints while no step is drawn. Output of several threads never mixes.
pub fn around<T>(print: impl FnOnce() -> T) -> T {
    TERMINAL.suspend(print)
}

/// Sets the expected time of the remaining work.
pub fn expect(left: Duration) {
    let mut state = DISPLAY.lock();
    let elapsed = state.began.map_or(Duration::ZERO, |began| began.elapsed());
    state.expected = Some(elapsed + left);
}

/// One step of long work, shown until it is dropped.
#[derive(Debug)]
pub struct Progress {
    number: u64,
    started: Instant,
    bar: Option<ProgressBar>,
}

#[derive(Debug, Default)]
struct Display {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    began: Option<Instant>,
    expected: Option<Duration>,
    next: u64,
    /// Keyed by start order.
    steps: BTreeMap<u64, Shown>,
    /// The last line on a terminal.
    total: Option<ProgressBar>,
    has_printer: bool,
}

#[derive(Debug)]
struct Shown {
    what: String,
    latest: String,
    started: Instant,
}

impl Display {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints a line at each interval while there are steps.
    fn print_plainly(&self) {
        let mut state = self.lock();
        while !state.steps.is_empty() {
            let (next, waited) = self
                .changed
                .wait_timeout_while(state, INTERVAL, |state| !state.steps.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            if waited.timed_out() {
                eprintln!("lab: {}", state.line());
            }
        }
        state.has_printer = false;
    }
}

impl State {
    /// The elapsed and the expected time: `75 s of about 290 s`.
    fn total(&self) -> String {
        let seconds = self.began.map_or(0, |began| began.elapsed().as_secs());
        match self.expected {
            Some(expected) => format!("{seconds} s of about {} s", expected.as_secs()),
            None => format!("{seconds} s"),
        }
    }

    /// All steps in one line.
    fn line(&self) -> String {
        let mut line = self.total();
        for step in self.steps.values() {
            let latest: String = step.latest.chars().take(SHOWN).collect();
            let seconds = step.started.elapsed().as_secs();
            let _ = write!(line, " | {} ({seconds} s)", step.what);
            if !latest.is_empty() {
                let _ = write!(line, ": {latest}");
            }
        }
        line
    }
}

impl Progress {
    /// Starts to show a step named `what` ("lab host root").
    pub fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        let started = Instant::now();
        let mut state = DISPLAY.lock();
        state.began.get_or_insert(started);
        let number = state.next;
        state.next += 1;
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = match &state.total {
                Some(total) => TERMINAL.insert_before(total, ProgressBar::new_spinner()),
                None => TERMINAL.add(ProgressBar::new_spinner()),
            };
            styled(&bar, "{spinner} {prefix} [{elapsed}] {wide_msg}");
            bar.set_prefix(what.clone());
            if state.total.is_none() {
                let total = TERMINAL.add(ProgressBar::new_spinner());
                styled(&total, "  {wide_msg}");
                state.total = Some(total);
            }
            bar
        });
        state.steps.insert(
            number,
            Shown {
                what,
                latest: String::new(),
                started,
            },
        );
        if let (None, false) = (&bar, state.has_printer) {
            state.has_printer = true;
            std::thread::spawn(|| DISPLAY.print_plainly());
        }
        let text = state.total();
        if let Some(total) = &state.total {
            total.set_message(text);
        }
        Self {
            number,
            started,
            bar,
        }
    }

    /// Shows the step's latest output: one line, cut where it is too long.
    pub fn line(&self, text: &str) {
        let mut state = DISPLAY.lock();
        if let Some(step) = state.steps.get_mut(&self.number) {
            text.clone_into(&mut step.latest);
        }
        if let Some(bar) = &self.bar {
            bar.set_message(text.to_owned());
            let text = state.total();
            if let Some(total) = &state.total {
                total.set_message(text);
            }
        }
    }
}

fn styled(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
}

impl Drop for Progress {
    fn drop(&mut self) {
        let elapsed = self.started.elapsed();
        let mut state = DISPLAY.lock();
        let step = state.steps.remove(&self.number);
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            TERMINAL.remove(bar);
        }
        if state.steps.is_empty()
            && let Some(total) = state.total.take()
        {
            total.finish_and_clear();
            TERMINAL.remove(&total);
        }
        drop(state);
        DISPLAY.changed.notify_all();
        if let (Some(step), true) = (step, elapsed > SHORT) {
            around(|| eprintln!("lab: {} ({:.1} s)", step.what, elapsed.as_secs_f64()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_each_step_and_the_estimate() {
        let mut state = State {
            began: Some(Instant::now()),
            ..State::default()
        };
        let step = |what: &str, latest: &str| Shown {
            what: what.into(),
            latest: latest.into(),
            started: Instant::now(),
        };
        state.steps.insert(0, step("root", "unpacking"));
        state.steps.insert(1, step("cargo", ""));
        assert_eq!(state.line(), "0 s | root (0 s): unpacking | cargo (0 s)");
        state.expected = Some(Duration::from_secs(290));
        assert!(state.line().starts_with("0 s of about 290 s | "));
    }
}
