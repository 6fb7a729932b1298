//! Builds the project's own programs with cargo.
//!
//! Programs are linked statically (see `.cargo/config.toml`), so the same file runs here, in the
//! lab host and as a guest's init.

use super::Profile;
use crate::error::{Error, Result};
use crate::files;
use crate::process::{self, die_with_parent};
use crate::progress::Progress;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// All packages. Each build names all of them: cargo selects the features of shared dependencies by
/// the packages of a build. Another selection would build them again.
pub const PACKAGES: [&str; 11] = [
    "vdpa",
    "vdpa-mgmt",
    "devices",
    "bellhop-api",
    "vmm",
    "bellhop-common",
    "bellhop-diagnostics",
    "bellhop-node",
    "bellhop",
    "lab",
    "launcher",
];

/// A small test target of each package with integration tests. Cargo enables the features of a
/// package's development dependencies when it builds a test of it. With these targets, programs and
/// tests share one build of everything. A package's tests also build its programs.
const SMALL_TESTS: [&str; 3] = ["boot_lab", "boot_kvm_vcpu", "api_access"];

/// The programs that a measurement needs.
const PROGRAMS: [&str; 4] = ["bellhop", "lab-host", "lab-guest", "lab-bench"];

/// Set where this program is cargo's RUSTC_WORKSPACE_WRAPPER, which compiles only the workspace's
/// crates.
const WRAPPER: &str = "LAB_RUSTC_COVERAGE";

/// Counters at a movable address lie in the mapped profile (LLVM's "continuous mode"), so the
/// counts survive a killed program.
const COUNTERS: [&str; 4] = [
    "-C",
    "instrument-coverage",
    "-C",
    "llvm-args=-runtime-counter-relocation",
];

/// Runs the compiler with counters if cargo has started this program as its wrapper. A shell script
/// cannot be the wrapper: shells drop variables like `CARGO_BIN_EXE_lab-curl`.
pub fn rustc_with_counters() -> Option<std::io::Error> {
    std::env::var_os(WRAPPER)?;
    let mut words = std::env::args_os().skip(1);
    let mut rustc = Command::new(words.next()?);
    Some(rustc.args(words).args(COUNTERS).exec())
}

/// What kind of executable cargo built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program.
    Program,
    /// Unit tests of a library or a program.
    UnitTests,
    /// A file of integration tests.
    IntegrationTests,
}

/// One executable that cargo built.
#[derive(Debug, Clone)]
pub struct Built {
    /// The target's name: a binary's, a library's or an integration test's.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// The executable.
    pub path: PathBuf,
    /// The folder of its package.
    pub package: PathBuf,
}

/// Builds the project's programs and the test targets that `tests`, words for cargo, select.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] when something does not compile.
pub fn programs(repository: &Path, profile: Profile, tests: &[String]) -> Result<Vec<Built>> {
    let mut words = match profile {
        Profile::Dev | Profile::Coverage => vec!["test", "--no-run"],
        Profile::Release => vec!["build", "--release"],
    };
    words.extend(PACKAGES.iter().flat_map(|package| ["--package", package]));
    match profile {
        Profile::Dev | Profile::Coverage => {
            words.extend(SMALL_TESTS.iter().flat_map(|test| ["--test", test]));
        }
        Profile::Release => words.extend(PROGRAMS.iter().flat_map(|one| ["--bin", one])),
    }
    words.extend(tests.iter().map(String::as_str));
    cargo(repository, &words, profile, "programs and tests")
}

/// Builds only the `bellhop` command, with a profile of Cargo.toml.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] when something does not compile.
pub fn bellhop(repository: &Path, profile: &str) -> Result<PathBuf> {
    let words = ["build", "--profile", profile, "--package", "bellhop"];
    find(
        &cargo(repository, &words, Profile::Release, "bellhop")?,
        "bellhop",
    )
}

/// Runs `cargo ARGUMENTS --message-format=json` in the repository and returns the executables it
/// built or found up to date. Cargo's progress goes to the step's line, compiler diagnostics to
/// the error.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] when something does not compile.
fn cargo(
    repository: &Path,
    arguments: &[&str],
    profile: Profile,
    what: &str,
) -> Result<Vec<Built>> {
    let progress = Progress::start(what);
    let mut command = process::cargo();
    command
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        // Cargo draws its bar (`Building 120/215: vmm`) only where it knows the width.
        .env("CARGO_TERM_PROGRESS_WHEN", "always")
        .env("CARGO_TERM_PROGRESS_WIDTH", "100")
        .current_dir(repository)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if profile == Profile::Coverage {
        let own = std::env::current_exe().map_err(Error::system("find this program"))?;
        command
            .env("RUSTC_WORKSPACE_WRAPPER", own)
            .env(WRAPPER, "1");
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let started = |source| Error::Start {
        program: program.clone(),
        source,
    };
    let mut child = die_with_parent(&mut command).spawn().map_err(started)?;
    let (built, said) = std::thread::scope(|scope| {
        let errors = child.stderr.take().map(|stderr| {
            let progress = &progress;
            scope.spawn(move || read_progress(stderr, progress))
        });
        let mut built = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
                built.extend(executable(&line));
            }
        }
        let said = errors
            .and_then(|errors| errors.join().ok())
            .unwrap_or_default();
        (built, said)
    });
    let status = child.wait().map_err(started)?;
    if status.success() {
        return Ok(built);
    }
    Err(Error::Program {
        program: format!("cargo {}", arguments.join(" ")),
        status: status.to_string(),
        tail: files::last_lines(&said, 60),
    })
}

/// Shows cargo's progress and returns its other lines. A bar ends with a carriage return, and the
/// next output erases it.
fn read_progress(stream: impl Read, progress: &Progress) -> String {
    let mut said = String::new();
    let mut line = Vec::new();
    for byte in BufReader::new(stream).bytes().map_while(|byte| byte.ok()) {
        if byte != b'\r' && byte != b'\n' {
            line.push(byte);
            continue;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_start_matches("\u{1b}[K").trim_end();
        match bar(text) {
            Some(bar) => progress.line(bar),
            None if text.trim().is_empty() => {}
            None => {
                progress.line(text.trim());
                said.push_str(text);
                said.push('\n');
            }
        }
        line.clear();
    }
    said
}

/// The text of cargo's bar: `120/215: vmm` of `Building [====> ] 120/215: vmm`.
fn bar(line: &str) -> Option<&str> {
    let (_, rest) = line
        .trim_start()
        .strip_prefix("Building [")?
        .split_once(']')?;
    Some(rest.trim())
}

/// The executable that a message of cargo's announces, if any.
fn executable(message: &str) -> Option<Built> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message.get("reason")? != "compiler-artifact" {
        return None;
    }
    let target = message.get("target")?;
    let kind = match target.get("kind")?.get(0)?.as_str()? {
        "test" => Kind::IntegrationTests,
        _ if message.get("profile")?.get("test")? == true => Kind::UnitTests,
        _ => Kind::Program,
    };
    let manifest = Path::new(message.get("manifest_path")?.as_str()?);
    Some(Built {
        name: target.get("name")?.as_str()?.to_owned(),
        kind,
        path: PathBuf::from(message.get("executable")?.as_str()?),
        package: manifest.parent()?.to_path_buf(),
    })
}

/// The program or the file of integration tests of the given name.
///
/// # Errors
/// [`Error::Invalid`] when cargo built none of that name.
pub fn find(built: &[Built], name: &str) -> Result<PathBuf> {
    built
        .iter()
        .find(|built| built.name == name && built.kind != Kind::UnitTests)
        .map(|built| built.path.clone())
        .ok_or_else(|| Error::invalid("the build", format!("cargo built no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_count() {
        let message = |kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"x","kind":["{kind}"]}},
                    "profile":{{"test":{test}}},"manifest_path":"/p/Cargo.toml",
                    "executable":{executable}}}"#
            )
        };
        let built = executable(&message("bin", false, r#""/t/x""#)).unwrap();
        assert_eq!((built.name.as_str(), built.kind), ("x", Kind::Program));
        assert_eq!((built.path, built.package), ("/t/x".into(), "/p".into()));
        let kind = |kind, test| executable(&message(kind, test, r#""/t/x""#)).unwrap().kind;
        assert_eq!(kind("lib", true), Kind::UnitTests);
        assert_eq!(kind("test", true), Kind::IntegrationTests);
        for line in [
            message("lib", false, "null").as_str(),
            r#"{"reason":"build-finished","success":true}"#,
            "not json",
            "",
        ] {
            assert!(executable(line).is_none());
        }
    }

    #[test]
    fn bars_are_progress_and_the_rest_is_kept() {
        let progress = Progress::start("test");
        let output = b"   Compiling a\n    Building [==>  ] 3/9: a, b\r\x1b[Kerror: no\n";
        let said = read_progress(&output[..], &progress);
        assert_eq!(said, "   Compiling a\nerror: no\n");
        assert_eq!(bar("    Building [==>  ] 3/9: a"), Some("3/9: a"));
        assert_eq!(bar("   Compiling a"), None);
    }
}
