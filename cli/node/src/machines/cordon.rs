//! Whether the node takes new VMs. A file keeps that across restarts of the daemon.
//!
//! Owns the file and the lock: a creation or an arrival that races with the cordon ends before the
//! cordon, or is refused.

use std::fs::{self, File};
use std::io::ErrorKind;

use parking_lot::RwLockReadGuard;

use super::Machines;
use crate::error::Error;

impl Machines {
    /// Has this node take no new VMs. Waits for creations in progress, and for arrivals until their
    /// process waits for the guest.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn cordon(&self) -> Result<(), Error> {
        let _alone = self.admission.write();
        let kept = File::create(self.paths.cordon()).and_then(|file| file.sync_all());
        kept.map_err(Error::context("cannot cordon the node"))
    }

    /// Has this node take new VMs again.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn uncordon(&self) -> Result<(), Error> {
        let _alone = self.admission.write();
        match fs::remove_file(self.paths.cordon()) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(Error::context("cannot uncordon the node")),
        }
    }

    /// Fails if this node takes no new VMs. It is not cordoned until the result is dropped.
    pub(super) fn admit(&self) -> Result<RwLockReadGuard<'_, ()>, Error> {
        let admitted = self.admission.read();
        if !self.paths.cordon().exists() {
            return Ok(admitted);
        }
        let message = "this node is cordoned: it takes no new virtual machines";
        let error = Error::conflict("cordoned", message);
        Err(error.hint("`bellhop node uncordon`, or DELETE /v1/cordon, has it take new ones again"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::context::Node;

    #[tokio::test]
    async fn a_cordon_waits_for_new_vms_in_progress_and_refuses_later_ones() {
        let name = format!("node-admission-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let node = Node::below(&directory);
        let machines = &node.machines;
        let one = machines.admit().unwrap();
        // Creations do not wait for each other.
        let other = machines.admit().unwrap();
        let (sender, cordoned) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || sender.send(machines.cordon()));
            drop(one);
            let early = cordoned.recv_timeout(Duration::from_millis(100));
            assert!(early.is_err(), "the cordon does not wait");
            assert!(!node.paths.cordon().exists());
            drop(other);
            cordoned.recv().unwrap().unwrap();
            assert_eq!(machines.admit().unwrap_err().answer().1, "cordoned");
        });
        machines.uncordon().unwrap();
        drop(machines.admit().unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }
}
