//! `cargo lab bench migration`: measures how long traffic stops while a guest migrates to another
//! process, with Bellhop and with QEMU.
//!
//! Both VMMs run the lab's guest with 256 MiB, one processor, one NIC on `vdpasim_net` and a memory
//! writer. Frames flow at half of the capacity of the better VMM, at least. The guests migrate in
//! turn, each there and back, through a Unix socket on one host; the other guest idles meanwhile.
//! `traffic.rs` describes how gaps are measured.

mod bellhop;
mod qemu;
mod traffic;

use std::time::{Duration, Instant};

use super::print_json;
use launcher::verbs::bench::MigrationArguments;
use serde::Serialize;
use serde_json::Value;

use self::bellhop::Bellhop;
use self::qemu::Qemu;
use self::traffic::{Clock, Host};
use crate::error::{Error, Result, report};
use crate::figures::{median, milliseconds, ratios, rounded};
use crate::guest::Guest;
use crate::sim::{self, Mapping};

/// No zero bytes: the simulator compares addresses like C strings.
const OURS: &str = "52:54:5e:11:5a:01";
const QEMUS: &str = "52:54:5e:11:5a:02";

/// The writer's memory in MiB and its pause after each page, in microseconds.
const WRITER: &str = "24 50";

/// Traffic before a migration, and after it.
const STEADY: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_millis(1500);

pub(super) fn measure(arguments: &MigrationArguments) -> Result<()> {
    sim::require_lab()?;
    sim::reload(Mapping::DEFAULT)?;
    let moved = moves(arguments.rounds)?;
    let report = Report::of(&moved);
    report.show(&moved);
    print_json(arguments.common.json, &report)
}

/// A VMM with a guest that can migrate.
trait Vmm {
    fn guest(&mut self) -> &mut Guest;

    /// Migrates the guest to the other end.
    ///
    /// # Errors
    /// The migration failed.
    fn migrate(&mut self) -> Result<Move>;
}

/// The times of a migration.
#[derive(Debug)]
struct Move {
    /// When it was requested.
    began: Instant,
    /// Until here the guest certainly ran at the source.
    before: Instant,
    /// The guest stopped between these two times.
    stops: (Instant, Instant),
    /// When the guest was seen to run at the destination.
    moved: Instant,
    /// The downtime that the VMM reports, in milliseconds.
    own_downtime: f64,
    /// The VMM's whole report.
    said: Value,
}

/// One migration as the guest's peer saw it; milliseconds.
#[derive(Debug, Clone, Copy)]
struct Round {
    downtime: f64,
    own_downtime: f64,
    total: f64,
    precopy: f64,
    steady_p99: f64,
    steady_longest: f64,
    /// How far the guest's clock fell behind.
    clock: f64,
    /// The uncertainty of that value.
    clock_error: f64,
    lost: f64,
    rate: f64,
    /// How long it took to have all writes logged, where the VMM reports it.
    switch: Option<f64>,
}

/// All rounds, one after the other, for both VMMs.
#[derive(Debug)]
struct Moves {
    ours: Vec<Round>,
    qemu: Vec<Round>,
    /// The longest gaps around hot swaps and upgrades.
    swaps: Vec<f64>,
    upgrades: Vec<f64>,
    capacity: [f64; 2],
    rate: u32,
    /// Rounds that started and did not finish.
    lost: u32,
}

/// How many rounds may be lost to a guest that falls silent: on an emulated processor a guest
/// sometimes does.
const LOST_MAX: u32 = 3;

/// Both guests, idle.
struct Guests {
    ours: Bellhop,
    qemu: Qemu,
}

impl Guests {
    fn boot() -> Result<Self> {
        eprintln!("  Bellhop boots the lab's guest …");
        let ours = Bellhop::start(OURS)?;
        eprintln!("  QEMU boots the lab's guest …");
        let qemu = Qemu::start(QEMUS)?;
        Ok(Self { ours, qemu })
    }

    /// Migrates each guest once, then swaps and upgrades ours.
    fn round(&mut self, host: Host, rate: u32) -> Result<OneRound> {
        let Self { ours, qemu } = self;
        Ok(OneRound {
            qemu: round("QEMU", qemu, host, rate)?,
            ours: round("Bellhop", ours, host, rate)?,
            swaps: rests("hot swap", ours, host, rate, Bellhop::swap)?,
            upgrades: rests("upgrade", ours, host, rate, Bellhop::upgrade)?,
        })
    }
}

/// The measurements of one round.
struct OneRound {
    qemu: Round,
    ours: Round,
    swaps: Vec<f64>,
    upgrades: Vec<f64>,
}

fn moves(rounds: u32) -> Result<Moves> {
    let host = Host::new();
    let mut guests = Guests::boot()?;
    let capacity = [
        loaded_capacity(&mut guests.ours)?,
        loaded_capacity(&mut guests.qemu)?,
    ];
    let rate = format!("{:.0}", capacity[0].max(capacity[1]) / 2.0 + 0.5)
        .parse()
        .map_err(|_| Error::invalid("the guests' capacity", format!("{capacity:?}")))?;
    eprintln!(
        "  frames/s at most: Bellhop's guest {:.0}, QEMU's {:.0}; while they move: {rate}",
        capacity[0], capacity[1]
    );
    let mut all = Moves {
        ours: Vec::new(),
        qemu: Vec::new(),
        swaps: Vec::new(),
        upgrades: Vec::new(),
        capacity,
        rate,
        lost: 0,
    };
    let (mut number, mut guests) = (1, Some(guests));
    while number <= rounds {
        eprintln!("  round {number} of {rounds}");
        let both = match &mut guests {
            Some(both) => both,
            None => guests.insert(Guests::boot()?),
        };
        match both.round(host, rate) {
            Ok(one) => {
                all.qemu.push(one.qemu);
                all.ours.push(one.ours);
                all.swaps.extend(one.swaps);
                all.upgrades.extend(one.upgrades);
                number += 1;
            }
            Err(error) if all.lost < LOST_MAX => {
                all.lost += 1;
                eprintln!("    lost, and made again: {}", report(&error));
                // Dropped before others with the same devices start.
                guests = None;
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(Guests { ours, qemu }) = guests {
        ours.power_off()?;
        qemu.power_off()?;
    }
    Ok(all)
}

fn loaded_capacity(vmm: &mut dyn Vmm) -> Result<f64> {
    let guest = vmm.guest();
    guest.command(&format!("write-on {WRITER}"))?;
    let frames = traffic::capacity(guest)?;
    stop_writer(guest)?;
    Ok(frames)
}

fn stop_writer(guest: &mut Guest) -> Result<()> {
    let found = guest.command("write-off")?;
    if found["wrong"] != 0 {
        return Err(Error::invalid("the guest's memory", found.to_string()));
    }
    Ok(())
}

/// The longest gap around each time that something `happens`, under the same load; milliseconds.
fn rests(
    what: &str,
    ours: &mut Bellhop,
    host: Host,
    rate: u32,
    happens: impl FnOnce(&mut Bellhop) -> Result<Vec<(Instant, Instant)>>,
) -> Result<Vec<f64>> {
    let guest = ours.guest();
    let clock = Clock::of(guest, host)?;
    guest.command(&format!("write-on {WRITER}"))?;
    traffic::begin(guest, rate)?;
    std::thread::sleep(AFTER);
    let happened = happens(ours)?;
    std::thread::sleep(AFTER);
    let guest = ours.guest();
    traffic::end(guest)?;
    stop_writer(guest)?;
    let fell_behind = clock.fell_behind(&Clock::of(guest, host)?) / 1e3;
    let mut found = Vec::new();
    for (from, to) in happened {
        // A clock that stopped did so in this gap.
        found.push(traffic::gaps(guest, &clock, from, to)?.touching + fell_behind.max(0.0));
    }
    eprintln!("    {what:<8} {found:.1?} ms without a frame");
    Ok(found)
}

fn round(who: &str, vmm: &mut dyn Vmm, host: Host, rate: u32) -> Result<Round> {
    let guest = vmm.guest();
    let clock = Clock::of(guest, host)?;
    guest.command(&format!("write-on {WRITER}"))?;
    traffic::begin(guest, rate)?;
    let begun = Instant::now();
    std::thread::sleep(STEADY);
    let moved = vmm.migrate()?;
    std::thread::sleep(AFTER);
    let guest = vmm.guest();
    let totals = traffic::end(guest)?;
    stop_writer(guest)?;
    let later = Clock::of(guest, host)?;
    let steady = traffic::gaps(guest, &clock, begun, moved.began)?;
    let precopy = traffic::gaps(guest, &clock, moved.began, moved.before)?;
    let (from, to) = moved.stops;
    let stop = traffic::gaps(guest, &clock, from, to)?;
    let fell_behind = clock.fell_behind(&later) / 1e3;
    let round = Round {
        downtime: stop.touching + fell_behind,
        own_downtime: moved.own_downtime,
        total: milliseconds(moved.moved.saturating_duration_since(moved.began)),
        precopy: precopy.longest,
        steady_p99: steady.p99,
        steady_longest: steady.longest,
        clock: fell_behind,
        clock_error: clock.asked_for.max(later.asked_for) / 2e3,
        lost: totals.lost,
        rate: totals.rate,
        switch: moved.said["log_start_ms"].as_f64(),
    };
    round.show(who, &moved);
    Ok(round)
}

impl Round {
    fn show(&self, who: &str, moved: &Move) {
        eprintln!(
            "    {who:<8} {:.1} ms without a frame (by its own account {:.1} ms; the guest's clock \
             fell {:.1} ms behind); {:.0} ms in all; longest gap meanwhile {:.1} ms, before \
             {:.1} ms, p99 {:.1} ms; {:.0} frames/s, {:.0} lost",
            self.downtime,
            self.own_downtime,
            self.clock,
            self.total,
            self.precopy,
            self.steady_longest,
            self.steady_p99,
            self.rate,
            self.lost
        );
        eprintln!("             {}", moved.said);
    }
}

/// The keys of `--json`: medians; null for a figure that cannot be measured.
#[derive(Debug, Serialize)]
struct Report {
    downtime_ms: f64,
    qemu_downtime_ms: f64,
    downtime_ratio: f64,
    total_ms: f64,
    qemu_total_ms: f64,
    precopy_gap_ms_max: f64,
    steady_gap_ms_p99: f64,
    switch_ms: Option<f64>,
    hot_swap_gap_ms: Option<f64>,
    upgrade_gap_ms: Option<f64>,
}

/// The median; `None` without figures.
fn known(figures: &[f64]) -> Option<f64> {
    (!figures.is_empty()).then(|| rounded(median(figures), 1))
}

fn of(rounds: &[Round], figure: fn(&Round) -> f64) -> Vec<f64> {
    rounds.iter().map(figure).collect()
}

impl Report {
    fn of(moves: &Moves) -> Self {
        let ours = |figure| median(&of(&moves.ours, figure));
        let qemu = |figure| median(&of(&moves.qemu, figure));
        let downtime = |rounds: &[Round]| of(rounds, |round| round.downtime);
        Self {
            downtime_ms: rounded(ours(|round| round.downtime), 1),
            qemu_downtime_ms: rounded(qemu(|round| round.downtime), 1),
            downtime_ratio: rounded(
                median(&ratios(&downtime(&moves.ours), &downtime(&moves.qemu))),
                3,
            ),
            total_ms: rounded(ours(|round| round.total), 0),
            qemu_total_ms: rounded(qemu(|round| round.total), 0),
            precopy_gap_ms_max: rounded(ours(|round| round.precopy), 1),
            steady_gap_ms_p99: rounded(ours(|round| round.steady_p99), 1),
            switch_ms: known(
                &moves
                    .ours
                    .iter()
                    .filter_map(|round| round.switch)
                    .collect::<Vec<_>>(),
            ),
            hot_swap_gap_ms: known(&moves.swaps),
            upgrade_gap_ms: known(&moves.upgrades),
        }
    }

    /// Prints the table, with the source of each figure.
    fn show(&self, moves: &Moves) {
        let [ours, qemu] = [&moves.ours, &moves.qemu];
        let both = |what: &str, figure: fn(&Round) -> f64, note: &str| {
            let [ours, qemu] = [ours, qemu].map(|rounds| median(&of(rounds, figure)));
            eprintln!("  {what:<37} {ours:>9.1} {qemu:>9.1}  {note}");
        };
        let own = |what: &str, figure: Option<f64>, note: &str| {
            let figure = figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.1}"));
            eprintln!("  {what:<37} {figure:>9} {:>9}  {note}", "-");
        };
        eprintln!();
        eprintln!(
            "  Medians of {} moves of each VMM in turn, there and back; 256 MiB, 1 processor, \
             {} frames/s (at most {:.0} and {:.0} came back)",
            ours.len(),
            moves.rate,
            moves.capacity[0],
            moves.capacity[1]
        );
        if moves.lost > 0 {
            eprintln!("  {} rounds more were lost, see above", moves.lost);
        }
        eprintln!();
        eprintln!("  {:<37} {:>9} {:>9}", "milliseconds", "Bellhop", "QEMU");
        both(
            "downtime",
            |round| round.downtime,
            &format!(
                "no frame came back to the guest around the switch; {:.3} of QEMU's in the same \
                 round",
                self.downtime_ratio
            ),
        );
        both("  by the VMM's own account", |round| round.own_downtime, "");
        both(
            "  of it unseen by the guest's clock",
            |round| round.clock,
            &format!(
                "added above; known to ±{:.1}",
                median(&of(ours, |round| round.clock_error))
            ),
        );
        both(
            "the whole migration",
            |round| round.total,
            "from the request until the guest was seen to run there",
        );
        both(
            "longest gap while memory goes over",
            |round| round.precopy,
            "the start of the dirty log (QEMU: shadow virtqueues) among it",
        );
        both(
            "gap of steady traffic, p99",
            |round| round.steady_p99,
            "before the move, the same traffic and writer",
        );
        both("  longest", |round| round.steady_longest, "");
        both(
            "frames sent per second (no time)",
            |round| round.rate,
            "all the time, the standstill included; what could not be sent in time is left out",
        );
        both("frames lost in a move (no time)", |round| round.lost, "");
        own(
            "start of the dirty log",
            self.switch_ms,
            "until all writes are logged, KVM's log among it; by the VMM's own account",
        );
        own(
            "hot swap of the device",
            self.hot_swap_gap_ms,
            "longest gap that touches the request, the opening of the new device among it",
        );
        own(
            "upgrade of the VMM",
            self.upgrade_gap_ms,
            "longest gap that touches the request, until the API answers again",
        );
        eprintln!();
    }
}
