//! QEMU as the VMM of the lab's guest, for comparison with Bellhop. This module owns QEMU's command
//! line.

use crate::error::{Error, Result};
use crate::guest::BellhopArguments;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAM: &str = "qemu-system-x86_64";

/// The guest's NIC.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nic<'a> {
    /// `/dev/vhost-vdpa-N`.
    pub(super) device: &'a Path,
    pub(super) mac: &'a str,
    /// Uses shadow virtqueues instead of the guest's own rings.
    pub(super) shadowed: bool,
    /// Is behind a virtio-iommu.
    pub(super) iommu: bool,
}

/// The path of QEMU.
///
/// # Errors
/// [`Error::Missing`] with the remedy.
pub(super) fn qemu() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join(PROGRAM))
        .find(|program| program.is_file())
        .ok_or_else(|| {
            Error::missing(
                format!("{PROGRAM} is not in PATH, and what is measured is compared with it"),
                "install QEMU for x86, or run it in the lab host, which has one",
            )
        })
}

/// QEMU with the lab's guest: 1 processor, 256 MiB, the console on standard input and output.
pub(super) fn command(program: &Path, guest: &BellhopArguments, nic: Nic<'_>) -> Command {
    let shadow = if nic.shadowed { ",x-svq=on" } else { "" };
    let mut command = without_nic(program, guest);
    let behind = if nic.iommu {
        command.args(["-device", "virtio-iommu-pci"]);
        ",iommu_platform=on,disable-legacy=on,page-per-vq=on"
    } else {
        ""
    };
    command
        .arg("-netdev")
        .arg(format!(
            "vhost-vdpa,id=nic,vhostdev={}{shadow}",
            escaped(nic.device)
        ))
        .arg("-device")
        .arg(format!(
            "virtio-net-pci,netdev=nic,romfile=,mac={}{behind}",
            nic.mac
        ));
    command
}

/// Like [`command`], with a function of the host by VFIO as its NIC.
pub(super) fn passed_through(program: &Path, guest: &BellhopArguments, address: &str) -> Command {
    let mut command = without_nic(program, guest);
    command
        .arg("-device")
        .arg(format!("vfio-pci,host={address},rombar=0"));
    command
}

/// Like [`command`], with a NIC on a tap, which QEMU creates: by QEMU itself, or by vhost-net.
pub(super) fn on_tap(program: &Path, guest: &BellhopArguments, tap: &str, vhost: bool) -> Command {
    let mut command = without_nic(program, guest);
    let vhost = if vhost { "on" } else { "off" };
    command
        .arg("-netdev")
        .arg(format!(
            "tap,id=nic,ifname={tap},script=no,downscript=no,vhost={vhost}"
        ))
        .args(["-device", "virtio-net-pci,netdev=nic,romfile="]);
    command
}

fn without_nic(program: &Path, guest: &BellhopArguments) -> Command {
    let mut command = Command::new(program);
    machine(&mut command)
        .args(["-name", "bench,debug-threads=on"])
        .args(["-chardev", "stdio,id=console,signal=off"])
        .args(["-serial", "chardev:console"])
        .arg("-kernel")
        .arg(guest.kernel_image())
        .arg("-initrd")
        .arg(guest.ramdisk())
        .args(["-append", guest.kernel_words()]);
    command
}

/// The command without its messages. QEMU writes several for each buffer that a guest unmaps in a
/// virtio-iommu. To read them would take processor time from the guest.
pub(super) fn quiet(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "exec \"$@\" 2>/dev/null", "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    shell
}

/// Like [`command`], with a monitor on the socket `monitor`. Its guest boots, or arrives from
/// another QEMU through the socket `incoming`.
pub(super) fn movable(
    program: &Path,
    guest: &BellhopArguments,
    nic: Nic<'_>,
    monitor: &Path,
    incoming: Option<&Path>,
) -> Command {
    let mut command = command(program, guest, nic);
    command
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", escaped(monitor)));
    if let Some(incoming) = incoming {
        command
            .arg("-incoming")
            .arg(format!("unix:{}", incoming.display()));
    }
    command
}

/// QEMU with the bare machine, which waits for its monitor's client on this socket.
pub(super) fn waiting(program: &Path, monitor: &Path) -> Command {
    let mut command = Command::new(program);
    machine(&mut command)
        .arg("-S")
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", escaped(monitor)));
    command
}

fn machine(command: &mut Command) -> &mut Command {
    command
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none"])
        .args(["-machine", "q35,accel=kvm,memory-backend=ram"])
        .args(["-cpu", "host", "-smp", "1", "-m", "256M"])
        // The simulator maps only shared memory of a file.
        .args(["-object", "memory-backend-memfd,id=ram,size=256M,share=on"])
}

/// A path in the value of a QEMU option: commas are doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
