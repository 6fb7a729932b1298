//! The options of a VM, for `bellhop run` and `bellhop vm create`.

use std::path::PathBuf;

use bellhop_api::config::{
    CpuAffinity, CpuBaseline, CpuCount, DEFAULT_CMDLINE, DiskConfig, MemoryConfig, RingWatch,
    VmConfig,
};

/// A machine without its NICs, which the two name in different ways.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct MachineArguments {
    /// Kernel: an ELF with a PVH note (vmlinux) or a bzImage (vmlinuz)
    #[arg(long, value_name = "PATH")]
    pub(crate) kernel: Option<PathBuf>,

    /// Initial RAM file system
    #[arg(long, value_name = "PATH", requires = "kernel")]
    pub(crate) initramfs: Option<PathBuf>,

    /// Kernel command line
    #[arg(long, value_name = "STRING", default_value = DEFAULT_CMDLINE, requires = "kernel")]
    cmdline: String,

    /// Number of vCPUs, 1 to 32
    #[arg(long, value_name = "N", default_value = "1", requires = "kernel")]
    cpus: CpuCount,

    /// Processor that the guest is shown: host, or x86-64-v2, x86-64-v3, x86-64-v4 for a guest that is to move between
    /// hosts of one vendor that differ and all reach that level
    #[arg(long, value_name = "NAME", default_value_t, requires = "kernel")]
    cpu: CpuBaseline,

    /// CPUs of the host for each vCPU, one list per vCPU with colons between: 0-1:2 (vCPU 0 on CPUs 0 and
    /// 1, vCPU 1 on CPU 2)
    #[arg(long, value_name = "LISTS")]
    pub(crate) cpu_affinity: Option<CpuAffinity>,

    #[arg(
        long,
        value_name = "SIZE",
        default_value = "512M",
        requires = "kernel",
        help = "Guest memory: 512M, 4G, or size=4G[,hugepages=2M|1G][,host_numa_node=N] (only from that NUMA node)"
    )]
    memory: MemoryConfig,

    // `help` instead of a doc comment: rustdoc reads brackets as links.
    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        requires = "kernel",
        help = "A disk, raw: path=FILE[,id=NAME][,readonly=on][,rescue=on] (may be repeated)"
    )]
    disks: Vec<DiskConfig>,
}

impl MachineArguments {
    /// The VM's configuration, without NICs; `None`: no such option is given.
    pub(crate) fn config(&self) -> Option<VmConfig> {
        Some(VmConfig {
            kernel: self.kernel.clone()?,
            initramfs: self.initramfs.clone(),
            cmdline: self.cmdline.clone(),
            cpus: self.cpus,
            cpu: self.cpu,
            cpu_affinity: self.cpu_affinity.clone().unwrap_or_default(),
            memory: self.memory,
            vdpa: Vec::new(),
            disks: self.disks.clone(),
            ring_watch: RingWatch::default(),
        })
    }
}
