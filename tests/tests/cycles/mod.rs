//! What a guest does again and again while another one floods it, whichever
//! rig their devices are on: nothing leaks, and traffic goes on afterwards.

use lab::endurance::{SteadyLine, cycles, same_cost, steady_log};
use lab::guest::{BellhopArguments, Guest};
use lab::traffic::{Frames, exchange_between};
use lab::vmm_process::cost;
use std::path::Path;
use std::time::{Duration, Instant};

/// Far more than anything here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(3600);
const SILENCE: Duration = Duration::from_secs(60);
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// One guest's device.
#[derive(Clone, Copy)]
pub(crate) struct End<'a> {
    pub(crate) path: &'a Path,
    pub(crate) mac: &'a str,
}

/// A guest under test and the one that floods it.
struct Pair<'a> {
    guest: Guest,
    neighbour: Guest,
    ends: [End<'a>; 2],
}

/// Frames that the guest sends each time that its driver is back.
const FRAMES_PER_REBIND: u32 = 10;

fn start(end: End<'_>, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
        .silence(SILENCE)
        .argument("--log-level", "debug")
        .argument("--vdpa", &format!("path={},id=nic", end.path.display()));
    Guest::start(&arguments).unwrap()
}

impl<'a> Pair<'a> {
    /// Both are up, and the guest has rebound its driver, so that what is made on
    /// first use is there.
    fn start(ends: [End<'a>; 2], processors: u32) -> Self {
        let mut pair = Self {
            guest: start(ends[0], processors),
            neighbour: start(ends[1], 1),
            ends,
        };
        pair.exchange();
        pair.flooded(5, |pair| pair.rebind(5));
        pair.exchange();
        pair
    }

    fn exchange(&mut self) {
        let frames = Frames {
            count: 200,
            size: 256,
            window: 16,
        };
        let mac = self.ends[1].mac;
        exchange_between(&mut self.guest, &mut self.neighbour, mac, frames).unwrap();
    }

    /// Does something while the neighbour floods, until it has heard the frames
    /// of so many rebinds.
    fn flooded(&mut self, rebinds: u32, act: impl FnOnce(&mut Self)) {
        let flood = format!(
            "flood {} 256 to {} until {}",
            LIMIT.as_secs(),
            self.ends[0].mac,
            rebinds * FRAMES_PER_REBIND
        );
        self.neighbour.listen(&flood).unwrap();
        act(self);
        let flooded = self.neighbour.answer(&flood, LIMIT).unwrap();
        assert_eq!(flooded["corrupt"], 0, "{flooded}");
        let heard = flooded["others"].as_u64();
        assert!(
            heard >= Some(u64::from(rebinds * FRAMES_PER_REBIND)),
            "{flooded}"
        );
    }

    fn rebind(&mut self, times: u32) {
        let rebind = format!("rebind {times} to {}", self.ends[1].mac);
        let rebound = self.guest.command_within(&rebind, LIMIT).unwrap();
        assert_eq!(rebound["rebinds"], times, "{rebound}");
        assert_eq!(rebound["lost"], 0, "{rebound}");
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

    /// Does something under flood, and then so many rebinds; afterwards the
    /// accounts are as before.
    fn endure(mut self, machine_resets: u32, rebinds: u32, act: impl FnOnce(&mut Self)) {
        let before = cost(self.guest.pid()).unwrap();
        self.flooded(rebinds, |pair| {
            act(pair);
            pair.rebind(rebinds);
        });
        self.exchange();
        same_cost(&before, &cost(self.guest.pid()).unwrap()).unwrap();
        let line = |what, skipped, least: u32| SteadyLine {
            what,
            skipped,
            least: usize::try_from(least).unwrap(),
        };
        // A device's first reset is the driver's when it finds it.
        let lines = [
            line("machine reset", 0, machine_resets),
            line("vDPA device reset device=nic", 1, machine_resets + rebinds),
        ];
        steady_log(&self.guest.console(), &lines).unwrap();
        assert_eq!(self.guest.power_off().unwrap().code(), Some(0));
    }
}

/// The driver is taken off the device and put back.
pub(crate) fn rebinds(ends: [End<'_>; 2]) {
    Pair::start(ends, 2).endure(0, cycles().unwrap(), |_| ());
}

/// The guest boots again.
pub(crate) fn reboots(ends: [End<'_>; 2]) {
    let cycles = cycles().unwrap();
    // More processors hang now and then where they are emulated (tests/README.md).
    let mut pair = Pair::start(ends, 1);
    // A reset of the machine makes something on first use, too.
    pair.reboot();
    pair.endure(cycles + 1, 1, |pair| {
        for _ in 0..cycles {
            pair.reboot();
        }
    });
}

/// The cable is pulled and plugged in.
pub(crate) fn link_flaps(ends: [End<'_>; 2], set_link: impl Fn(bool)) {
    let cycles = cycles().unwrap();
    Pair::start(ends, 2).endure(0, 1, |pair| {
        for _ in 0..cycles {
            for up in [false, true] {
                set_link(up);
                pair.wait_for_carrier(up);
            }
        }
    });
}
