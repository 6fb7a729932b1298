//! A guest that sends frames as fast as it can, and the counters around that.
//!
//! The frames go to an address that no device has. So the simulator takes them and sends none back,
//! and the guest maps one buffer for each frame. The guest measures its rate once its queue is
//! full. The device must count as many frames as the guest has sent.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::api::Client;
use crate::error::{Error, Result};
use crate::figures::per_second;
use crate::files;
use crate::guest::{BellhopArguments, Guest};
use crate::sim::SimDevice;
use crate::temp_path::TempPath;
use crate::traffic;

/// The NIC's MAC address. No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:59:01";
const SINK: &str = "52:54:5e:11:59:7f";
const MTU: u16 = 1500;

/// Bytes of a frame, with its Ethernet header.
const SIZE: u32 = 64;

/// Seconds for which the guest sends. It reports the rate of the last three quarters.
const SENDING: u64 = 4;

/// How long the device may take for the frames that are left when the guest stops.
const REST: Duration = Duration::from_millis(300);

/// How long the guest may take for its answer.
const LIMIT: Duration = Duration::from_secs(120);

/// Lines of the console in an error, where a VMM reports its own.
const SHOWN: usize = 30;

/// How long a boot may be silent, and how long the NIC's driver may wait for the IOMMU's.
const SILENCE: Duration = Duration::from_secs(240);
const PROBE_LIMIT: Duration = Duration::from_secs(120);

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
    pub(super) frames_per_second: f64,
    /// Frames that the device took.
    pub(super) frames: u32,
    /// Kicks of the IOMMU's request queue, and exits to the VMM by accesses to memory.
    pub(super) kicks: u64,
    pub(super) exits: u64,
}

/// A VMM with its guest and the guest's NIC. Fields are dropped in this order.
#[derive(Debug)]
pub(super) struct Sender {
    guest: Guest,
    api: Client,
    _socket: TempPath,
    device: SimDevice,
    nic: &'static str,
}

impl Sender {
    /// Boots a guest.
    ///
    /// # Errors
    /// Those of [`Guest::start`]; [`Error::Invalid`] if the guest uses the IOMMU in another way.
    pub(super) fn start(name: &str, setup: Setup) -> Result<Self> {
        let device = SimDevice::net(name, MAC, MTU)?;
        let socket = TempPath::new(name);
        let behind = setup.group().map_or("off", |_| "on");
        let nic = format!("path={},iommu={behind}", device.path().display());
        let arguments = guest_of(setup)?
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.text());
        let guest = Guest::start(&arguments)?;
        let mut sender = Self {
            guest,
            api: Client::new(socket.path()),
            _socket: socket,
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

    /// The name of its device.
    pub(super) fn name(&self) -> &str {
        self.device.name()
    }

    /// Lets the guest send for some seconds.
    ///
    /// # Errors
    /// Those of [`Guest::command`]; [`Error::Invalid`] if frames did not reach the device.
    pub(super) fn part(&mut self) -> Result<Part> {
        let flood = format!("flood {SENDING} {SIZE} {} to {SINK}", self.nic);
        let before = self.counters()?;
        self.guest.listen(&flood)?;
        let answer = self.guest.answer(&flood, LIMIT)?;
        sleep(REST);
        let after = self.counters()?;
        let frames = after.frames - before.frames;
        let number = |value: &Value| value.as_u64().and_then(|value| u32::try_from(value).ok());
        match (
            number(&answer["steady"]["tx"]),
            answer["steady"]["elapsed_us"].as_u64(),
        ) {
            (Some(steady @ 1..), Some(elapsed)) if answer["tx"] == frames => Ok(Part {
                frames_per_second: per_second(steady, Duration::from_micros(elapsed)),
                frames: u32::try_from(frames).unwrap_or(u32::MAX),
                kicks: after.kicks - before.kicks,
                exits: after.exits - before.exits,
            }),
            _ => {
                let console = self.guest.console();
                let console = files::last_lines(&console, SHOWN);
                let why = format!("its device took {frames} frames: {answer}\n{console}");
                Err(Error::invalid("the guest", why))
            }
        }
    }

    fn counters(&self) -> Result<Counters> {
        let metrics = self.api.get("/v1/metrics")?;
        let value = |name: &str| metric(&metrics, name);
        Ok(Counters {
            frames: traffic::packets(&self.device)?.transmitted,
            // A VM without an IOMMU has none.
            kicks: value("bellhop_iommu_total{what=\"kicks\"}").unwrap_or(0),
            exits: value("bellhop_kvm_total{counter=\"mmio_exits\"}")
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
struct Counters {
    frames: u64,
    kicks: u64,
    exits: u64,
}

/// The guest: Debian's kernel, as the small one has no driver for the IOMMU.
fn guest_of(setup: Setup) -> Result<BellhopArguments> {
    let arguments = BellhopArguments::stock()?
        .cmdline(setup.kernel_words())
        .silence(SILENCE);
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
