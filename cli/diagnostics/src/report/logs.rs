//! Logs: of the daemon, the kernel, and the VMs' processes. Consoles of guests only on request.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use super::bundle::Bundle;
use super::context::{Context, of_each_machine};

/// How much of the end of each log is included, in bytes.
const LOG_MAX: u64 = 256 << 10;
/// The time limit of a command that prints a log.
const PATIENCE: Duration = Duration::from_secs(10);

/// Adds the logs.
pub(super) fn add(context: &Context, bundle: &mut Bundle) {
    let journal = [
        "--unit=bellhop.service",
        "--lines=3000",
        "--no-pager",
        "--output=short-iso-precise",
        "--quiet",
    ];
    bundle.put(&["logs", "node.log"], printed_by("journalctl", &journal));
    bundle.put(&["logs", "kernel.log"], printed_by("dmesg", &[]));
    of_machines(context, bundle);
}

fn of_machines(context: &Context, bundle: &mut Bundle) {
    let vms = context.state_dir.join("vms");
    for (name, directory) in of_each_machine(&vms, "logs/vms", bundle) {
        let files = match std::fs::read_dir(directory) {
            Ok(files) => files,
            Err(error) => {
                bundle.miss(&format!("logs/vms/{name}"), &error.to_string());
                continue;
            }
        };
        for file in files.flatten() {
            let log = file.file_name().to_string_lossy().into_owned();
            let is_console = log.starts_with("console");
            if log.contains(".log") && (context.console || !is_console) {
                bundle.put(&["logs", "vms", &name, &log], end_of(&file.path()));
            }
        }
    }
}

/// The end of a regular file.
fn end_of(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    file.seek(SeekFrom::Start(metadata.len().saturating_sub(LOG_MAX)))?;
    let mut end = Vec::new();
    file.take(LOG_MAX).read_to_end(&mut end)?;
    Ok(end)
}

/// The end of a command's output. The command is killed on a timeout.
fn printed_by(program: &str, arguments: &[&str]) -> io::Result<Vec<u8>> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| io::Error::other(format!("cannot run {program}: {error}")))?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let output = std::thread::spawn(move || end_of_stream(output));
    let errors = std::thread::spawn(move || end_of_stream(errors));
    let start = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if start.elapsed() > PATIENCE => {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::other(format!(
                    "{program} did not finish within {} s",
                    PATIENCE.as_secs()
                )));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let gone = |_| io::Error::other("the thread that reads its output ended");
    let printed = output.join().map_err(gone)??;
    let said = errors.join().map_err(gone)??;
    if status.success() {
        Ok(printed)
    } else {
        Err(io::Error::other(format!(
            "{program} failed ({status}): {}",
            String::from_utf8_lossy(&said).trim()
        )))
    }
}

fn end_of_stream(stream: Option<impl Read>) -> io::Result<Vec<u8>> {
    let mut end = Vec::new();
    let Some(mut stream) = stream else {
        return Ok(end);
    };
    let max = usize::try_from(LOG_MAX).map_err(io::Error::other)?;
    let mut buffer = [0; 8192];
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            let surplus = end.len().saturating_sub(max);
            end.drain(..surplus);
            return Ok(end);
        }
        end.extend_from_slice(buffer.get(..count).unwrap_or_default());
        // Not after each read, which would move all bytes each time.
        if end.len() > 2 * max {
            let surplus = end.len() - max;
            end.drain(..surplus);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_output_is_kept() {
        assert_eq!(printed_by("printf", &["a b"]).unwrap(), b"a b");
        let end = printed_by("seq", &["200000"]).unwrap();
        assert_eq!(u64::try_from(end.len()).unwrap(), LOG_MAX);
        assert!(end.ends_with(b"\n200000\n"));
        let error = printed_by("sh", &["-c", "echo why >&2; exit 3"]).unwrap_err();
        assert!(error.to_string().contains("why"), "{error}");
        let error = printed_by("/nowhere/at/all", &[]).unwrap_err();
        assert!(error.to_string().contains("cannot run"), "{error}");
    }

    #[test]
    fn only_regular_files_are_logs() {
        let directory = std::env::temp_dir().join(format!("bellhop-logs-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let log = directory.join("a.log");
        std::fs::write(&log, b"x".repeat(300 << 10)).unwrap();
        assert_eq!(end_of(&log).unwrap().len(), 256 << 10);
        std::os::unix::fs::symlink(&log, directory.join("link.log")).unwrap();
        assert!(end_of(&directory.join("link.log")).is_err());
        assert!(end_of(&directory).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
