//! A guest whose NIC moves between a NIC without hardware and hardware, while it exchanges frames
//! with a peer on the bridge.

use std::path::Path;
use std::time::{Duration, Instant};

use lab::api::Client;
use lab::endurance::{cycles, soak};
use lab::guest::{BellhopArguments, Guest};
use lab::notice::{Kind, notice};
use lab::swnic::Swnic;
use lab::traffic::{Frames, exchange_with, flood_off_with_losses};
use serde_json::json;

use super::live;
use super::moving::echo::Echo;

/// The address of the peer.
pub(crate) const PEER: &str = "52:54:00:5e:55:02";
/// Frames of the flood that are in flight at once.
const WINDOW: u64 = 16;
const FRAMES: Frames = Frames {
    count: 200,
    size: 590,
    window: WINDOW,
};
/// The longest wait for frames after a swap.
const LIMIT: Duration = Duration::from_secs(20);
/// Swaps of a soak.
const SOAK: u32 = 50;

/// How often a NIC moves in a row: an even number.
pub(crate) fn swaps() -> u32 {
    let swaps = 2 * cycles().unwrap();
    if soak() {
        return swaps.max(SOAK);
    }
    notice(Kind::Thinned, format!("hot swaps: {swaps} of {SOAK}"));
    swaps
}

/// The NIC without hardware of the guest, and its peer on another one.
pub(crate) struct Software {
    pub(crate) nic: Swnic,
    #[allow(dead_code, reason = "most tests only keep it")]
    pub(crate) peer: Echo,
    #[allow(dead_code, reason = "most tests only keep it")]
    pub(crate) of_peer: Swnic,
}

impl Software {
    /// The guest's NIC has this address, and these options.
    pub(crate) fn start(bridge: &str, mac: &str, options: &[&str]) -> Self {
        let on_bridge = |mac| ["--bridge", bridge, "--mtu", "1500", "--mac", mac];
        let words = [&on_bridge(mac)[..], options].concat();
        let nic = Swnic::start("lab-sw0", &words).unwrap();
        let of_peer = Swnic::start("lab-sw1", &on_bridge(PEER)).unwrap();
        Self {
            nic,
            peer: Echo::start(of_peer.path(), PEER),
            of_peer,
        }
    }

    /// Frames that the guest has sent by it.
    fn carried(&self) -> u64 {
        self.nic.statistic("rx_packets").unwrap()
    }
}

/// The guest and the API of its VM.
pub(crate) struct Vm {
    pub(crate) guest: Guest,
    pub(crate) client: Client,
}

impl Vm {
    pub(crate) fn boot(arguments: BellhopArguments, path: &Path) -> Self {
        let socket = std::env::temp_dir().join("lab-swnic.socket");
        let nic = format!("path={},id=nic", path.display());
        let arguments = arguments
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.to_str().unwrap());
        let command = || {
            let mut command = arguments.command();
            // The log shows each announcement of the guest.
            command.env("BELLHOP_LOG", "info");
            command
        };
        let guest = Guest::start_command(command, Duration::from_secs(120)).unwrap();
        assert_eq!(guest.ready()["problems"], json!([]));
        let client = Client::new(&socket);
        Self { guest, client }
    }

    /// Frames to the peer and back, without a loss.
    #[track_caller]
    pub(crate) fn exchange(&mut self) {
        exchange_with(&mut self.guest, PEER, FRAMES).unwrap();
    }

    /// How often the guest has announced its address by a command.
    fn announced(&self) -> usize {
        self.guest.console().matches("has announced itself").count()
    }

    /// Moves the NIC so many times under a flood, in turn to the devices in `to`. Frames between
    /// the reset of one device and the start of the other are lost, as are those that switches send
    /// to the former port. The guest announces itself after each move.
    #[track_caller]
    pub(crate) fn move_under_flood(&mut self, swaps: u32, to: [&Path; 2], software: &Software) {
        let line = format!("flood-on 300 {WINDOW} eth0 to {PEER}");
        self.guest.command(&line).unwrap();
        for (round, path) in (0..swaps).zip(to.into_iter().cycle()) {
            std::thread::sleep(Duration::from_millis(u64::from(100 + 37 * (round % 8))));
            let announced = self.announced();
            live::swap_nic(&self.client, path);
            let (before, begin) = (software.carried(), Instant::now());
            while self.announced() == announced {
                assert!(
                    begin.elapsed() < LIMIT,
                    "the guest does not announce itself"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
            if path == software.nic.path() {
                while software.carried() == before {
                    assert!(begin.elapsed() < LIMIT, "the software NIC carries nothing");
                    std::thread::sleep(Duration::from_millis(10));
                }
            } else {
                std::thread::sleep(Duration::from_millis(200));
                assert_eq!(
                    software.carried(),
                    before,
                    "the guest left the software NIC"
                );
            }
        }
        flood_off_with_losses(&mut self.guest, u64::from(swaps) * 2 * WINDOW);
        self.exchange();
    }
}
