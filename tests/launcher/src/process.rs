//! Child processes of the lab. They never outlive it, and their output goes to a log and to the
//! progress display.

use crate::error::{Error, Result};
use crate::files;
use crate::progress::Progress;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// The cargo that runs this program, or the one in PATH.
///
/// It lacks the variables that cargo set for this program. A build script that reads one of them
/// would run again, and every crate above it would be built again.
pub fn cargo() -> Command {
    without_cargo(Command::new(
        std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
    ))
}

/// The command without the variables that cargo set for this program.
pub fn without_cargo(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR")
        {
            command.env_remove(name);
        }
    }
    command
}

/// Makes the kernel kill the child when the thread that started it ends, so that no QEMU and no
/// package installation outlives the lab.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    // SAFETY: needed because only the child itself can ask for the signal. The
    // closure runs between fork and exec and makes one system call: it takes
    // no lock and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        })
    }
}

/// The exit status as a shell gives it: the code, or 128 + the signal.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Runs a program to its end. Standard output and error go to `log` and line by
/// line to `progress`; standard input is empty.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] with the last lines when it fails.
pub fn run_logged(command: &mut Command, log: &Path, progress: &Progress) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    if let Some(parent) = log.parent() {
        files::create_directory(parent)?;
    }
    let mut file = File::create(log).map_err(Error::file("create", log))?;
    let (reader, writer) = std::io::pipe().map_err(Error::system("create a pipe"))?;
    let second = writer
        .try_clone()
        .map_err(Error::system("duplicate a pipe"))?;
    die_with_parent(command)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(second);
    let mut child = command.spawn().map_err(|source| Error::Start {
        program: program.clone(),
        source,
    })?;
    // The command keeps its copies of the pipe's writing end. Without them the reader sees the end
    // when the child has closed its own.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {
                file.write_all(&line).map_err(Error::file("write", log))?;
                let text = String::from_utf8_lossy(&line);
                let text = text.trim_end();
                if !text.is_empty() {
                    progress.line(text);
                }
            }
        }
    }
    let status = child.wait().map_err(|source| Error::Start {
        program: program.clone(),
        source,
    })?;
    if status.success() {
        return Ok(());
    }
    let printed = files::read(log)?;
    Err(Error::Program {
        program,
        status: status.to_string(),
        tail: files::last_lines(&String::from_utf8_lossy(&printed), 20),
    })
}

/// Runs a program to its end and returns what it wrote to standard output.
///
/// # Errors
/// [`Error::Start`]; [`Error::Program`] with the last lines when it fails.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = die_with_parent(command)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Start {
            program: program.clone(),
            source,
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::Program {
        program,
        status: output.status.to_string(),
        tail: files::last_lines(&String::from_utf8_lossy(&output.stderr), 20),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_shows_its_last_lines() {
        let log = std::env::temp_dir().join(format!("lab-process-{}", std::process::id()));
        let progress = Progress::start("test");
        let error = run_logged(
            Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]),
            &log,
            &progress,
        )
        .unwrap_err();
        let _ = std::fs::remove_file(&log);
        let Error::Program { status, tail, .. } = error else {
            panic!("unexpected: {error}");
        };
        assert!(status.contains('3'), "{status}");
        assert_eq!(tail, "one\ntwo");
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
