//! Progress of long work on standard error.
//!
//! On a terminal a spinner with elapsed time and the latest line of what is
//! going on; elsewhere plain lines: one at the start, one every ten seconds,
//! one at the end. Work that is over within a second leaves nothing behind on
//! a terminal and one line elsewhere only if it took longer.
//!
//! Several pieces of work may go on at once: each has a line of its own, and what
//! is printed through [`around`] comes between none of them.
//!
//! Owns the drawing. Knows nothing of the work.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where there is no terminal: how long nothing is printed at first, and then
/// the time between two lines.
const PLAIN_DELAY: Duration = Duration::from_secs(1);
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// The terminal's lines: one for each piece of work.
static TERMINAL: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Prints while no spinner is drawn. What several threads print so is never mixed.
pub fn around<T>(print: impl FnOnce() -> T) -> T {
    TERMINAL.suspend(print)
}

/// One piece of long work, shown until it is dropped.
#[derive(Debug)]
pub struct Progress {
    what: String,
    started: Instant,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Terminal(ProgressBar),
    Plain {
        latest: Arc<Mutex<String>>,
        stop: Option<Sender<()>>,
        printer: Option<JoinHandle<bool>>,
    },
}

impl Progress {
    /// Starts to show work named `what` ("the lab host's root").
    pub fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        let kind = if std::io::stderr().is_terminal() {
            let bar = TERMINAL.add(ProgressBar::new_spinner());
            if let Ok(style) =
                ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(what.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            Kind::Terminal(bar)
        } else {
            let latest = Arc::new(Mutex::new(String::new()));
            let (stop, stopped) = mpsc::channel();
            let printer = std::thread::spawn({
                let what = what.clone();
                let latest = Arc::clone(&latest);
                move || print_plainly(&what, &latest, &stopped)
            });
            Kind::Plain {
                latest,
                stop: Some(stop),
                printer: Some(printer),
            }
        };
        Self {
            what,
            started: Instant::now(),
            kind,
        }
    }

    /// Shows what is being done right now: one line, cut where it is too long.
    pub fn line(&self, text: &str) {
        match &self.kind {
            Kind::Terminal(bar) => bar.set_message(text.to_owned()),
            Kind::Plain { latest, .. } => {
                if let Ok(mut latest) = latest.lock() {
                    text.clone_into(&mut latest);
                }
            }
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let elapsed = self.started.elapsed();
        match &mut self.kind {
            Kind::Terminal(bar) => {
                bar.finish_and_clear();
                TERMINAL.remove(bar);
                if elapsed > PLAIN_DELAY {
                    around(|| eprintln!("lab: {} ({:.1} s)", self.what, elapsed.as_secs_f64()));
                }
            }
            Kind::Plain { stop, printer, .. } => {
                drop(stop.take());
                let printed = printer.take().and_then(|printer| printer.join().ok());
                if printed == Some(true) {
                    eprintln!("lab: {}: {:.1} s in all", self.what, elapsed.as_secs_f64());
                }
            }
        }
    }
}

/// Prints until the channel closes; true when anything was printed.
fn print_plainly(what: &str, latest: &Mutex<String>, stopped: &mpsc::Receiver<()>) -> bool {
    let started = Instant::now();
    let mut wait = PLAIN_DELAY;
    let mut printed = false;
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let latest = latest.lock().map(|line| line.clone()).unwrap_or_default();
        let latest: String = latest.chars().take(100).collect();
        if printed {
            eprintln!("lab: {what}: {} s: {latest}", started.elapsed().as_secs());
        } else {
            eprintln!("lab: {what} …");
        }
        printed = true;
        wait = PLAIN_INTERVAL;
    }
    printed
}
