//! The state that every endpoint receives.

use std::sync::Arc;

use super::api::Permits;
use super::consoles::Consoles;
use super::events::Events;
use super::machines::Machines;
use super::paths::Paths;

/// The node.
#[derive(Debug)]
pub(super) struct Node {
    /// The daemon's directories.
    pub(super) paths: Paths,
    /// The node's events.
    pub(super) events: Arc<Events>,
    /// Limits requests to the kernel about NICs, devices and ports.
    pub(super) kernel_permits: Permits,
    /// Limits reads of logs and snapshots.
    pub(super) file_permits: Permits,
    /// Its VMs.
    pub(super) machines: Arc<Machines>,
    /// Clients of its VMs' consoles.
    pub(super) consoles: Consoles,
}

#[cfg(any(test, feature = "fuzz"))]
#[allow(clippy::unwrap_used, reason = "code of tests, which fuzz targets use")]
impl Node {
    /// A node with its files below this directory.
    pub(super) fn below(directory: &std::path::Path) -> Arc<Self> {
        Self::with_changes(directory).0
    }

    /// The same, and all changes of its VMs.
    pub(super) fn with_changes(
        directory: &std::path::Path,
    ) -> (
        Arc<Self>,
        Arc<parking_lot::Mutex<Vec<super::machines::Change>>>,
    ) {
        use super::machines::Change;
        use super::machines::spec::VmName;

        let paths = Paths::new(&directory.join("state"), &directory.join("run"));
        paths.make().unwrap();
        let changes = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let listener = changes.clone();
        let machines = Machines::open(
            super::store::Store::open(&paths.store()).unwrap(),
            paths.clone(),
            "boot".to_owned(),
            super::machines::sandbox::ProcessOptions::default(),
            None,
            super::peers::Peers::default(),
            Arc::new(move |_: &VmName, change: Change| listener.lock().push(change)),
        );
        let node = Self {
            paths,
            events: Arc::default(),
            kernel_permits: Permits::for_kernel(),
            file_permits: Permits::for_files(),
            machines: machines.unwrap(),
            consoles: Consoles::default(),
        };
        (Arc::new(node), changes)
    }
}
