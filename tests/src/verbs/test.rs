//! `cargo lab test [FILTER]`: every test of the project.
//!
//! First those that need no kernel, here; then the integration tests of
//! `tests/tests/`, one harness after the other in one lab host, one test at a
//! time. The last line is `N passed, N failed`, and nothing else than zero
//! failures ends with success.

use crate::accelerator::Accelerator;
use crate::agent::client::{self, Streams};
use crate::agent::protocol::Execute;
use crate::areas::{Area, HostTests, LAB_TESTED};
use crate::endurance::{CYCLES, DEFAULT_CYCLES};
use crate::error::{Error, Result};
use crate::here::{self, HereArguments};
use crate::host::LabHost;
use crate::libtest::{LostGuests, Tally};
use crate::process::die_with_parent;
use crate::rig::Rig;
use crate::setup::{self, Lab, binaries};
use crate::verbs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long one harness may take in the lab host.
const HARNESS_LIMIT: Duration = Duration::from_secs(30 * 60);

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
    #[command(flatten)]
    here: HereArguments,
}

/// Runs the tests; the exit code is 1 when one failed.
///
/// # Errors
/// [`Error::Missing`] for an area without tests or a filter that matches none;
/// those of [`Lab::prepare`] and [`LabHost::boot`].
pub fn test(arguments: &TestArguments) -> Result<u8> {
    let repository = setup::repository()?;
    let selection = Selection::of(arguments.filter.as_deref(), &repository)?;
    let mut tally = Tally::default();
    for tests in &selection.host {
        tally += run_on_this_machine(&repository, tests, &selection.filter)?;
    }
    if !selection.lab.is_empty() {
        tally += run_in_lab(arguments, &repository, &selection)?;
    }
    if tally.retries > 0 {
        eprintln!("lab: {} boots or tests were tried again", tally.retries);
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
    host: Vec<HostTests>,
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
            selection.host.extend(area.host_tests());
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

fn run_on_this_machine(repository: &Path, tests: &HostTests, filter: &str) -> Result<Tally> {
    println!("lab: tests of {}", tests.package);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["test", "--quiet", "--package", tests.package, "--"])
        .args(
            [tests.filter, filter]
                .iter()
                .filter(|part| !part.is_empty()),
        )
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
    for (_, package) in LAB_TESTED {
        build.extend(["--package", package]);
    }
    for name in &selection.lab {
        build.extend(["--test", name]);
    }
    let built = binaries::cargo(repository, &build, "building the lab's tests")?;
    let lab = Lab::prepare()?;
    let mut tally = Tally::default();
    let mut host: Option<(Rig, LabHost)> = None;
    for name in &selection.lab {
        let program = binaries::find(&built, name)?;
        let filter = Some(selection.filter.clone()).filter(|filter| !filter.is_empty());
        let harness = Harness {
            lab: &lab,
            program: &program,
            select: filter.into_iter().collect(),
            cycles: arguments.cycles,
        };
        if arguments.here.is_wanted() {
            println!("lab: {name}, on this machine");
            tally += run_here(&harness)?;
            continue;
        }
        let rig = arguments.rig.unwrap_or_else(|| Rig::of_test(name));
        println!("lab: {name}, in the lab host with the rig {}", rig.name());
        // A host that one harness broke is not the next one's problem.
        let running = match host.take() {
            Some((has, running)) if has == rig => running,
            other => {
                if let Some((_, unfit)) = other {
                    unfit.power_off()?;
                }
                let running = LabHost::boot(&lab, rig)?;
                tally.retries += u64::from(running.retries());
                running
            }
        };
        let emulated = running.accelerator() == Accelerator::Tcg;
        let mut run = run_harness(&harness, running)?;
        if emulated {
            run = run_lost_again(&harness, run)?;
        }
        tally += run.tally;
        host = run.host.map(|survivor| (rig, survivor));
    }
    if let Some((_, host)) = host {
        host.power_off()?;
    }
    Ok(tally)
}

/// One call of a file of tests.
#[derive(Debug, Clone)]
struct Harness<'a> {
    lab: &'a Lab,
    program: &'a Path,
    /// The arguments that select tests; none for all.
    select: Vec<String>,
    cycles: u32,
}

impl Harness<'_> {
    fn execute(&self) -> Result<Execute> {
        let mut command = vec![
            self.program.to_string_lossy().into_owned(),
            "--test-threads=1".into(),
        ];
        command.extend_from_slice(&self.select);
        let mut execute = verbs::command(self.lab, command)?;
        execute
            .environment
            .insert(CYCLES.into(), self.cycles.to_string());
        Ok(execute)
    }

    /// The same file of tests, but this one test of it.
    fn only(&self, test: &str) -> Self {
        Self {
            select: vec![test.into(), "--exact".into()],
            ..self.clone()
        }
    }
}

/// How one run of a harness in the lab host went.
#[derive(Debug)]
struct HarnessRun {
    tally: Tally,
    /// Failed tests whose guest was lost to a crash or a hang of its processors.
    lost: Vec<String>,
    /// The lab host, unless it is unfit for another harness.
    host: Option<LabHost>,
}

/// Runs one harness.
fn run_harness(harness: &Harness<'_>, mut host: LabHost) -> Result<HarnessRun> {
    let execute = harness.execute()?;
    let mut tally = Tally::default();
    let mut lost = LostGuests::default();
    let mut line = |line: &str| {
        println!("{line}");
        tally.read(line);
        lost.read(line);
    };
    let outcome = client::run(
        &mut host,
        execute,
        Some(HARNESS_LIMIT),
        Streams::Lines(&mut line),
    );
    let host = match outcome {
        Ok(outcome) => {
            tally.end(outcome.exit_code() == 0);
            (outcome != client::Outcome::TimedOut).then_some(host)
        }
        Err(error @ Error::HostLost { .. }) => {
            eprintln!("lab: {}", crate::error::report(&error));
            tally.end(false);
            None
        }
        Err(error) => return Err(error),
    };
    Ok(HarnessRun {
        tally,
        lost: lost.into_tests(),
        host,
    })
}

/// Runs the tests once more that lost a guest to a crash or a hang of its processors:
/// QEMU's emulation of nested virtualization does that to a guest with several
/// processors now and then (tests/README.md has the figures). A test counts as
/// its second run went, and as a retry; a mistake of Bellhop's that crashes
/// guests would have to spare that one.
fn run_lost_again(harness: &Harness<'_>, first: HarnessRun) -> Result<HarnessRun> {
    let HarnessRun {
        mut tally,
        lost,
        mut host,
    } = first;
    for name in &lost {
        let Some(running) = host.take() else {
            break;
        };
        println!("lab: {name} lost its guest; once more");
        let again = run_harness(&harness.only(name), running)?;
        tally.failed = tally.failed.saturating_sub(1);
        tally.retries += 1;
        tally += again.tally;
        host = again.host;
    }
    Ok(HarnessRun { tally, lost, host })
}

fn run_here(harness: &Harness<'_>) -> Result<Tally> {
    let execute = harness.execute()?;
    here::check()?;
    let mut command = Command::new(harness.program);
    command
        .args(execute.arguments.get(1..).unwrap_or_default())
        .envs(&execute.environment)
        .env("BELLHOP_LAB", "here")
        .current_dir(&execute.directory);
    stream(&mut command)
}
