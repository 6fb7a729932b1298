//! Several lab hosts at once: a thread for each, which runs what the queue hands out.
//!
//! What cannot be run at all (no host boots, a connection breaks) is an error of the whole
//! run: other lanes end what they have begun, and nothing more is handed out.

use super::harness::{Ended, LabRun};
use super::queue::{Queue, Task};
use crate::error::{Error, Result};
use crate::setup::Lab;
use std::sync::{Mutex, PoisonError};

/// Runs all that waits.
///
/// # Errors
/// Those of [`LabRun::run`] and [`LabRun::end`], of the first lane that has one.
pub(super) fn run(lab: &Lab, queue: Queue<Task<'_>>) -> Result<Ended> {
    let lanes = queue.lanes();
    let queue = Mutex::new(queue);
    let ended = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..lanes)
            .map(|number| {
                let queue = &queue;
                let run = LabRun::new(lab, u8::try_from(lanes).unwrap_or(u8::MAX));
                scope.spawn(move || lane(number, run, queue))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::invalid("a lane of tests", "it panicked")))
            })
            .collect::<Result<Vec<Ended>>>()
    })?;
    let mut all = Ended::default();
    for lane in ended {
        all.add(lane);
    }
    Ok(all)
}

/// One lane's life.
fn lane(number: usize, mut run: LabRun<'_>, queue: &Mutex<Queue<Task<'_>>>) -> Result<Ended> {
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || lock().next(number);
    while let Some(task) = next() {
        if let Err(error) = run.run(&task.harness, task.rig) {
            lock().stop();
            return Err(error);
        }
    }
    run.end()
}
