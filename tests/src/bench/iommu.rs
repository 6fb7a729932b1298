//! `cargo lab bench iommu`: measures the cost of a virtio-iommu in front of a guest's NIC.
//!
//! ```text
//!   a comparison: two guests boot, each with a vdpasim_net of its own; then the rounds
//!   a round:      one sends, the other rests  ->  the other sends, the first one rests
//! ```
//! The guests send as fast as they can. Which of them begins changes with each round. The ratio of
//! a round compares its two parts, and the median of all rounds counts. Guests whose kernel maps
//! each frame have no counterpart: see `tests/README.md` about QEMU.

mod sender;

use super::print_json;
use crate::error::Result;
use crate::figures::{median, ratio, ratios, rounded};
use crate::sim::{self, Mapping, OtherMapping};
use launcher::verbs::bench::IommuArguments;
use sender::{Part, Sender, Setup};
use serde::Serialize;

/// As hardware: each mapping pins its pages and is one change of the device's table. With
/// `batch_mapping` the simulator builds its whole table again for each, which hides the rest.
const MAPPING: Mapping = Mapping {
    use_va: false,
    batch_mapping: false,
};

pub(super) fn measure(arguments: &IommuArguments) -> Result<()> {
    sim::require_lab()?;
    let _mapping = OtherMapping::load(MAPPING)?;
    let rounds = arguments.rounds;
    let ours = |setup| Sender::start("iommu-a", setup);
    let other = |setup| Sender::start("iommu-b", setup).map(Some);
    let passthrough = (ours(Setup::Passthrough)?, other(Setup::Plain)?);
    let passthrough = compare("passthrough", rounds, passthrough)?;
    let userspace = (ours(Setup::Userspace)?, other(Setup::PlainUserspace)?);
    let userspace = compare("userspace", rounds, userspace)?;
    let lazy = compare("lazy", rounds, (ours(Setup::Lazy)?, None))?;
    let strict = compare("strict", rounds, (ours(Setup::Strict)?, None))?;
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

/// Measures two guests in turn, or one without the other, and switches them off.
fn compare(
    what: &str,
    rounds: u32,
    (mut ours, mut other): (Sender, Option<Sender>),
) -> Result<Compared> {
    let mut compared = Compared::default();
    for round in 1..=rounds {
        let others = other.as_mut().zip(Some(&mut compared.others));
        let mut turns = [Some((&mut ours, &mut compared.ours)), others];
        if round % 2 == 0 {
            turns.reverse();
        }
        for (sender, parts) in turns.into_iter().flatten() {
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
    other.map_or(Ok(()), Sender::power_off)?;
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
    /// Frames per second, ours relative to the other's; `None` without another.
    fn ratio(&self) -> Option<f64> {
        let ours = each(&self.ours, |part| part.frames_per_second);
        let others = each(&self.others, |part| part.frames_per_second);
        (!others.is_empty()).then(|| rounded(median(&ratios(&ours, &others)), 3))
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

/// The keys of `--json`: medians. The ratios to QEMU are null.
#[derive(Debug, Serialize)]
struct Report {
    passthrough_ratio: Option<f64>,
    static_ratio: Option<f64>,
    lazy_ratio_qemu: Option<f64>,
    strict_ratio_qemu: Option<f64>,
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
            ("the guest unmaps lazily", &self.lazy),
            ("the guest unmaps at once", &self.strict),
        ] {
            let ratio = compared.ratio();
            let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
            eprintln!(
                "  {what:<42} {:>9.0} {:>9.0} {ratio:>7} {:>7.3} {:>7.3}",
                median(&each(&compared.ours, |part| part.frames_per_second)),
                median(&each(&compared.others, |part| part.frames_per_second)),
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
            strict: Compared {
                others: Vec::new(),
                ..compared()
            },
        };
        let report = serde_json::to_string(&measured.report()).unwrap();
        assert_eq!(
            report,
            "{\"passthrough_ratio\":2.0,\"static_ratio\":2.0,\"lazy_ratio_qemu\":2.0,\
             \"strict_ratio_qemu\":null,\"exits_per_frame_lazy\":2.01,\
             \"exits_per_frame_strict\":2.01}"
        );
    }
}
