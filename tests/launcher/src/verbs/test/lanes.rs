//! Runs several lab hosts at once: one thread for each, which runs tasks from the queue.
//!
//! If a task cannot run at all (no host boots, a connection breaks), the whole run fails. Other
//! lanes finish what they have started, and the queue stops.

use super::harness::{Ended, LabRun};
use super::queue::{Queue, Task};
use crate::error::{Error, Result};
use crate::setup::Lab;
use std::sync::{Mutex, PoisonError};

/// Runs all waiting tasks.
///
/// # Errors
/// Those of [`LabRun::run`] and [`LabRun::end`], of the first lane that fails.
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

/// Runs one lane to its end.
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
