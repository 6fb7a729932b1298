//! Checks whether another program reads this program's state, before a machine is quiesced for it.
//!
//! Owns the query and the comparison. It must not know how a machine is handed over.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::saved::SavedMachine;
use crate::Error;
use crate::sandbox::seccomp;
use crate::snapshot::format::FORMAT_VERSION;

/// The entry of the whole format's version among those of the parts.
const FORMAT: &str = "format";

/// Precedes a system call among the entries of an answer.
const SYSTEM_CALL: &str = "system call ";

/// The subcommand that answers with [`requirements`] as JSON.
pub const STATE_VERSIONS_COMMAND: &str = "state-versions";

/// How long a program may take to answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Maximum length of an answer, in bytes.
const ANSWER_MAX: u64 = 1 << 16;

/// Returns the versions that this program saves, by section and device name; `format` is that of
/// the whole. A program reads these versions, and for sections also the previous ones.
#[must_use]
pub fn state_versions() -> BTreeMap<String, u32> {
    let mut versions: BTreeMap<String, u32> = SavedMachine::versions()
        .into_iter()
        .map(|(name, version)| (name.to_owned(), version))
        .collect();
    let devices = devices::virtio::state_versions().into_iter();
    versions.extend(devices.map(|(name, version)| (name.to_owned(), version)));
    versions.insert(FORMAT.to_owned(), FORMAT_VERSION);
    versions
}

/// Whether a program that writes version `reader` of a part can read version `writer`. It reads the
/// same version, and for a section also the previous one. Either may lack a device; whether the
/// machine has it shows when the state is read.
pub(super) fn reads(part: &str, reader: Option<u32>, writer: Option<u32>) -> bool {
    let device = devices::virtio::state_versions()
        .iter()
        .any(|(name, _)| *name == part);
    match (reader, writer) {
        (Some(reader), Some(writer)) => {
            let before = writer > 0 && writer.checked_add(1) == Some(reader);
            reader == writer || (before && !device && part != FORMAT)
        }
        (None, _) | (_, None) => device,
    }
}

/// Returns the answer to [`STATE_VERSIONS_COMMAND`]: [`state_versions`], and the system calls that
/// this program makes.
#[must_use]
pub fn requirements() -> BTreeMap<String, u32> {
    let calls = seccomp::needed().into_iter();
    let mut answer = state_versions();
    answer.extend(calls.map(|call| (format!("{SYSTEM_CALL}{call}"), 1)));
    answer
}

/// Checks that `program` can read the state that this program saves, and can run under the system
/// call filters of this process, which it inherits.
///
/// # Errors
/// It cannot be executed, is not Bellhop, reads other versions, or makes other system calls.
pub fn check_program(program: &Path) -> Result<(), Error> {
    if !program.is_absolute() {
        return Err(Error::unusable(format!(
            "{} is not an absolute path",
            program.display()
        )));
    }
    let theirs = ask(program)?;
    for (section, ours) in state_versions() {
        let version = theirs.get(&section).copied();
        if !reads(&section, version, Some(ours)) {
            let theirs = version.map_or_else(|| "none".to_owned(), |version| version.to_string());
            return Err(Error::unusable(format!(
                "{} does not read the state that this program saves: {section} has version {ours} \
                 here, but {theirs} there",
                program.display()
            )));
        }
    }
    let calls = theirs
        .keys()
        .filter_map(|entry| entry.strip_prefix(SYSTEM_CALL));
    match seccomp::first_denied(calls) {
        None => Ok(()),
        Some(call) => Err(Error::unusable(format!(
            "{} makes a system call ({call}) that the filter of this VM's process denies, and an \
             upgrade in place keeps the filter: stop and start the VM, or migrate it to a process \
             of that program",
            program.display()
        ))),
    }
}

fn ask(program: &Path) -> Result<BTreeMap<String, u32>, Error> {
    let failed = |source: io::Error| {
        Error::unusable(format!("cannot execute {}", program.display())).because(source)
    };
    let mut child = Command::new(program)
        .arg(STATE_VERSIONS_COMMAND)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let answered = wait(&mut child);
    // Needed for a program that never ends; this one may have ended already.
    let _ = child.kill();
    let _ = child.wait();
    let mut answer = Vec::new();
    if let (true, Some(output)) = (answered.map_err(failed)?, child.stdout.take()) {
        output
            .take(ANSWER_MAX)
            .read_to_end(&mut answer)
            .map_err(failed)?;
    }
    serde_json::from_slice(&answer).map_err(|_| {
        Error::unusable(format!(
            "{} does not report which versions of a saved machine it reads: is it Bellhop?",
            program.display()
        ))
    })
}

/// Whether the child succeeded in time. A valid answer fits into a pipe.
fn wait(child: &mut Child) -> io::Result<bool> {
    let started = Instant::now();
    while started.elapsed() < ANSWER_TIME {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::*;

    /// A script with this body; removed when dropped.
    struct Script(PathBuf);

    impl Script {
        fn new(name: &str, says: &str) -> Self {
            let path = std::env::temp_dir().join(format!("bellhop-{name}-{}", std::process::id()));
            fs::write(&path, format!("#!/bin/sh\n{says}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            Self(path)
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn answer(versions: &BTreeMap<String, u32>) -> String {
        format!("echo '{}'", serde_json::to_string(versions).unwrap())
    }

    #[test]
    fn a_program_that_reads_the_same_or_one_version_more_will_do() {
        let mut versions = state_versions();
        let same = Script::new("same", &answer(&versions));
        check_program(&same.0).unwrap();
        *versions.get_mut("vcpu").unwrap() += 1;
        versions.insert("another".to_owned(), 1);
        let newer = Script::new("newer", &answer(&versions));
        check_program(&newer.0).unwrap();
        *versions.get_mut("vcpu").unwrap() += 1;
        let far = Script::new("far", &answer(&versions));
        let text = check_program(&far.0).unwrap_err().to_string();
        assert!(
            text.contains("does not read") && text.contains("vcpu"),
            "{text}"
        );
        // Devices and the format must match exactly.
        for (step, part) in [
            (1, "virtio-vdpa"),
            (u32::MAX, "virtio-vdpa"),
            (1, FORMAT),
            (u32::MAX, FORMAT),
        ] {
            let mut versions = state_versions();
            let version = versions.get_mut(part).unwrap();
            *version = version.wrapping_add(step);
            let other = Script::new(&format!("{part}-{step}"), &answer(&versions));
            let text = check_program(&other.0).unwrap_err().to_string();
            assert!(text.contains(&format!("{part} has version")), "{text}");
        }
        let mut silent = state_versions();
        silent.retain(|name, _| !name.starts_with("virtio-"));
        let before = Script::new("before", &answer(&silent));
        check_program(&before.0).unwrap();
        versions.remove("vm");
        versions.remove("vcpu");
        let lacks = Script::new("lacks", &answer(&versions));
        assert!(check_program(&lacks.0).is_err());
    }

    #[test]
    fn other_programs_are_refused() {
        for (name, says) in [
            ("silent", "exit 0"),
            ("fails", "echo '{}'; exit 1"),
            ("rubbish", "echo hello"),
        ] {
            let script = Script::new(name, says);
            let text = check_program(&script.0).unwrap_err().to_string();
            assert!(text.contains("is it Bellhop"), "{name}: {text}");
        }
        let text = check_program(Path::new("bellhop")).unwrap_err().to_string();
        assert!(text.contains("absolute"), "{text}");
        let text = check_program(Path::new("/nonexistent"))
            .unwrap_err()
            .to_string();
        assert!(text.contains("cannot execute"), "{text}");
    }
}
