//! `cargo lab test [FILTER]`: the gate of the project's tests, or those that a filter names.
//!
//! ```text
//!   build ─▶ list tests ─▶ unit and documentation tests, here ─▶ lab tests, in lanes
//! ```
//! Each lane has its own lab host, in which it runs one file of tests after the other, one test at
//! a time. Without a filter, the lab tests are those of the gate (`tests/gate`); `cargo lab soak`
//! runs all of them. Only a run without failures succeeds.

use crate::areas::{Area, test_names};
use crate::endurance::{DEFAULT_CYCLES, SOAK};
use crate::error::{Error, Result};
use crate::here::{self, HereArguments};
use crate::host;
use crate::libtest::{self, Panics, Tally};
use crate::process::{self, die_with_parent};
use crate::progress::{self, Progress};
use crate::rig::Rig;
use crate::setup::binaries::{Built, Kind};
use crate::setup::{self, Lab, Needs, Profile};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod coverage;
mod durations;
mod gate;
mod harness;
mod lanes;
mod queue;
mod summary;
mod transcript;

use coverage::{Coverage, Source};
use durations::Durations;
use gate::Gate;
use harness::Harness;
use queue::{Queue, Task};
use summary::Summary;

/// Arguments of `cargo lab test`.
#[derive(Debug, clap::Args)]
pub struct TestArguments {
    /// An area (boot, vdpa, hardware, rings, mgmt, api, migration), a file of tests (boot_guest),
    /// or a part of tests' names; default: the gate
    filter: Option<String>,
    /// How often the tests that look for leaks repeat what they do
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_t = DEFAULT_CYCLES
    )]
    cycles: u32,
    #[command(flatten)]
    place: PlaceArguments,
}

/// Where tests run.
#[derive(Debug, clap::Args)]
pub(super) struct PlaceArguments {
    /// The lab host's equipment, instead of what each file of tests asks for
    #[arg(long, value_enum)]
    rig: Option<Rig>,
    /// How many lab hosts run tests at once (2; 1 with one processor, less than 8 GiB of memory, or
    /// one file of tests)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    lanes: Option<u8>,
    /// Show how many lines of the product the tests run; needs rustup's
    /// component llvm-tools
    #[arg(long, conflicts_with = "here")]
    coverage: bool,
    #[command(flatten)]
    here: HereArguments,
}

/// How much tests prove.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// See [`crate::endurance::cycles`].
    pub(super) cycles: u32,
    /// See [`crate::endurance::soak`]. A soak runs all tests, not only those of the gate.
    pub(super) soak: bool,
}

/// Runs the tests; the exit code is 1 when one failed.
///
/// # Errors
/// [`Error::Missing`] for a filter that matches no test. [`Error::Invalid`] for a gate that names a
/// test which does not exist. Those of [`Lab::prepare`] and of booting the lab host.
pub fn test(arguments: &TestArguments) -> Result<u8> {
    let effort = Effort {
        cycles: arguments.cycles,
        soak: false,
    };
    run(arguments.filter.as_deref(), effort, &arguments.place)
}

/// Runs the tests that a filter names; the exit code is 1 when one failed.
///
/// # Errors
/// [`Error::Missing`] for a filter that matches no test. [`Error::Invalid`] for a gate that names a
/// test which does not exist. Those of [`Lab::prepare`] and of booting the lab host.
pub(super) fn run(filter: Option<&str>, effort: Effort, place: &PlaceArguments) -> Result<u8> {
    let repository = setup::repository()?;
    let filter = Filter::of(filter, &repository)?;
    let all_files = test_names(&repository)?;
    let gate = match filter {
        Filter::All => Some(Gate::read(&repository)?),
        _ => None,
    };
    let files = filter.lab_tests(gate.as_ref().filter(|_| !effort.soak), &all_files);
    let coverage = place
        .coverage
        .then(|| Coverage::start(&repository))
        .transpose()?;
    let mut summary = Summary::default();
    let lab = Lab::prepare(&Needs {
        profile: coverage
            .as_ref()
            .map_or(Profile::Dev, |_| Profile::Coverage),
        tests: &filter.cargo_words(&files),
        guest_kernel: true,
    })?;
    summary.phase("setup and build");
    let listed = listed(&lab.built, &filter)?;
    if let Some(gate) = &gate {
        gate.check(&listed.lab)?;
    }
    if gate.is_some() {
        summary.files_left_out = all_files.len() - files.len();
    }
    let mut harnesses = Vec::new();
    let programs = lab.programs();
    for (built, tests) in listed.lab {
        let (inside, outside) = tests.into_iter().partition::<Vec<_>, _>(|test| {
            gate.as_ref().is_none_or(|gate| gate.has(&built.name, test))
        });
        let mut harness = |tests: Vec<String>, source| {
            if !tests.is_empty() {
                harnesses.push(Harness {
                    lab: &lab,
                    name: &built.name,
                    program: &built.path,
                    tests,
                    effort,
                    programs: &programs,
                    coverage: coverage.as_ref().map(|coverage| (coverage, source)),
                });
            }
        };
        harness(inside, Source::Gate);
        if effort.soak {
            harness(outside, Source::Other);
        } else {
            summary.tests_left_out += outside.len();
        }
    }
    if harnesses.is_empty() && listed.unit.is_empty() {
        return Err(Error::missing(
            format!("no test has {:?} in its name", filter.text()),
            "use an area (boot, vdpa, hardware, rings, mgmt, api, migration), a file of tests or a \
             part of a test's name",
        ));
    }
    for (built, tests) in &listed.unit {
        println!("lab: unit tests of {} ({})", built.name, tests.len());
        let mut command = Command::new(&built.path);
        command
            .args(["--quiet"])
            .args(Some(filter.text()).filter(|text| !text.is_empty()))
            .current_dir(&built.package);
        if effort.soak {
            command.env(SOAK, "1");
        }
        if let Some(coverage) = &coverage {
            coverage.unit_test(&mut command);
        }
        summary.tally += stream(&mut command, &mut summary.failures)?;
    }
    if filter.includes_documentation() {
        let mut command = process::cargo();
        command
            .args(["test", "--doc", "--quiet", "--no-fail-fast", "--workspace"])
            .current_dir(&repository);
        summary.tally += stream(&mut command, &mut summary.failures)?;
    }
    summary.phase("unit and documentation tests");
    if place.here.is_wanted() {
        for harness in &harnesses {
            println!("lab: {}, on this machine", harness.name);
            summary.tally += run_here(harness, &mut summary.failures)?;
        }
    } else if !harnesses.is_empty() {
        in_lanes(&lab, harnesses, place, effort.soak, &mut summary)?;
        summary.phase("lab tests");
    }
    let code = summary.end(effort);
    if let Some(coverage) = &coverage {
        coverage.report(&lab.built)?;
    }
    Ok(code)
}

/// Which tests to run.
#[derive(Debug, PartialEq, Eq)]
enum Filter {
    /// Those of the gate, or all in a soak.
    All,
    Area(Area),
    /// One file of lab tests.
    File(String),
    /// Those whose names contain the text.
    Part(String),
}

impl Filter {
    fn of(text: Option<&str>, repository: &Path) -> Result<Self> {
        let Some(text) = text else {
            return Ok(Self::All);
        };
        if let Some(area) = Area::named(text) {
            return Ok(Self::Area(area));
        }
        let text = text.to_owned();
        Ok(if test_names(repository)?.contains(&text) {
            Self::File(text)
        } else {
            Self::Part(text)
        })
    }

    /// The files of lab tests that may have such tests. Cargo builds only these.
    fn lab_tests(&self, gate: Option<&Gate>, all: &[String]) -> Vec<String> {
        let mut files = all.to_vec();
        files.retain(|file| match self {
            Self::All => gate.is_none_or(|gate| gate.has_file(file)),
            Self::Area(area) => Area::of_test(file) == Some(*area),
            Self::File(name) => file == name,
            Self::Part(_) => true,
        });
        files
    }

    /// What cargo builds besides the programs.
    fn cargo_words(&self, files: &[String]) -> Vec<String> {
        let mut words: Vec<String> = match self {
            // Unit tests of libraries and programs; lab tests have `test = false`.
            Self::All | Self::Part(_) => vec!["--lib".into(), "--bins".into()],
            Self::Area(_) | Self::File(_) => Vec::new(),
        };
        for file in files {
            words.extend(["--test".into(), file.clone()]);
        }
        words
    }

    fn includes(&self, file: &str, test: &str) -> bool {
        match self {
            Self::All => true,
            Self::Area(area) => Area::of_test(file) == Some(*area),
            Self::File(name) => file == name,
            Self::Part(part) => test.contains(part.as_str()),
        }
    }

    /// The filter for a harness.
    fn text(&self) -> &str {
        match self {
            Self::Part(part) => part,
            Self::All | Self::Area(_) | Self::File(_) => "",
        }
    }

    /// True if documentation tests run. Their names are places in files, which a filter never
    /// means.
    fn includes_documentation(&self) -> bool {
        *self == Self::All
    }
}

/// What runs: executables and the tests of each, in the order in which they run.
#[derive(Debug, Default)]
struct Listed<'a> {
    unit: Vec<(&'a Built, Vec<String>)>,
    lab: Vec<(&'a Built, Vec<String>)>,
}

/// Queries each test program for its tests. All are linked statically, so they run here.
fn listed<'a>(built: &'a [Built], filter: &Filter) -> Result<Listed<'a>> {
    let _progress = Progress::start("listing tests");
    let mut all = Listed::default();
    for built in built {
        let list = match built.kind {
            Kind::Program => continue,
            Kind::UnitTests => &mut all.unit,
            Kind::IntegrationTests => &mut all.lab,
        };
        let mut tests = libtest::list(&built.path)?;
        // Some programs are built for every run, even if the filter excludes them.
        tests.retain(|test| filter.includes(&built.name, test));
        if !tests.is_empty() {
            list.push((built, tests));
        }
    }
    Ok(all)
}

/// Runs a program, shows its output as it arrives, and counts the results. Adds the failed tests
/// with their panics to `failures`.
fn stream(command: &mut Command, failures: &mut Vec<String>) -> Result<Tally> {
    let program = command.get_program().to_string_lossy().into_owned();
    let started = |source| Error::Start {
        program: program.clone(),
        source,
    };
    let mut child = die_with_parent(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(started)?;
    let mut tally = Tally::default();
    let mut panics = Panics::default();
    let mut failed = Vec::new();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output)
            .split(b'\n')
            .map_while(|line| line.ok())
        {
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            tally.read(&line);
            panics.read(&line);
            failed.extend(libtest::failed(&line).map(str::to_owned));
        }
    }
    failures.extend(failed.iter().map(|test: &String| panics.with_panic(test)));
    let status = child.wait().map_err(started)?;
    tally.end(status.success());
    Ok(tally)
}

fn in_lanes(
    lab: &Lab,
    harnesses: Vec<Harness<'_>>,
    place: &PlaceArguments,
    soak: bool,
    summary: &mut Summary,
) -> Result<()> {
    let count = harnesses.len();
    let lanes = place.lanes.unwrap_or_else(host::hosts_at_once);
    // No more lanes than files of tests.
    let lanes = u8::try_from(count).map_or(lanes, |count| lanes.min(count));
    let mut durations = Durations::open(&lab.cache, soak);
    let tasks: Vec<_> = harnesses
        .into_iter()
        .map(|harness| Task {
            rig: place.rig.unwrap_or_else(|| Rig::of_test(harness.name)),
            expected: durations.of_file(harness.name, &harness.tests),
            harness,
        })
        .collect();
    let work: Duration = tasks.iter().map(|task| task.expected).sum();
    eprintln!("lab: {count} files of tests in {lanes} lab host(s) at once");
    progress::expect(work / u32::from(lanes.max(1)));
    let begun = Instant::now();
    let ended = lanes::run(lab, Queue::new(tasks, lanes))?;
    durations.remember(&ended.took);
    eprintln!(
        "lab: {count} files of tests took {} s, {} s of all lanes together",
        begun.elapsed().as_secs(),
        ended.lane_time.as_secs()
    );
    summary.take(ended);
    Ok(())
}

fn run_here(harness: &Harness<'_>, failures: &mut Vec<String>) -> Result<Tally> {
    let execute = harness.execute(&harness.tests)?;
    here::check()?;
    let mut command = Command::new(harness.program);
    command
        .args(execute.arguments.get(1..).unwrap_or_default())
        .envs(&execute.environment)
        .env("BELLHOP_LAB", "here")
        .current_dir(&execute.directory);
    stream(&mut command, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_an_area_a_file_or_a_part_of_a_name() {
        let repository = setup::repository().unwrap();
        let filter = |text| Filter::of(text, &repository).unwrap();
        assert_eq!(filter(None), Filter::All);
        assert_eq!(filter(Some("rings")), Filter::Area(Area::Rings));
        let file = filter(Some("boot_guest"));
        assert_eq!(file, Filter::File("boot_guest".into()));
        assert!(file.includes("boot_guest", "x") && !file.includes("vdpa_net", "x"));
        let all = test_names(&repository).unwrap();
        let words = file.cargo_words(&file.lab_tests(None, &all));
        assert_eq!(words, ["--test", "boot_guest"]);
        let part = filter(Some("reboot"));
        assert!(part.includes("any", "a_reboot") && !part.includes("reboot", "other"));
        assert_eq!(part.lab_tests(None, &all), all);
        assert_eq!(part.cargo_words(&[])[0], "--lib");
        let gate = Gate::read(&repository).unwrap();
        let gated = filter(None).lab_tests(Some(&gate), &all);
        assert!(gated.contains(&"boot_lab".into()) && gated.len() < all.len());
    }
}
