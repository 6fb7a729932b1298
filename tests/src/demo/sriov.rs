//! The demo on the SR-IOV rig: two guests, each on a virtual function of one NIC, exchange frames.
//!
//! It creates virtual functions and binds them to vp-vdpa. 1,000 checked frames go from one guest
//! to the other and back. It pulls a cable and plugs it in again, and the guest sees both. Then
//! both guests switch off. It runs in the lab host.

use super::{command_line, expect, number, say, table, text};
use crate::bench::print_json;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::rig::VIRTUAL_FUNCTIONS;
use crate::sim::vdpa;
use crate::sriov::{SriovNic, VfDevice, set_link};
use crate::vmm_process::{self, Cost};
use serde::Serialize;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Frames, their size in bytes, and how many may be in flight at once.
pub(super) const FRAMES: u64 = 1000;
pub(super) const FRAME_BYTES: u32 = 512;
pub(super) const WINDOW: u32 = 32;

/// How long the echoing guest waits for a frame, in seconds.
pub(super) const SILENCE: u64 = 20;

/// How long a pulled cable may take to reach the guest.
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// Processors of each guest. The guest's driver would use that many queue pairs; here the demo
/// enables all pairs.
const PROCESSORS: u32 = 1;

/// The demo's measurements; the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    /// The number of virtual functions created.
    virtual_functions: usize,
    /// Queues of each vDPA device, and queue pairs that the guests use.
    queues: u16,
    queue_pairs: u64,
    /// The guests' own view.
    mac: [String; 2],
    /// Counted by the first guest: frames that it sent, and frames that returned to it.
    frames_tx: u64,
    frames_rx: u64,
    /// Counted by the second guest: frames received, intact, sent back.
    frames_echoed: u64,
    corrupt: u64,
    dropped: u64,
    /// From the first frame to the last, there and back.
    exchange_ms: u64,
    /// From pulling (plugging) the cable to the change of the guest's carrier.
    link_down_ms: u64,
    link_up_ms: u64,
    /// The uptime of each guest when its init was ready.
    guest_up_ms: [u64; 2],
    /// For each VMM: resident memory without guest RAM, pinned pages, threads.
    rss_outside_ram_kib: [u64; 2],
    pinned_kib: [u64; 2],
    vmm_threads: [u64; 2],
}

/// Runs the demo in the lab host.
///
/// # Errors
/// Those of the helpers, and [`Error::Invalid`] for an unexpected result.
pub(super) fn scenario(json: bool) -> Result<()> {
    let count = u32::try_from(VIRTUAL_FUNCTIONS).unwrap_or(u32::MAX);
    let nic = SriovNic::enable(count)?;
    let devices = [VfDevice::add(nic.vf(0)?)?, VfDevice::add(nic.vf(1)?)?];
    say("NIC", &format!("{count} virtual functions"));
    for device in &devices {
        let function = device.function();
        say(
            "vDPA device",
            &format!(
                "{} on {} (vp-vdpa), {} queues, {}",
                device.name(),
                function.address(),
                device.queues(),
                device.path().display()
            ),
        );
    }
    let shown = vdpa(&["mgmtdev", "show"])?;
    say("mgmtdev", String::from_utf8_lossy(&shown).trim_end());

    let mut first = start(&devices[0], "guest 1 |")?;
    let mut second = start(&devices[1], "guest 2 |")?;
    let macs = [mac_in(&mut first)?, mac_in(&mut second)?];
    for (mac, device) in macs.iter().zip(&devices) {
        let wanted = device.function().mac();
        expect("the MAC address in the guest", mac, &wanted)?;
    }
    let queue_pairs = u64::from(devices[0].queues().saturating_sub(1) / 2);
    for guest in [&mut first, &mut second] {
        let channels = guest.command(&format!("channels {queue_pairs}"))?;
        let used = number(&channels, "combined")?;
        expect("the queue pairs in use", &used, &queue_pairs)?;
    }
    say("guests use", &format!("{queue_pairs} queue pairs each"));

    let (frames, echoed) = exchange(&mut first, &mut second, &macs[1])?;
    let frames_tx = number(&frames, "tx")?;
    let frames_rx = number(&frames, "rx")?;
    let frames_echoed = number(&echoed, "echoed")?;
    let corrupt = number(&frames, "corrupt")? + number(&echoed, "corrupt")?;
    let exchange_ms = number(&frames, "elapsed_us")? / 1000;
    say(
        "",
        &format!(
            "guest 1 sent {frames_tx}, guest 2 echoed {frames_echoed}, guest 1 received \
             {frames_rx}, corrupt {corrupt}, in {exchange_ms} ms"
        ),
    );
    expect("corrupt frames", &corrupt, &0)?;
    expect("frames that came back", &frames_rx, &FRAMES)?;

    let link = devices[0].function().link();
    let link_down_ms = link_reaches_the_guest(&mut first, &link, false)?;
    let link_up_ms = link_reaches_the_guest(&mut first, &link, true)?;
    say(
        "cable",
        &format!(
            "{link} pulled: guest 1 noticed within {link_down_ms} ms; plugged in: {link_up_ms} ms"
        ),
    );

    let costs = [
        vmm_process::cost(first.pid())?,
        vmm_process::cost(second.pid())?,
    ];
    let guest_up_ms = [
        number(first.ready(), "uptime_ms")?,
        number(second.ready(), "uptime_ms")?,
    ];
    for guest in [first, second] {
        let status = guest.power_off()?;
        say("power off", &status.to_string());
        expect("the VMM's exit", &status.code(), &Some(0))?;
    }
    let of_both = |value: fn(&Cost) -> u64| costs.each_ref().map(value);
    let report = Report {
        virtual_functions: VIRTUAL_FUNCTIONS,
        queues: devices[0].queues(),
        queue_pairs,
        mac: macs,
        frames_tx,
        frames_rx,
        frames_echoed,
        corrupt,
        dropped: frames_tx.saturating_sub(frames_rx),
        exchange_ms,
        link_down_ms,
        link_up_ms,
        guest_up_ms,
        rss_outside_ram_kib: of_both(|cost| cost.rss_outside_ram_kib),
        pinned_kib: of_both(|cost| cost.pinned_kib),
        vmm_threads: of_both(|cost| cost.threads),
    };
    table(&rows(&report));
    print_json(json, &report)
}

pub(super) fn start(device: &VfDevice<'_>, prefix: &'static str) -> Result<Guest> {
    let arguments = BellhopArguments::stock()?
        .memory("256M")
        .processors(PROCESSORS)
        .vdpa(device.path())
        .show(prefix);
    say("start", &command_line(&arguments));
    Guest::start(&arguments)
}

/// Sends frames from one guest to another and back. Returns the answers of both. `mac` is the
/// address of the second one.
pub(super) fn exchange(first: &mut Guest, second: &mut Guest, mac: &str) -> Result<(Value, Value)> {
    let echo = format!("echo {FRAMES} {SILENCE}");
    let send = format!("frames {FRAMES} {FRAME_BYTES} {WINDOW} to {mac}");
    say(
        "frames",
        &format!("{FRAMES} of {FRAME_BYTES} random bytes, guest 1 to guest 2 and back …"),
    );
    second.listen(&echo)?;
    let frames = first.command(&send)?;
    let echoed = second.answer(&echo, Duration::from_secs(2 * SILENCE))?;
    Ok((frames, echoed))
}

/// Prints a guest's own view and returns its NIC's address.
pub(super) fn mac_in(guest: &mut Guest) -> Result<String> {
    let link = guest.command("link")?;
    say("guest's view", link["text"].as_str().unwrap_or_default());
    text(&link["nics"][0], "mac")
}

/// Milliseconds from the request to the guest's carrier, polling included.
fn link_reaches_the_guest(guest: &mut Guest, link: &str, up: bool) -> Result<u64> {
    set_link(link, up)?;
    let started = Instant::now();
    loop {
        let shown = guest.command("link")?;
        if number(&shown["nics"][0], "carrier").ok() == Some(u64::from(up)) {
            return Ok(u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX));
        }
        if started.elapsed() > LINK_LIMIT {
            let limit = LINK_LIMIT.as_secs();
            return Err(Error::invalid(
                "the guest's carrier",
                format!("it did not change within {limit} s"),
            ));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn rows(report: &Report) -> [(&'static str, String); 8] {
    let both = |values: &[u64; 2], unit: &str| format!("{} / {}{unit}", values[0], values[1]);
    [
        (
            "virtual functions / queues of each",
            format!("{} / {}", report.virtual_functions, report.queues),
        ),
        (
            "queue pairs used by each guest",
            report.queue_pairs.to_string(),
        ),
        (
            "frames sent / echoed / received",
            format!(
                "{} / {} / {}",
                report.frames_tx, report.frames_echoed, report.frames_rx
            ),
        ),
        (
            "dropped / corrupt",
            format!("{} / {}", report.dropped, report.corrupt),
        ),
        (
            "cable pulled / plugged in until guest sees",
            format!("{} / {} ms", report.link_down_ms, report.link_up_ms),
        ),
        (
            "VMM memory outside guest RAM",
            both(&report.rss_outside_ram_kib, " KiB"),
        ),
        ("pinned for the device", both(&report.pinned_kib, " KiB")),
        ("VMM threads (1 vCPU)", both(&report.vmm_threads, "")),
    ]
}
