//! A host whose processors others want, too.
//!
//! Owns threads that do nothing, and how long the simulator's own threads wait behind them. A device that comes late is an
//! ordinary one; the simulator is otherwise done with whatever it is given before a guest can be stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::{fs, io};

use rustix::process::{Pid, setpriority_process};

/// Threads: two for each processor of a lab host.
const THREADS: usize = 4;

/// What the kernel calls a simulator's thread, before the device's name (drivers/vdpa/vdpa_sim/vdpa_sim.c).
const SIMULATOR: &str = "vDPA sim worker";

/// How nice the simulator is meanwhile (sched(7)): as nice as can be, or it is hardly ever late.
const NICE: i32 = 19;

/// The threads. They end with it, and the simulator is as it was.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    pub(crate) fn gather() -> Self {
        set_simulators(NICE).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..THREADS)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
            })
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It only spins, so it cannot have panicked.
            let _ = thread.join();
        }
        // A device that is deleted already needs it no more.
        let _ = set_simulators(0);
    }
}

/// Sets how nice the threads of all simulators are; there are none on other rigs.
fn set_simulators(nice: i32) -> io::Result<()> {
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let name = fs::read_to_string(process.path().join("comm"));
        if !name.is_ok_and(|name| name.starts_with(SIMULATOR)) {
            continue;
        }
        if let Ok(id) = process.file_name().to_string_lossy().parse() {
            setpriority_process(Pid::from_raw(id), nice)?;
        }
    }
    Ok(())
}
