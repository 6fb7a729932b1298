//! CPU load on the host's processors.
//!
//! This module owns threads that only consume CPU time. Threads that serve rings wait behind them:
//! the simulator's own threads, the lab NIC's workers, and the relays of VMMs. So devices complete
//! late, as ordinary devices do. Without the load, these have finished all their buffers before a
//! guest can be stopped.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, io};

use rustix::process::{Pid, setpriority_process};
use rustix::thread::gettid;

/// Threads: two for each processor of a lab host.
const THREADS: usize = 4;

/// The kernel's name of a simulator's thread, before the device's name
/// (drivers/vdpa/vdpa_sim/vdpa_sim.c).
const SIMULATOR: &str = "vDPA sim worker";

/// The start of the kernel's name of a worker, and its end after the worker has served the lab NIC
/// (workqueue.c: `wq_worker_comm`).
const WORKER: &str = "kworker/";
const LAB_NIC: &str = "labnic";

/// A VMM's names for the thread that relays a device's queues, and for its own process.
const RELAY: &str = "relay";
const VMM: &str = "bellhop";

/// The nice value of serving threads under load (sched(7)): the maximum, or they are hardly ever
/// late.
const NICE: i32 = 19;

/// The nice value of the load. It runs well ahead of serving threads and well behind the threads
/// that migrate a guest, which must not take longer.
const LOAD_NICE: i32 = 10;

/// The scan interval: queues are relayed only once a machine is about to migrate.
const LOOK: Duration = Duration::from_millis(20);

/// The load threads. Dropping it ends them and restores the serving threads.
pub(crate) struct CpuLoad {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl CpuLoad {
    pub(crate) fn start() -> Self {
        set_servers(NICE).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || {
                    setpriority_process(Some(gettid()), LOAD_NICE).unwrap();
                    while !stop.load(Ordering::Relaxed) {}
                })
            })
            .collect();
        let stopped = Arc::clone(&stop);
        threads.push(std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // Threads that the scan misses are only less late.
                let _ = set_servers(NICE);
                std::thread::sleep(LOOK);
            }
        }));
        Self { stop, threads }
    }
}

impl Drop for CpuLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They cannot have panicked.
            let _ = thread.join();
        }
        // The threads of an already deleted device need no change.
        let _ = set_servers(0);
    }
}

/// Sets the nice value of all threads that serve rings. It skips threads that exit meanwhile.
fn set_servers(nice: i32) -> io::Result<()> {
    for process in fs::read_dir("/proc")? {
        let process = process?.path();
        let name = name_of(&process);
        if name.starts_with(SIMULATOR) || name.starts_with(WORKER) && name.ends_with(LAB_NIC) {
            set(&process, nice);
        }
        if name == VMM {
            let threads = fs::read_dir(process.join("task")).into_iter().flatten();
            for thread in threads.flatten().map(|thread| thread.path()) {
                if name_of(&thread).starts_with(RELAY) {
                    set(&thread, nice);
                }
            }
        }
    }
    Ok(())
}

/// Empty for a thread that has exited.
fn name_of(task: &Path) -> String {
    let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn set(task: &Path, nice: i32) {
    let id = task
        .file_name()
        .and_then(|name| name.to_str()?.parse().ok());
    if let Some(id) = id.and_then(Pid::from_raw) {
        // On Linux this also works for a single thread (setpriority(2), "C library/kernel
        // differences").
        let _ = setpriority_process(Some(id), nice);
    }
}
