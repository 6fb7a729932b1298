//! A guest rebinds its driver, loses its link and reboots repeatedly while its peer sends it
//! frames, on either rig. Nothing leaks, and traffic continues afterwards.
//!
//! The peer sends a steady 1,000 frames per second: many per rebind. Frames at full speed starve an
//! emulated guest.

use lab::endurance::{SteadyLine, cycles, same_cost, steady_log};
use lab::guest::{BellhopArguments, Guest};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use std::path::Path;
use std::time::{Duration, Instant};

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(3600);
const SILENCE: Duration = Duration::from_secs(60);
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// One guest's device.
#[derive(Clone, Copy)]
pub(crate) struct End<'a> {
    pub(crate) path: &'a Path,
    pub(crate) mac: &'a str,
}

/// The guest under test and the peer that sends it frames.
struct Pair<'a> {
    guest: Guest,
    peer: Guest,
    ends: [End<'a>; 2],
}

/// Frames that the guest sends after each rebind (`REBIND_FRAMES` of lab-guest).
const FRAMES_PER_REBIND: u32 = 10;

/// Frames per second that the peer sends.
const RATE: u32 = 1000;

/// No test here depends on the guest's memory size.
const MEMORY: &str = "128M";

fn start(end: End<'_>, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
        .memory(MEMORY)
        .silence(SILENCE)
        .argument("--log-level", "debug")
        .argument("--vdpa", &format!("path={},id=nic", end.path.display()));
    Guest::start(&arguments).unwrap()
}

impl<'a> Pair<'a> {
    /// Boots both.
    fn start(ends: [End<'a>; 2], processors: u32) -> Self {
        let mut pair = Self {
            guest: start(ends[0], processors),
            peer: start(ends[1], 1),
            ends,
        };
        pair.warm_up();
        pair
    }

    /// Exchanges frames and rebinds, so that everything allocated on first use exists.
    fn warm_up(&mut self) {
        self.exchange();
        self.flooded(5, |pair| pair.rebind(5));
        self.exchange();
    }

    /// Powers the guest off, checks its VMM's log, and boots another one on the same device.
    fn replace_guest(self, processors: u32, machine_resets: u32, device_resets: u32) -> Self {
        let Self { guest, peer, ends } = self;
        end(guest, machine_resets, device_resets);
        let mut pair = Self {
            guest: start(ends[0], processors),
            peer,
            ends,
        };
        pair.warm_up();
        pair
    }

    fn exchange(&mut self) {
        let frames = Frames {
            count: 200,
            size: 256,
            window: 16,
        };
        let mac = self.ends[1].mac;
        exchange_between(&mut self.guest, &mut self.peer, mac, frames).unwrap();
    }

    /// Runs `act` while the peer sends. The flood ends when the frames of this many rebinds have
    /// reached the peer.
    fn flooded(&mut self, rebinds: u32, act: impl FnOnce(&mut Self)) {
        let wanted = rebinds * FRAMES_PER_REBIND;
        let flood = format!(
            "flood {} 256 to {} until {wanted} at {RATE}",
            LIMIT.as_secs(),
            self.ends[0].mac,
        );
        self.peer.listen(&flood).unwrap();
        act(self);
        let flooded = self.peer.answer(&flood, LIMIT).unwrap();
        assert_eq!(flooded["corrupt"], 0, "{flooded}");
        assert!(flooded["tx"].as_u64() >= Some(wanted.into()), "{flooded}");
        let heard = flooded["others"].as_u64();
        assert!(heard >= Some(wanted.into()), "{flooded}");
    }

    fn rebind(&mut self, times: u32) {
        let rebind = format!("rebind {times} to {}", self.ends[1].mac);
        let rebound = self.guest.command_within(&rebind, LIMIT).unwrap();
        assert_eq!(rebound["rebinds"], times, "{rebound}");
        // The peer stops at the guest's last frame: the last conversation may be shorter.
        let lost = rebound["lost"].as_u64().unwrap();
        assert!(lost < FRAMES_PER_REBIND.into(), "{rebound}");
        assert_eq!(rebound["corrupt"], 0, "{rebound}");
    }

    fn reboot(&mut self) {
        self.guest.command("reboot").unwrap();
        let ready = self.guest.wait_ready(SILENCE).unwrap();
        assert_eq!(ready["nics"][0]["mac"], self.ends[0].mac);
    }

    fn wait_for_carrier(&mut self, up: bool) {
        let begin = Instant::now();
        loop {
            let shown = self.guest.command("link").unwrap();
            if shown["nics"][0]["carrier"] == u64::from(up) {
                return;
            }
            assert!(begin.elapsed() < LINK_LIMIT, "{shown}");
        }
    }

    /// Runs `act` while the peer sends, then this many rebinds, and compares the VMM's account
    /// before and after.
    fn endure(&mut self, rebinds: u32, act: impl FnOnce(&mut Self)) {
        let before = cost(self.guest.pid()).unwrap();
        self.flooded(rebinds, |pair| {
            act(pair);
            pair.rebind(rebinds);
        });
        self.exchange();
        same_cost(&before, &cost(self.guest.pid()).unwrap()).unwrap();
    }
}

/// Checks the VMM's log of this many resets, and powers the guest off.
fn end(guest: Guest, machine_resets: u32, device_resets: u32) {
    let line = |what, skipped, least: u32| SteadyLine {
        what,
        skipped,
        least: usize::try_from(least).unwrap(),
    };
    // A device's first reset is the one of the driver that finds it.
    let lines = [
        line("machine reset", 0, machine_resets),
        line("vDPA device reset device=nic", 1, device_resets),
    ];
    steady_log(&guest.console(), &lines).unwrap();
    assert_eq!(guest.power_off().unwrap().code(), Some(0));
}

/// Rebinds and link changes of a guest with two processors, then reboots of one with one processor.
/// More emulated processors sometimes hang at a reboot (tests/README.md).
pub(crate) fn leak_nothing(ends: [End<'_>; 2], set_link: impl Fn(bool)) {
    let cycles = cycles().unwrap();
    let mut pair = Pair::start(ends, 2);
    pair.endure(cycles, |_| ());
    pair.endure(1, |pair| {
        for _ in 0..cycles {
            for up in [false, true] {
                set_link(up);
                pair.wait_for_carrier(up);
            }
        }
    });

    let mut pair = pair.replace_guest(1, 0, cycles + 1);
    // The first reset of the machine also allocates.
    pair.reboot();
    pair.endure(1, |pair| {
        for _ in 0..cycles {
            pair.reboot();
        }
    });
    let Pair { guest, peer, .. } = pair;
    end(guest, cycles + 1, cycles + 2);
    assert!(peer.power_off().unwrap().success());
}
