//! A host whose processors others want, too.
//!
//! Owns threads that do nothing, and how long those who serve rings wait behind them: the simulator's own threads, the lab
//! NIC's workers, and the relays of VMMs. A device that comes late is an ordinary one; these are otherwise done with whatever they are given
//! before a guest can be stopped.

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

/// What the kernel calls a simulator's thread, before the device's name (drivers/vdpa/vdpa_sim/vdpa_sim.c).
const SIMULATOR: &str = "vDPA sim worker";

/// What the kernel calls a worker, and how that ends once it has worked for the lab NIC (workqueue.c: `wq_worker_comm`).
const WORKER: &str = "kworker/";
const LAB_NIC: &str = "labnic";

/// What a VMM calls the thread that relays a device's queues, and its own process.
const RELAY: &str = "relay";
const VMM: &str = "bellhop";

/// How nice they are meanwhile (sched(7)): as nice as can be, or they are hardly ever late.
const NICE: i32 = 19;

/// How nice the crowd is: far before those who serve rings, and far behind who moves a guest, which is not to take longer.
const CROWD_NICE: i32 = 10;

/// How often new ones are looked for: queues are relayed only once a machine is to move.
const LOOK: Duration = Duration::from_millis(20);

/// The threads. They end with it, and those who serve rings are as they were.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    pub(crate) fn gather() -> Self {
        set_servers(NICE).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || {
                    setpriority_process(Some(gettid()), CROWD_NICE).unwrap();
                    while !stop.load(Ordering::Relaxed) {}
                })
            })
            .collect();
        let stopped = Arc::clone(&stop);
        threads.push(std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // Those that are not found would only be less late.
                let _ = set_servers(NICE);
                std::thread::sleep(LOOK);
            }
        }));
        Self { stop, threads }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They cannot have panicked.
            let _ = thread.join();
        }
        // A device that is deleted already needs it no more.
        let _ = set_servers(0);
    }
}

/// Sets how nice all are who serve rings. Who ends meanwhile is left out.
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

/// Of one that ended meanwhile, nothing.
fn name_of(task: &Path) -> String {
    let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn set(task: &Path, nice: i32) {
    let id = task
        .file_name()
        .and_then(|name| name.to_str()?.parse().ok());
    if let Some(id) = id.and_then(Pid::from_raw) {
        // On Linux also of one thread (setpriority(2), "C library/kernel differences").
        let _ = setpriority_process(Some(id), nice);
    }
}
