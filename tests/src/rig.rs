//! Rigs: what hardware the lab host has, and what it loads for it.
//!
//! Owns the table from a rig to QEMU arguments, kernel parameters and modules.
//! A new rig is a new variant here and nothing elsewhere.

use crate::agent::protocol::Module;
use crate::sim::Mapping;
use std::path::Path;

/// A lab host's equipment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Rig {
    /// The kernel's vDPA simulator, network and block; no devices of QEMU's.
    #[default]
    Sim,
}

impl Rig {
    /// QEMU arguments for the rig's devices.
    pub fn qemu_arguments(self) -> Vec<String> {
        match self {
            Self::Sim => Vec::new(),
        }
    }

    /// Additions to the lab host's kernel command line.
    pub fn kernel_parameters(self) -> &'static str {
        match self {
            // Without huge pages the host's memory gets so fragmented that a
            // guest's does not fit in the default of 2048 contiguous pieces.
            Self::Sim => "vhost_vdpa.max_iotlb_entries=65536",
        }
    }

    /// Modules that the lab host loads at start. `built` is the directory of
    /// the modules that the lab builds itself.
    pub fn modules(self, built: &Path) -> Vec<Module> {
        let stock = |name: &str| Module::Stock(name.to_owned());
        let file_with = |name: &str, parameters: String| {
            Module::File(built.join(name).to_string_lossy().into_owned(), parameters)
        };
        let file = |name: &str| file_with(name, String::new());
        match self {
            Self::Sim => vec![
                stock("vhost_vdpa"),
                file("vringh.ko"),
                file_with("vdpa_sim.ko", Mapping::DEFAULT.parameters()),
                file("vdpa_sim_net.ko"),
                file("vdpa_sim_blk.ko"),
                stock("vduse"),
            ],
        }
    }
}
