//! Converts SIGINT, SIGTERM and SIGHUP to a request to stop the VM, and SIGUSR1 to a request to log
//! its statistics.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use vmm::machine::{StatisticsHandle, StopHandle};

/// Signals that ask a process to stop.
const STOP: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The received stop signal, if any.
#[derive(Debug, Clone)]
pub(crate) struct StopSignals(Arc<AtomicUsize>);

impl StopSignals {
    /// From now on the signals are recorded instead of ending the process.
    pub(crate) fn note() -> io::Result<Self> {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in STOP {
            let number = usize::try_from(signal).map_err(io::Error::other)?;
            signal_hook::flag::register_usize(signal, Arc::clone(&received), number)?;
        }
        Ok(Self(received))
    }

    /// The same; the signals also trigger `stop`.
    pub(crate) fn install(stop: &StopHandle) -> io::Result<Self> {
        let signals = Self::note()?;
        for signal in STOP {
            let stop = stop.clone();
            // SAFETY: the handler may only use async-signal-safe operations; `StopHandle::stop` is
            // one write to an eventfd.
            unsafe { signal_hook::low_level::register(signal, move || stop.stop()) }?;
        }
        Ok(signals)
    }

    /// The number of the last received signal.
    pub(crate) fn received(&self) -> Option<u8> {
        u8::try_from(self.0.load(Ordering::SeqCst))
            .ok()
            .filter(|&number| number != 0)
    }
}

/// From now on SIGUSR1 triggers `statistics` instead of ending the process.
pub(crate) fn log_statistics_on_sigusr1(statistics: StatisticsHandle) -> io::Result<()> {
    // SAFETY: the handler may only use async-signal-safe operations; `StatisticsHandle::log` is one
    // write to an eventfd.
    unsafe { signal_hook::low_level::register(SIGUSR1, move || statistics.log()) }?;
    Ok(())
}
