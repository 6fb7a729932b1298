//! `--coverage`: counts the lines of the product that the tests run.
//!
//! ```text
//!   program ─▶ mapped profile ─▶ target/coverage/{unit,gate,other}
//!                                  └─▶ llvm-profdata ─▶ llvm-cov ─▶ lines of each crate
//! ```
//! A program maps its profile before `main` and counts in it. It needs no later system call and no
//! orderly exit, so sandboxed and killed VMMs count too. Profiles of the lab host stay in its
//! memory until a file of tests ends. A lost lab host loses them.
//!
//! Lines of tests do not count: by convention, the module of unit tests is the last one of a file.

use crate::error::{Error, Result};
use crate::files;
use crate::process::output;
use crate::progress::Progress;
use crate::setup::binaries::Built;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable from which LLVM's runtime takes the name of the profile.
const VARIABLE: &str = "LLVM_PROFILE_FILE";

/// One file for each program, which all its processes share (`%m`) and map (`%c`).
const NAME: &str = "%m%c.profraw";

/// The directory of the profiles in the lab host. It must exist: LLVM's runtime creates a directory
/// only in the first process of a tree, which is the agent.
const IN_LAB_HOST: &str = "/dev/shm";

/// The product's crates: name and source folder, the longest path first.
const CRATES: [(&str, &str); 9] = [
    ("vdpa-mgmt", "vdpa/mgmt/src/"),
    ("vdpa", "vdpa/src/"),
    ("devices", "devices/src/"),
    ("bellhop-api", "vmm/api/src/"),
    ("vmm", "vmm/src/"),
    ("bellhop-common", "cli/common/src/"),
    ("bellhop-diagnostics", "cli/diagnostics/src/"),
    ("bellhop-node", "cli/node/src/"),
    ("bellhop", "cli/src/"),
];

/// The tests that produced a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    Unit,
    /// Lab tests of the gate, or those that a filter names.
    Gate,
    /// The other lab tests of a soak.
    Other,
}

impl Source {
    fn directory(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Gate => "gate",
            Self::Other => "other",
        }
    }
}

/// Collects profiles in the repository's `target/coverage`.
#[derive(Debug)]
pub(super) struct Coverage {
    repository: PathBuf,
    directory: PathBuf,
    /// The folder of LLVM's tools.
    tools: PathBuf,
}

impl Coverage {
    /// Finds LLVM's tools and removes the profiles of an earlier run.
    ///
    /// # Errors
    /// [`Error::Missing`] for the tools; [`Error::File`].
    pub(super) fn start(repository: &Path) -> Result<Self> {
        let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let sysroot = PathBuf::from(String::from_utf8_lossy(&sysroot).trim());
        let tools = sysroot.join("lib/rustlib/x86_64-unknown-linux-gnu/bin");
        if !tools.join("llvm-cov").exists() {
            return Err(Error::missing(
                "the Rust toolchain has no llvm-cov",
                "run `rustup component add llvm-tools`",
            ));
        }
        let directory = repository.join("target/coverage");
        if directory.exists() {
            std::fs::remove_dir_all(&directory).map_err(Error::file("remove", &directory))?;
        }
        Ok(Self {
            repository: repository.to_path_buf(),
            directory,
            tools,
        })
    }

    /// Makes a program on this machine count as a unit test.
    pub(super) fn unit_test(&self, command: &mut Command) {
        let directory = self.directory.join(Source::Unit.directory());
        command.env(VARIABLE, directory.join(NAME));
    }

    /// Makes programs in the lab host count.
    pub(super) fn in_lab_host(environment: &mut BTreeMap<String, String>) {
        environment.insert(VARIABLE.into(), format!("{IN_LAB_HOST}/{NAME}"));
    }

    /// The command for the lab host that moves the profiles of a file of tests into the repository.
    pub(super) fn collect(&self, source: Source, file: &str) -> Vec<String> {
        let target = self.directory.join(source.directory()).join(file);
        let script = r#"mkdir -p "$2" && mv "$1"/*.profraw "$2""#;
        let target = target.to_string_lossy().into_owned();
        ["sh", "-c", script, "collect", IN_LAB_HOST, &target]
            .map(str::to_owned)
            .to_vec()
    }

    /// Prints the share of lines that run in unit tests, in these with the gate, and in all tests.
    ///
    /// # Errors
    /// Those of LLVM's tools and of reading their output.
    pub(super) fn report(&self, built: &[Built]) -> Result<()> {
        let progress = Progress::start("coverage");
        let mut rows: BTreeMap<&str, Vec<Lines>> = BTreeMap::new();
        let mut titles = Vec::new();
        let mut profiles = Vec::new();
        for (source, title) in [
            (Source::Unit, "unit tests"),
            (Source::Gate, "and lab tests"),
            (Source::Other, "and the soak"),
        ] {
            let found = profiles_in(&self.directory.join(source.directory()))?;
            if found.is_empty() {
                continue;
            }
            titles.push(title);
            profiles.extend(found);
            progress.line(title);
            for (name, lines) in self.lines(&profiles, built, source)? {
                rows.entry(name).or_default().push(lines);
            }
        }
        drop(progress);
        print!("lab: lines covered by {:>7}", "");
        titles.iter().for_each(|title| print!("{title:>16}"));
        println!();
        for (name, columns) in rows {
            let all = columns.first().map_or(0, |lines| lines.all);
            print!("lab: {name:>12} {all:>10} lines");
            columns
                .iter()
                .for_each(|lines| print!("{:>14.1} %", lines.percent()));
            println!();
        }
        Ok(())
    }

    /// Counts the lines of each crate.
    fn lines(
        &self,
        profiles: &[PathBuf],
        built: &[Built],
        source: Source,
    ) -> Result<BTreeMap<&'static str, Lines>> {
        let list = self.directory.join("profiles");
        let text: Vec<_> = profiles.iter().map(|one| one.to_string_lossy()).collect();
        files::write(&list, text.join("\n"))?;
        let merged = self
            .directory
            .join(source.directory())
            .with_extension("profdata");
        // A program that is killed while it creates its profile leaves a short one.
        output(
            Command::new(self.tools.join("llvm-profdata"))
                .args(["merge", "--sparse", "--failure-mode=all", "--output"])
                .arg(&merged)
                .arg("--input-files")
                .arg(&list),
        )?;
        let mut command = Command::new(self.tools.join("llvm-cov"));
        command.args(["export", "--format=lcov", "--instr-profile"]);
        command.arg(&merged);
        for (number, built) in built.iter().enumerate() {
            if number > 0 {
                command.arg("--object");
            }
            command.arg(&built.path);
        }
        let lcov = output(&mut command)?;
        let mut counted = BTreeMap::new();
        for (path, hits) in parse(&String::from_utf8_lossy(&lcov)) {
            let Ok(relative) = Path::new(path).strip_prefix(&self.repository) else {
                continue;
            };
            let relative = relative.to_string_lossy();
            let Some((name, _)) = CRATES.iter().find(|(_, one)| relative.starts_with(one)) else {
                continue;
            };
            if relative.ends_with("/tests.rs") || relative.contains("/tests/") {
                continue;
            }
            let end = product_lines(&files::read_text(Path::new(path))?);
            let lines: &mut Lines = counted.entry(*name).or_default();
            for (_, hit) in hits.range(..=end) {
                lines.all += 1;
                lines.covered += u32::from(*hit);
            }
        }
        Ok(counted)
    }
}

/// The number of lines with code, and of those that ran.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lines {
    all: u32,
    covered: u32,
}

impl Lines {
    fn percent(&self) -> f64 {
        100.0 * f64::from(self.covered) / f64::from(self.all.max(1))
    }
}

/// All profiles below a directory, which need not exist.
fn profiles_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !directory.is_dir() {
        return Ok(found);
    }
    for path in files::list(directory)? {
        if path.is_dir() {
            found.extend(profiles_in(&path)?);
        } else if path.extension().is_some_and(|end| end == "profraw") {
            found.push(path);
        }
    }
    Ok(found)
}

/// For each file, whether each line with code ran. A line counts once, however many programs have
/// it.
fn parse(lcov: &str) -> BTreeMap<&str, BTreeMap<usize, bool>> {
    let mut all: BTreeMap<&str, BTreeMap<usize, bool>> = BTreeMap::new();
    let mut file = "";
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            file = path;
        } else if let Some((number, count)) = line
            .strip_prefix("DA:")
            .and_then(|line| line.split_once(','))
            && let Ok(number) = number.parse()
        {
            *all.entry(file).or_default().entry(number).or_default() |= count != "0";
        }
    }
    all
}

/// How many lines of a source file precede its module of unit tests.
fn product_lines(source: &str) -> usize {
    let lines: Vec<&str> = source.lines().collect();
    lines
        .windows(2)
        .position(|two| two == ["#[cfg(test)]", "mod tests {"])
        .unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_ran_if_it_ran_in_one_program() {
        let lcov = "SF:/a\nDA:1,0\nDA:2,7\nend_of_record\nSF:/a\nDA:1,3\nDA:4,0\nend_of_record\n";
        let parsed = parse(lcov);
        let expected = BTreeMap::from([(1, true), (2, true), (4, false)]);
        assert_eq!(parsed, BTreeMap::from([("/a", expected)]));
    }

    #[test]
    fn lines_of_unit_tests_are_none_of_the_product() {
        assert_eq!(product_lines("a\nb\n#[cfg(test)]\nmod tests {\nc\n}\n"), 2);
        assert_eq!(product_lines("#[cfg(test)]\nmod tests;\na\n"), 3);
    }
}
