//! `cargo lab setup`: prepares the lab, as the other verbs do first by themselves.

use crate::error::Result;
use crate::files;
use crate::process::output;
use crate::setup::{Lab, Needs};

/// Arguments of `cargo lab setup`.
#[derive(Debug, clap::Args)]
pub struct SetupArguments {}

/// Prepares the lab and prints its parts.
///
/// # Errors
/// Those of [`Lab::prepare`].
pub fn setup(_arguments: &SetupArguments) -> Result<u8> {
    let lab = Lab::prepare(&Needs::HOST_AND_GUEST)?;
    let version = output(
        lab.root
            .program("usr/bin/qemu-system-x86_64")
            .arg("--version"),
    )?;
    let version = String::from_utf8_lossy(&version);
    // Probes abilities instead of package versions, which vanish from mirrors.
    let devices = output(
        lab.root
            .program("usr/bin/qemu-system-x86_64")
            .arg("-L")
            .arg(lab.root.tree().join("usr/share/qemu"))
            .args(["-device", "virtio-net-pci,help"]),
    )?;
    let sriov = String::from_utf8_lossy(&devices).contains("sriov-pf=");
    println!("cache           {}", lab.cache.directory().display());
    println!("stock kernel    {}", lab.root.kernel_release()?);
    println!(
        "QEMU            {}",
        version.lines().next().unwrap_or_default()
    );
    println!(
        "SR-IOV          {}",
        if sriov {
            "QEMU emulates it for virtio-net"
        } else {
            "not in this QEMU: the mirror has no backports with a newer one"
        }
    );
    let modules: Vec<String> = files::list(lab.kernels.modules())?
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    println!("kernel modules  {}", modules.join(" "));
    if let Some(kernel) = lab.kernels.guest_kernel() {
        println!("guest kernel    {}", kernel.display());
    }
    println!("guest initramfs {}", lab.initramfs.guest.display());
    Ok(0)
}
