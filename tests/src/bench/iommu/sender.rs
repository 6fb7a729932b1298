//! A guest that sends frames as fast as it can, and the counters around that.
//!
//! The frames go to an address that no device has. So the device takes them, and the guest maps one
//! buffer for each frame. The guest measures its rate once its queue is full. Its kernel counts the
//! frames that the device has used: all that the guest has sent, but those still in the queue.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::peer::{self, Nic};
use crate::api::Client;
use crate::error::{Error, Result};
use crate::figures::per_second;
use crate::files;
use crate::guest::{BellhopArguments, Guest};
use crate::sriov::VfDevice;
use crate::temp_path::TempPath;
use crate::traffic::{self, Frames};

/// An address that no device has.
const SINK: &str = "52:54:5e:11:59:7f";

/// Bytes of a frame, with its Ethernet header.
const SIZE: u32 = 64;

/// Seconds for which the guest sends. It reports the rate of the last three quarters.
const SENDING: u64 = 4;

/// The most frames that the device has not used yet when the guest stops: a whole queue.
const QUEUE: u32 = 256;

/// Frames to the other guest and back before the rounds.
const PROOF: Frames = Frames {
    count: 10,
    size: 64,
    window: 2,
};

/// The NIC that the guest's kernel drives.
const KERNEL_NIC: &str = "eth0";

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
    /// Frames that the guest sent.
    pub(super) frames: u32,
    /// Kicks of the IOMMU's request queue, and exits to the VMM by accesses to memory.
    pub(super) kicks: u64,
    pub(super) exits: u64,
}

/// A VMM with its guest, whose NIC is a virtual function.
#[derive(Debug)]
pub(super) struct Sender {
    guest: Guest,
    setup: Setup,
    /// The name and the address of its device.
    name: String,
    mac: String,
    nic: &'static str,
    /// The API of a Bellhop, and its socket.
    api: Option<(Client, TempPath)>,
}

impl Sender {
    /// Boots a guest of Bellhop.
    ///
    /// # Errors
    /// Those of [`Guest::start`]; [`Error::Invalid`] if the guest uses the IOMMU in another way.
    pub(super) fn bellhop(device: &VfDevice<'_>, setup: Setup) -> Result<Self> {
        let socket = TempPath::new(device.name());
        let behind = setup.group().map_or("off", |_| "on");
        let nic = format!("path={},iommu={behind}", device.path().display());
        let arguments = guest_of(setup)?
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.text());
        let guest = Guest::start(&arguments)?;
        let api = Client::new(socket.path());
        Self::come_up(guest, device, setup, Some((api, socket)))
    }

    /// Boots the same guest with QEMU.
    ///
    /// # Errors
    /// As [`Sender::bellhop`].
    pub(super) fn qemu(program: &Path, device: &VfDevice<'_>, setup: Setup) -> Result<Self> {
        let arguments = guest_of(setup)?;
        let mac = device.function().mac();
        let nic = Nic {
            device: device.path(),
            mac: &mac,
            shadowed: false,
            iommu: setup.group().is_some(),
        };
        let command = || peer::quiet(&peer::command(program, &arguments, nic));
        let guest = Guest::start_command(command, SILENCE)?;
        Self::come_up(guest, device, setup, None)
    }

    /// Waits for the NIC's driver, which waits for the IOMMU's.
    fn come_up(
        mut guest: Guest,
        device: &VfDevice<'_>,
        setup: Setup,
        api: Option<(Client, TempPath)>,
    ) -> Result<Self> {
        let begin = Instant::now();
        loop {
            let info = guest.command("info")?;
            if let Some(nic) = info["nics"].get(0) {
                if nic["iommu"].as_str() == setup.group() {
                    break;
                }
                let why = format!("{setup:?} is not the type of the NIC's group: {nic}");
                return Err(Error::invalid("the guest", why));
            }
            if begin.elapsed() > PROBE_LIMIT {
                let why = format!("it has no NIC: {info}");
                return Err(Error::invalid("the guest", why));
            }
            sleep(Duration::from_millis(200));
        }
        guest.command(&format!("up {KERNEL_NIC}"))?;
        Ok(Self {
            guest,
            setup,
            name: device.name().to_owned(),
            mac: device.function().mac(),
            nic: KERNEL_NIC,
            api,
        })
    }

    /// The name of its device.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends frames to another guest, which returns them.
    ///
    /// # Errors
    /// Those of [`traffic::exchange_between`].
    pub(super) fn exchange(&mut self, other: &mut Self) -> Result<()> {
        traffic::exchange_between(&mut self.guest, &mut other.guest, &other.mac, PROOF)
    }

    /// Starts the driver in userspace, if the setup has one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not use the IOMMU; those of [`Guest::command`].
    pub(super) fn start_application(&mut self) -> Result<()> {
        if matches!(self.setup, Setup::Userspace | Setup::PlainUserspace) {
            let started = self.guest.command("vfio-on")?;
            if started["translated"] != self.setup.group().is_some() {
                return Err(Error::invalid("the guest's driver", started.to_string()));
            }
            self.nic = "vfio";
        }
        Ok(())
    }

    /// Lets the guest send for some seconds.
    ///
    /// # Errors
    /// Those of [`Guest::command`]; [`Error::Invalid`] if the device did not use the frames.
    pub(super) fn part(&mut self) -> Result<Part> {
        let flood = format!("flood {SENDING} {SIZE} {} to {SINK}", self.nic);
        let before = self.counters()?;
        self.guest.listen(&flood)?;
        let answer = self.guest.answer(&flood, LIMIT)?;
        let after = self.counters()?;
        let number = |value: &Value| value.as_u64().and_then(|value| u32::try_from(value).ok());
        let frames = number(&answer["tx"]).unwrap_or_default();
        // The driver in userspace counts only what it sends. It waits for room in the queue, too.
        let used = match self.nic {
            KERNEL_NIC => number(&answer["statistics"]["tx_packets"]).unwrap_or_default(),
            _ => frames,
        };
        match (
            number(&answer["steady"]["tx"]),
            answer["steady"]["elapsed_us"].as_u64(),
        ) {
            (Some(steady @ 1..), Some(elapsed)) if frames.abs_diff(used) <= QUEUE => Ok(Part {
                frames_per_second: per_second(steady, Duration::from_micros(elapsed)),
                frames,
                kicks: after.kicks - before.kicks,
                exits: after.exits - before.exits,
            }),
            _ => {
                let console = self.guest.console();
                let console = files::last_lines(&console, SHOWN);
                let why = format!("its device did not take the frames: {answer}\n{console}");
                Err(Error::invalid("the guest", why))
            }
        }
    }

    /// What a Bellhop has counted so far.
    fn counters(&self) -> Result<Counters> {
        let Some((api, _)) = &self.api else {
            return Ok(Counters::default());
        };
        let metrics = api.get("/v1/metrics")?;
        let value = |name: &str| metric(&metrics, name);
        Ok(Counters {
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
#[derive(Default)]
struct Counters {
    kicks: u64,
    exits: u64,
}

/// Both VMMs' guest: Debian's kernel, as the small one has no driver for the IOMMU.
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
