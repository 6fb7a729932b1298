//! `cargo lab test [FILTER]`: every test of the project.
//!
//! First those that need no kernel, here; then the integration tests of
//! `tests/tests/`, in lanes: each lane has a lab host of its own, in which it runs one
//! harness after the other, one test at a time. The last line is
//! `N passed, N failed`, and nothing else than zero failures ends with success.

use crate::areas::{Area, PACKAGES};
use crate::endurance::DEFAULT_CYCLES;
use crate::error::{Error, Result};
use crate::here::{self, HereArguments};
use crate::host;
use crate::libtest::Tally;
use crate::process::die_with_parent;
use crate::rig::Rig;
use crate::setup::{self, Lab, Profile, binaries};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

mod durations;
mod harness;
mod lanes;
mod queue;
mod transcript;

use durations::Durations;
use harness::Harness;
use queue::{Queue, Task};

/// Arguments of `cargo lab test`.
#[derive(Debug, clap::Args)]
pub struct TestArguments {
    /// An area (skeleton, hardware, rings, mgmt, api, migration), one file of
    /// tests in the lab (skeleton_boot), or a part of tests' names; all tests
    /// without it
    filter: Option<String>,
    /// The lab host's equipment, instead of what each file of tests asks for
    #[arg(long, value_enum)]
    rig: Option<Rig>,
    /// How often the tests that look for leaks repeat what they do (100: some
    /// ten minutes more)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), default_value_t = DEFAULT_CYCLES)]
    cycles: u32,
    /// How many lab hosts run tests at once (2, or 1 on a machine with one
    /// processor or less than 8 GiB of memory, or if one file of tests is meant)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    lanes: Option<u8>,
    #[command(flatten)]
    here: HereArguments,
}

/// Runs the tests; the exit code is 1 when one failed.
///
/// # Errors
/// [`Error::Missing`] for an area without tests or a filter that matches none;
/// those of [`Lab::prepare`] and of booting the lab host.
pub fn test(arguments: &TestArguments) -> Result<u8> {
    let repository = setup::repository()?;
    let selection = Selection::of(arguments.filter.as_deref(), &repository)?;
    let mut tally = Tally::default();
    if !selection.host.is_empty() {
        tally += run_on_this_machine(&repository, &selection)?;
    }
    if !selection.lab.is_empty() {
        tally += run_in_lab(arguments, &repository, &selection)?;
    }
    if tally.retries > 0 {
        eprintln!("lab: {} boots were tried again", tally.retries);
    }
    if tally.ignored > 0 {
        eprintln!("lab: {} tests are marked to be ignored", tally.ignored);
    }
    if tally.passed + tally.failed == 0 {
        return Err(Error::missing(
            format!("no test has {:?} in its name", selection.filter),
            "use an area (skeleton, hardware, rings, mgmt, api, migration) or a part of a test's name",
        ));
    }
    println!("{}", tally.last_line());
    Ok(u8::from(tally.failed > 0))
}

/// What is to be run.
#[derive(Debug)]
struct Selection {
    /// Packages with tests that need no kernel of the lab's.
    host: Vec<&'static str>,
    lab: Vec<String>,
    /// Passed to every harness; empty for all tests.
    filter: String,
}

impl Selection {
    fn of(filter: Option<&str>, repository: &Path) -> Result<Self> {
        let area = filter.and_then(Area::named);
        let areas: Vec<Area> = match area {
            Some(area) => vec![area],
            None => Area::ALL.to_vec(),
        };
        let mut selection = Self {
            host: Vec::new(),
            lab: Vec::new(),
            filter: match area {
                Some(_) => String::new(),
                None => filter.unwrap_or_default().to_owned(),
            },
        };
        for area in areas {
            selection.host.extend(area.host_packages());
            selection.lab.extend(area.lab_tests(repository)?);
        }
        if selection.lab.contains(&selection.filter) {
            // The name of one target: all of it and nothing else.
            selection.host.clear();
            selection.lab = vec![std::mem::take(&mut selection.filter)];
        }
        if let Some(area) = area
            && selection.host.is_empty()
            && selection.lab.is_empty()
        {
            return Err(Error::missing(
                format!("the area {} has no tests yet", area.name()),
                format!("write one: tests/tests/{}.rs", area.name()),
            ));
        }
        Ok(selection)
    }
}

/// All by one call: see [`PACKAGES`].
fn run_on_this_machine(repository: &Path, selection: &Selection) -> Result<Tally> {
    println!("lab: tests of {}", selection.host.join(", "));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--quiet", "--no-fail-fast"]);
    for package in &selection.host {
        command.args(["--package", package]);
    }
    command
        .arg("--")
        .args(Some(&selection.filter).filter(|filter| !filter.is_empty()))
        .current_dir(repository);
    stream(&mut command)
}

/// Runs a program, shows its output as it comes, and counts.
fn stream(command: &mut Command) -> Result<Tally> {
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
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output)
            .split(b'\n')
            .map_while(|line| line.ok())
        {
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            tally.read(&line);
        }
    }
    let status = child.wait().map_err(started)?;
    tally.end(status.success());
    Ok(tally)
}

fn run_in_lab(
    arguments: &TestArguments,
    repository: &Path,
    selection: &Selection,
) -> Result<Tally> {
    let mut build = vec!["test", "--no-run"];
    for package in PACKAGES {
        build.extend(["--package", package]);
    }
    for name in &selection.lab {
        build.extend(["--test", name]);
    }
    let built = binaries::cargo(repository, &build, "building the lab's tests")?;
    let lab = Lab::prepare(Profile::Lab)?;
    let filter = Some(selection.filter.clone()).filter(|filter| !filter.is_empty());
    let programs: Vec<String> = built
        .iter()
        .filter(|built| !selection.lab.contains(&built.name))
        .map(|built| built.path.to_string_lossy().into_owned())
        .collect();
    let mut harnesses = Vec::new();
    for name in &selection.lab {
        harnesses.push(Harness {
            lab: &lab,
            name,
            program: binaries::find(&built, name)?,
            select: filter.clone().into_iter().collect(),
            cycles: arguments.cycles,
            programs: &programs,
        });
    }
    if arguments.here.is_wanted() {
        let mut tally = Tally::default();
        for harness in &harnesses {
            println!("lab: {}, on this machine", harness.name);
            tally += run_here(harness)?;
        }
        return Ok(tally);
    }
    let count = harnesses.len();
    let lanes = arguments.lanes.unwrap_or_else(host::hosts_at_once);
    // No more of them than there are files of tests.
    let lanes = u8::try_from(count).map_or(lanes, |count| lanes.min(count));
    let mut durations = Durations::open(&lab.cache);
    let tasks = harnesses.into_iter().map(|harness| Task {
        rig: arguments.rig.unwrap_or_else(|| Rig::of_test(harness.name)),
        expected: durations.expected(harness.name),
        harness,
    });
    let begun = Instant::now();
    let (tally, measured) = lanes::run(&lab, Queue::new(tasks, lanes))?;
    // Only what says something of the next full run.
    if filter.is_none() && arguments.cycles == DEFAULT_CYCLES {
        durations.remember(measured);
    }
    eprintln!(
        "lab: {count} files of tests in {} s, in {lanes} lab host(s) at once",
        begun.elapsed().as_secs()
    );
    Ok(tally)
}

fn run_here(harness: &Harness<'_>) -> Result<Tally> {
    let execute = harness.execute()?;
    here::check()?;
    let mut command = Command::new(&harness.program);
    command
        .args(execute.arguments.get(1..).unwrap_or_default())
        .envs(&execute.environment)
        .env("BELLHOP_LAB", "here")
        .current_dir(&execute.directory);
    stream(&mut command)
}
