//! `cargo lab bench iommu`: measures the cost of a virtio-iommu in front of a guest's NIC, beside
//! QEMU's.
//!
//! ```text
//!   a comparison: two guests boot, each with a virtual function of its own, and exchange a few
//!                 frames; then the rounds
//!   a round:      one sends, the other rests  ->  the other sends, the first one rests
//! ```
//! The guests send as fast as they can. Which of them begins changes with each round. The ratio of
//! a round compares its two parts, and the median of all rounds counts.

mod sender;

use super::{peer, print_json, processors};
use crate::error::Result;
use crate::figures::{median, ratio, ratios, rounded};
use crate::sriov::{SriovNic, VfDevice};
use launcher::verbs::bench::IommuArguments;
use sender::{Part, Sender, Setup};
use serde::Serialize;

pub(super) fn measure(arguments: &IommuArguments) -> Result<()> {
    let qemu = peer::qemu()?;
    let nic = SriovNic::enable(2)?;
    let (own, other) = (VfDevice::add(nic.vf(0)?)?, VfDevice::add(nic.vf(1)?)?);
    let ours = |setup| Sender::bellhop(&own, setup);
    let plain = |setup| Sender::bellhop(&other, setup);
    let theirs = |setup| Sender::qemu(&qemu, &other, setup);
    let rounds = arguments.rounds;
    let _interrupts = processors::separate()?;
    let passthrough = (ours(Setup::Passthrough)?, plain(Setup::Plain)?);
    let passthrough = compare("passthrough", rounds, passthrough)?;
    let userspace = (ours(Setup::Userspace)?, plain(Setup::PlainUserspace)?);
    let userspace = compare("userspace", rounds, userspace)?;
    let lazy = (ours(Setup::Lazy)?, theirs(Setup::Lazy)?);
    let lazy = compare("lazy", rounds, lazy)?;
    let strict = (ours(Setup::Strict)?, theirs(Setup::Strict)?);
    let strict = compare("strict", rounds, strict)?;
    let measured = Measured {
        passthrough,
        userspace,
        lazy,
        strict,
    };
    measured.show(rounds);
    print_json(arguments.common.json, &measured.report())
}

/// All rounds of a comparison.
#[derive(Debug, Default)]
struct Compared {
    ours: Vec<Part>,
    others: Vec<Part>,
}

/// Measures two guests in turn, and switches them off.
fn compare(what: &str, rounds: u32, (mut ours, mut other): (Sender, Sender)) -> Result<Compared> {
    ours.exchange(&mut other)?;
    other.exchange(&mut ours)?;
    ours.start_application()?;
    other.start_application()?;
    let mut compared = Compared::default();
    for round in 1..=rounds {
        let mut turns = [
            (&mut ours, &mut compared.ours),
            (&mut other, &mut compared.others),
        ];
        if round % 2 == 0 {
            turns.reverse();
        }
        for (sender, parts) in turns {
            let part = sender.part()?;
            eprintln!(
                "  {what}, round {round} of {rounds}, {}: {:.0} frames/s; {} frames, {} kicks, \
                 {} exits",
                sender.name(),
                part.frames_per_second,
                part.frames,
                part.kicks,
                part.exits,
            );
            parts.push(part);
        }
    }
    ours.power_off()?;
    other.power_off()?;
    Ok(compared)
}

/// A figure of each part.
fn each(parts: &[Part], figure: impl Fn(&Part) -> f64) -> Vec<f64> {
    parts.iter().map(figure).collect()
}

/// Events per frame.
fn per_frame(events: u64, part: &Part) -> f64 {
    // A part takes seconds: no count exceeds 32 bits.
    let events = u32::try_from(events).unwrap_or(u32::MAX);
    ratio(events.into(), part.frames.into())
}

impl Compared {
    /// Frames per second, ours relative to the other's.
    fn ratio(&self) -> f64 {
        let ours = each(&self.ours, |part| part.frames_per_second);
        let others = each(&self.others, |part| part.frames_per_second);
        rounded(median(&ratios(&ours, &others)), 3)
    }

    fn exits_per_frame(&self) -> f64 {
        median(&each(&self.ours, |part| per_frame(part.exits, part)))
    }

    fn kicks_per_frame(&self) -> f64 {
        median(&each(&self.ours, |part| per_frame(part.kicks, part)))
    }
}

/// All comparisons.
#[derive(Debug)]
struct Measured {
    passthrough: Compared,
    userspace: Compared,
    lazy: Compared,
    strict: Compared,
}

/// The keys of `--json`: medians.
#[derive(Debug, Serialize)]
struct Report {
    passthrough_ratio: f64,
    static_ratio: f64,
    lazy_ratio_qemu: f64,
    strict_ratio_qemu: f64,
    exits_per_frame_lazy: f64,
    exits_per_frame_strict: f64,
}

impl Measured {
    fn report(&self) -> Report {
        Report {
            passthrough_ratio: self.passthrough.ratio(),
            static_ratio: self.userspace.ratio(),
            lazy_ratio_qemu: self.lazy.ratio(),
            strict_ratio_qemu: self.strict.ratio(),
            exits_per_frame_lazy: rounded(self.lazy.exits_per_frame(), 3),
            exits_per_frame_strict: rounded(self.strict.exits_per_frame(), 3),
        }
    }

    fn show(&self, rounds: u32) {
        eprintln!();
        eprintln!("  Medians of {rounds} rounds; 64-byte frames to an address that no device has");
        eprintln!(
            "  {:<42} {:>9} {:>9} {:>7} {:>7} {:>7}",
            "", "frames/s", "frames/s", "ratio", "exits", "kicks"
        );
        for (what, compared) in [
            ("passthrough; the same without an IOMMU", &self.passthrough),
            ("driver in userspace; physical addresses", &self.userspace),
            ("the guest unmaps lazily; QEMU", &self.lazy),
            ("the guest unmaps at once; QEMU", &self.strict),
        ] {
            eprintln!(
                "  {what:<42} {:>9.0} {:>9.0} {:>7.3} {:>7.3} {:>7.3}",
                median(&each(&compared.ours, |part| part.frames_per_second)),
                median(&each(&compared.others, |part| part.frames_per_second)),
                compared.ratio(),
                compared.exits_per_frame(),
                compared.kicks_per_frame(),
            );
        }
        eprintln!();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(frames: u32, exits: u64) -> Part {
        Part {
            frames_per_second: frames.into(),
            frames,
            kicks: exits,
            exits,
        }
    }

    #[test]
    fn ratios_are_of_the_same_round_and_exits_are_ours() {
        let compared = || Compared {
            ours: vec![part(100, 201), part(300, 603), part(200, 402)],
            others: vec![part(50, 0), part(100, 0), part(400, 0)],
        };
        let measured = Measured {
            passthrough: compared(),
            userspace: compared(),
            lazy: compared(),
            strict: compared(),
        };
        let report = serde_json::to_string(&measured.report()).unwrap();
        assert_eq!(
            report,
            "{\"passthrough_ratio\":2.0,\"static_ratio\":2.0,\"lazy_ratio_qemu\":2.0,\
             \"strict_ratio_qemu\":2.0,\"exits_per_frame_lazy\":2.01,\
             \"exits_per_frame_strict\":2.01}"
        );
    }
}
