//! Rigs: what hardware the lab host has, and what it loads for it.
//!
//! Owns the table from a rig to QEMU arguments, kernel parameters and modules.
//! A new rig is a new variant here and nothing elsewhere.

use crate::agent::protocol::Module;
use std::path::Path;

/// A lab host's equipment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Rig {
    /// The kernel's vDPA simulator, network and block; no devices of QEMU's.
    #[default]
    Sim,
    /// The lab NIC (tests/kmod): every ability of a vDPA device, by parameter.
    Labnic,
}

impl Rig {
    /// QEMU arguments for the rig's devices.
    pub fn qemu_arguments(self) -> Vec<String> {
        match self {
            Self::Sim | Self::Labnic => Vec::new(),
        }
    }

    /// Additions to the lab host's kernel command line.
    pub fn kernel_parameters(self) -> &'static str {
        match self {
            Self::Sim | Self::Labnic => "",
        }
    }

    /// Modules that the lab host loads at start. `built` is the directory of
    /// the modules that the lab builds itself.
    pub fn modules(self, built: &Path) -> Vec<Module> {
        let stock = |name: &str| Module::Stock(name.to_owned());
        let file = |name: &str| {
            Module::File(
                built.join(name).to_string_lossy().into_owned(),
                String::new(),
            )
        };
        match self {
            Self::Sim => vec![
                stock("vhost_vdpa"),
                file("vringh.ko"),
                file("vdpa_sim.ko"),
                file("vdpa_sim_net.ko"),
                file("vdpa_sim_blk.ko"),
                stock("vduse"),
            ],
            Self::Labnic => vec![stock("vhost_vdpa"), file("vringh.ko"), file("labnic.ko")],
        }
    }
}
