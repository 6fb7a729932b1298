//! A device that the host removes while a VMM has it open.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may wait for the VMM.
const LIMIT: Duration = Duration::from_secs(5);

/// Makes the host remove a device, on a thread of its own: the kernel waits for the VMM in a sleep
/// that no signal ends.
#[track_caller]
pub(crate) fn ends(what: &str, remove: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let begin = Instant::now();
    let _ = thread::spawn(move || {
        remove();
        // The test may have given up.
        let _ = done.send(());
    });
    let ended = ended.recv_timeout(LIMIT);
    assert!(
        ended.is_ok(),
        "{what}: the kernel still waits after {LIMIT:?}"
    );
    println!("{what}: {:?}", begin.elapsed());
}
