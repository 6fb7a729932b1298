//! A guest that sends frames as fast as it can, and the counters around a part of that time.
//!
//! The frames go to an address that no device has. So the simulator takes them and sends none back,
//! and the guest maps one buffer for each frame. The device counts the frames, and the host's clock
//! measures the time: neither depends on the VMM.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::peer::{self, Nic};
use crate::api::Client;
use crate::error::{Error, Result};
use crate::figures::per_second;
use crate::guest::{BellhopArguments, Guest};
use crate::sim::SimDevice;
use crate::temp_path::TempPath;
use crate::traffic;

/// The NICs' MAC addresses. No zero bytes: the simulator compares addresses like C strings.
const MACS: [&str; 2] = ["52:54:5e:11:59:01", "52:54:5e:11:59:02"];
const SINK: &str = "52:54:5e:11:59:7f";
const MTU: u16 = 1500;

/// Bytes of a frame, with its Ethernet header.
const SIZE: u32 = 64;

/// Seconds for which the guest sends. The part that counts begins after `SETTLE` and takes `PART`;
/// the rest is for reading the counters.
const SENDING: u64 = 5;
const SETTLE: Duration = Duration::from_millis(300);
const PART: Duration = Duration::from_secs(3);

/// How long the guest may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How long a boot may be silent, and how long the NIC's driver may wait for the IOMMU's.
const SILENCE: Duration = Duration::from_secs(60);
const PROBE_LIMIT: Duration = Duration::from_secs(30);

/// What stands between the guest's driver and its NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Setup {
    /// No IOMMU.
    Plain,
    /// An IOMMU whose NIC bypasses it (`iommu.passthrough=1`).
    Passthrough,
    /// The guest's kernel maps each buffer, and unmaps many at once later.
    Lazy,
    /// The guest's kernel unmaps each buffer at once.
    Strict,
    /// An application in the guest has mapped its memory once.
    Userspace,
    /// The same application uses physical addresses, without an IOMMU.
    PlainUserspace,
}

impl Setup {
    fn kernel_words(self) -> &'static str {
        match self {
            Self::Plain | Self::PlainUserspace => "",
            Self::Passthrough => "iommu.passthrough=1",
            Self::Lazy | Self::Userspace => "iommu.passthrough=0 iommu.strict=0",
            Self::Strict => "iommu.passthrough=0 iommu.strict=1",
        }
    }

    /// The type of the NIC's IOMMU group in the guest, while its kernel drives the NIC.
    fn group(self) -> Option<&'static str> {
        match self {
            Self::Plain | Self::PlainUserspace => None,
            Self::Passthrough => Some("identity"),
            Self::Lazy | Self::Userspace => Some("DMA-FQ"),
            Self::Strict => Some("DMA"),
        }
    }
}

/// What one guest did in one part of a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) frames: u32,
    pub(super) elapsed: Duration,
    /// Kicks of the IOMMU's request queue, and exits to the VMM by accesses to memory.
    pub(super) kicks: u64,
    pub(super) exits: u64,
}

impl Part {
    pub(super) fn frames_per_second(&self) -> f64 {
        per_second(self.frames, self.elapsed)
    }
}

/// A VMM with its guest and the guest's NIC. Fields are dropped in this order.
#[derive(Debug)]
pub(super) struct Sender {
    guest: Guest,
    /// The API of a Bellhop.
    api: Option<Client>,
    _socket: Option<TempPath>,
    device: SimDevice,
    nic: &'static str,
}

impl Sender {
    /// Boots a guest of Bellhop.
    ///
    /// # Errors
    /// Those of [`Guest::start`]; [`Error::Invalid`] if the guest uses the IOMMU in another way.
    pub(super) fn bellhop(name: &str, setup: Setup) -> Result<Self> {
        let device = SimDevice::net(name, MACS[0], MTU)?;
        let socket = TempPath::new(name);
        let behind = setup.group().map_or("off", |_| "on");
        let nic = format!("path={},iommu={behind}", device.path().display());
        let arguments = guest_of(setup)?
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.text());
        let guest = Guest::start(&arguments)?;
        let mut sender = Self {
            guest,
            api: Some(Client::new(socket.path())),
            _socket: Some(socket),
            device,
            nic: "eth0",
        };
        sender.come_up(setup)?;
        Ok(sender)
    }

    /// Boots the same guest with QEMU.
    ///
    /// # Errors
    /// As [`Sender::bellhop`].
    pub(super) fn qemu(program: &Path, name: &str, setup: Setup) -> Result<Self> {
        let device = SimDevice::net(name, MACS[1], MTU)?;
        let arguments = guest_of(setup)?;
        let nic = Nic {
            device: device.path(),
            mac: MACS[1],
            shadowed: false,
            iommu: true,
        };
        let guest = Guest::start_command(|| peer::command(program, &arguments, nic), SILENCE)?;
        let mut sender = Self {
            guest,
            api: None,
            _socket: None,
            device,
            nic: "eth0",
        };
        sender.come_up(setup)?;
        Ok(sender)
    }

    /// Waits for the NIC's driver, which waits for the IOMMU's.
    fn come_up(&mut self, setup: Setup) -> Result<()> {
        let begin = Instant::now();
        loop {
            let info = self.guest.command("info")?;
            if let Some(nic) = info["nics"].get(0) {
                if nic["iommu"].as_str() == setup.group() {
                    break;
                }
                let why = format!("{setup:?} is not the type of the NIC's group: {nic}");
                return Err(Error::invalid("the guest", why));
            }
            if begin.elapsed() > PROBE_LIMIT {
                return Err(Error::invalid(
                    "the guest",
                    format!("it has no NIC: {info}"),
                ));
            }
            sleep(Duration::from_millis(200));
        }
        self.guest.command("up eth0")?;
        if matches!(setup, Setup::Userspace | Setup::PlainUserspace) {
            let started = self.guest.command("vfio-on")?;
            if started["translated"] != setup.group().is_some() {
                return Err(Error::invalid("the guest's driver", started.to_string()));
            }
            self.nic = "vfio";
        }
        Ok(())
    }

    /// Lets the guest send and measures a part of it.
    ///
    /// # Errors
    /// Those of [`Guest::command`]; [`Error::Invalid`] if the guest may have stopped before the
    /// counters were read, or sent nothing.
    pub(super) fn part(&mut self) -> Result<Part> {
        let flood = format!("flood {SENDING} {SIZE} {} to {SINK}", self.nic);
        let sending = Instant::now();
        self.guest.listen(&flood)?;
        sleep(SETTLE);
        let (begin, before) = (Instant::now(), self.counters()?);
        sleep(PART);
        let (elapsed, after) = (begin.elapsed(), self.counters()?);
        let late = sending.elapsed() > Duration::from_secs(SENDING);
        self.guest.answer(&flood, STOP_LIMIT)?;
        let difference = |counter: fn(&Counters) -> u64| counter(&after) - counter(&before);
        let frames = u32::try_from(difference(|counters| counters.frames)).unwrap_or(u32::MAX);
        if late || frames == 0 {
            let why = format!("it sent {frames} frames; its counters were late: {late}");
            return Err(Error::invalid("the guest", why));
        }
        Ok(Part {
            frames,
            elapsed,
            kicks: difference(|counters| counters.kicks),
            exits: difference(|counters| counters.exits),
        })
    }

    fn counters(&self) -> Result<Counters> {
        let frames = traffic::packets(&self.device)?.transmitted;
        let Some(api) = &self.api else {
            return Ok(Counters {
                frames,
                kicks: 0,
                exits: 0,
            });
        };
        let metrics = api.get("/v1/metrics")?;
        Ok(Counters {
            frames,
            // A VM without an IOMMU has none.
            kicks: metric(&metrics, "bellhop_iommu_total{what=\"kicks\"}").unwrap_or(0),
            exits: metric(&metrics, "bellhop_kvm_total{counter=\"mmio_exits\"}")
                .ok_or_else(|| Error::invalid("the metrics", "they have no mmio_exits"))?,
        })
    }

    /// Switches the guest off.
    ///
    /// # Errors
    /// Those of [`Guest::power_off`].
    pub(super) fn power_off(self) -> Result<()> {
        self.guest.power_off().map(drop)
    }
}

/// Counters since the guest's boot.
#[derive(Debug, Clone, Copy)]
struct Counters {
    frames: u64,
    kicks: u64,
    exits: u64,
}

/// Both VMMs' guest: Debian's kernel, as the small one has no driver for the IOMMU.
fn guest_of(setup: Setup) -> Result<BellhopArguments> {
    let arguments = BellhopArguments::stock()?.cmdline(setup.kernel_words());
    Ok(match setup {
        // The application has 128 MiB of large pages.
        Setup::Userspace | Setup::PlainUserspace => arguments.memory("512M"),
        _ => arguments,
    })
}

/// A value of the VM's metrics.
fn metric(metrics: &Value, name: &str) -> Option<u64> {
    let mut lines = metrics.as_str()?.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_found_by_their_whole_name() {
        let metrics = Value::String("a_total 1\na{what=\"b\"} 2\na 3\n".into());
        assert_eq!(metric(&metrics, "a"), Some(3));
        assert_eq!(metric(&metrics, "a{what=\"b\"}"), Some(2));
        assert_eq!(metric(&metrics, "b"), None);
    }
}
