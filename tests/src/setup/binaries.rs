//! The project's own programs, built by cargo.
//!
//! Owns the calls of cargo. Programs are linked statically (see
//! `.cargo/config.toml`), so the same file runs here, in the lab host and as a
//! guest's init.

use crate::error::{Error, Result};
use crate::files;
use crate::process::die_with_parent;
use crate::progress::Progress;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One program that cargo built.
#[derive(Debug, Clone)]
pub struct Built {
    /// The target's name: a binary's or an integration test's.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
}

/// Runs `cargo ARGUMENTS --message-format=json` in the repository and returns
/// the executables it built or found up to date. Compiler diagnostics go to
/// standard error.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] when something does not compile.
pub fn cargo(repository: &Path, arguments: &[&str], what: &str) -> Result<Vec<Built>> {
    let progress = Progress::start(what);
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&program);
    command
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .current_dir(repository)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for (name, _) in std::env::vars_os() {
        // What the outer cargo set for this program must not change the
        // fingerprints of the inner build.
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR")
        {
            command.env_remove(name);
        }
    }
    let started = |source| Error::Start {
        program: program.to_string_lossy().into_owned(),
        source,
    };
    let mut child = die_with_parent(&mut command).spawn().map_err(started)?;
    let said = std::thread::scope(|scope| {
        let errors = child.stderr.take().map(|stderr| {
            let progress = &progress;
            scope.spawn(move || {
                let mut said = String::new();
                for line in BufReader::new(stderr).lines().map_while(|line| line.ok()) {
                    progress.line(line.trim());
                    said.push_str(&line);
                    said.push('\n');
                }
                said
            })
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
    let (built, said) = said;
    if status.success() {
        return Ok(built);
    }
    Err(Error::Program {
        program: format!("cargo {}", arguments.join(" ")),
        status: status.to_string(),
        tail: files::last_lines(&said, 60),
    })
}

/// The executable that a message of cargo's announces, if any.
fn executable(message: &str) -> Option<Built> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message.get("reason")? != "compiler-artifact" {
        return None;
    }
    Some(Built {
        name: message.get("target")?.get("name")?.as_str()?.to_owned(),
        path: PathBuf::from(message.get("executable")?.as_str()?),
    })
}

/// The executable of the given name.
///
/// # Errors
/// [`Error::Invalid`] when cargo built none of that name.
pub fn find(built: &[Built], name: &str) -> Result<PathBuf> {
    built
        .iter()
        .find(|built| built.name == name)
        .map(|built| built.path.clone())
        .ok_or_else(|| Error::invalid("the build", format!("cargo built no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_count() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"x"},"executable":"/t/x"}"#;
        let built = executable(line).unwrap();
        assert_eq!((built.name.as_str(), built.path), ("x", "/t/x".into()));
        for line in [
            r#"{"reason":"compiler-artifact","target":{"name":"x"},"executable":null}"#,
            r#"{"reason":"build-finished","success":true}"#,
            "not json",
            "",
        ] {
            assert!(executable(line).is_none());
        }
    }
}
