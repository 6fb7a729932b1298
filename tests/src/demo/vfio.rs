//! The demo of VFIO on the SR-IOV rig: one guest has two virtual functions of one NIC. One of them
//! is a vDPA device, and the guest drives the other by VFIO. 1,000 checked frames go by each to a
//! second guest and back. It runs in the lab host.

use super::sriov::{FRAME_BYTES, FRAMES, SILENCE, WINDOW, start};
use super::{command_line, expect, number, say, table};
use crate::bench::print_json;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::process::output;
use crate::sriov::{SriovNic, VfDevice};
use crate::vmm_process;
use serde::Serialize;
use std::process::Command;
use std::time::Duration;

/// The frames by one of the NICs.
#[derive(Debug, Serialize)]
struct Way {
    /// The guest's own view.
    mac: String,
    frames_tx: u64,
    frames_rx: u64,
    corrupt: u64,
    /// From the first frame to the last, there and back.
    exchange_ms: u64,
}

/// The demo's measurements; the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    vdpa: Way,
    vfio: Way,
    /// Of the first guest's VMM: resident memory without guest RAM, pinned pages, threads.
    rss_outside_ram_kib: u64,
    pinned_kib: u64,
    vmm_threads: u64,
}

/// Runs the demo in the lab host.
///
/// # Errors
/// Those of the helpers, and [`Error::Invalid`] for an unexpected result.
pub(super) fn scenario(json: bool) -> Result<()> {
    let nic = SriovNic::enable(3)?;
    let devices = [VfDevice::add(nic.vf(0)?)?, VfDevice::add(nic.vf(1)?)?];
    let function = nic.vf(2)?;
    output(Command::new("modprobe").arg("vfio-pci"))?;
    function.bind("vfio-pci")?;
    let [own, other] = &devices;
    for device in &devices {
        let function = device.function().address();
        let path = device.path().display();
        say("vDPA device", &format!("{function} (vp-vdpa), {path}"));
    }
    say("VFIO", &format!("{} (vfio-pci)", function.address()));

    let arguments = BellhopArguments::stock()?
        .memory("256M")
        .vdpa(own.path())
        .argument("--vfio", &format!("host={}", function.address()))
        .show("guest 1 |");
    say("start", &command_line(&arguments));
    let mut first = Guest::start(&arguments)?;
    let mut second = start(other, "guest 2 |")?;
    let macs = [own.function().mac(), function.mac()];
    let peer = other.function().mac();
    let [vdpa, vfio] = macs.map(|mac| exchange(&mut first, &mut second, mac, &peer));
    let (vdpa, vfio) = (vdpa?, vfio?);

    let cost = vmm_process::cost(first.pid())?;
    for guest in [first, second] {
        let status = guest.power_off()?;
        say("power off", &status.to_string());
        expect("the VMM's exit", &status.code(), &Some(0))?;
    }
    function.bind("virtio-pci")?;
    let report = Report {
        vdpa,
        vfio,
        rss_outside_ram_kib: cost.rss_outside_ram_kib,
        pinned_kib: cost.pinned_kib,
        vmm_threads: cost.threads,
    };
    table(&rows(&report));
    print_json(json, &report)
}

/// Sends frames from the first guest's NIC with this address to the second guest, and back.
fn exchange(first: &mut Guest, second: &mut Guest, mac: String, peer: &str) -> Result<Way> {
    let link = first.command("link")?;
    let nics = link["nics"].as_array().map(Vec::as_slice);
    let mut nics = nics.unwrap_or_default().iter();
    let nic = nics.find(|nic| nic["mac"] == mac.as_str());
    let name = nic.and_then(|nic| nic["name"].as_str()).ok_or_else(|| {
        Error::invalid(
            "the guest",
            format!("it has no NIC with the address {mac}: {link}"),
        )
    })?;
    let echo = format!("echo {FRAMES} {SILENCE}");
    say(
        "frames",
        &format!("{FRAMES} of {FRAME_BYTES} random bytes by {name}, to guest 2 and back …"),
    );
    second.listen(&echo)?;
    let send = format!("frames {FRAMES} {FRAME_BYTES} {WINDOW} {name} to {peer}");
    let frames = first.command(&send)?;
    let echoed = second.answer(&echo, Duration::from_secs(2 * SILENCE))?;
    let way = Way {
        frames_tx: number(&frames, "tx")?,
        frames_rx: number(&frames, "rx")?,
        corrupt: number(&frames, "corrupt")? + number(&echoed, "corrupt")?,
        exchange_ms: number(&frames, "elapsed_us")? / 1000,
        mac,
    };
    expect("corrupt frames", &way.corrupt, &0)?;
    expect("frames that came back", &way.frames_rx, &FRAMES)?;
    Ok(way)
}

fn rows(report: &Report) -> [(&'static str, String); 5] {
    let way = |way: &Way| {
        format!(
            "{} / {} / {}, {} ms",
            way.frames_tx, way.frames_rx, way.corrupt, way.exchange_ms
        )
    };
    [
        ("vDPA: sent / received / corrupt", way(&report.vdpa)),
        ("VFIO: sent / received / corrupt", way(&report.vfio)),
        (
            "VMM memory outside guest RAM",
            format!("{} KiB", report.rss_outside_ram_kib),
        ),
        (
            "pinned for both devices",
            format!("{} KiB", report.pinned_kib),
        ),
        ("VMM threads (1 vCPU)", report.vmm_threads.to_string()),
    ]
}
