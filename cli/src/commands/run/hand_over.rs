//! Hands a VM from one program to the next in the same process: `execve`, and the state that
//! survives it.
//!
//! ```text
//!   this program                                   the next program (usually another version)
//!   state, ram, the file of this program ─execve─> take ─> the VM resumes
//!        ^                                           │ it cannot
//!        └────────────────── execve ─────────────────┘  with the reason, which is logged
//! ```
//! Process ID, standard streams and environment stay. The command line stays, too: a program that
//! hands the VM back restores the command line of the former program. Owns the environment
//! variables that name the descriptors. Their contents belong to `vmm`.

mod rings;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::thread::Builder;

use bellhop_common::error::Error;
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;
use vmm::machine::{HandOver, HandedOver, Origin, SnapshotError};
use vmm::sandbox::seccomp;

use self::rings::Rings;
use super::inherited;

/// Names the descriptors: `state=N,ram=N,previous=N,arguments=N`, optionally with `,failed=REASON`.
const VARIABLE: &str = "BELLHOP_HAND_OVER";

/// Names the descriptor of the former program's KVM VM. It is a variable of its own: programs that
/// do not know it keep the descriptor open until they end.
const FORMER_VM: &str = "BELLHOP_HAND_OVER_VM";

/// The prefix of each descriptor's number, in order.
const NAMES: [&str; 4] = ["state=", "ram=", "previous=", "arguments="];

/// The maximum size of a restored command line in bytes: more than the kernel accepts
/// (MAX_ARG_STRLEN times a few).
const ARGUMENTS_MAX: u64 = 1 << 21;

/// The state that another program has handed over.
#[derive(Debug)]
pub(super) struct Taken {
    files: Files,
    /// Why the next program failed, if this one had the VM before.
    pub(super) failed: Option<String>,
}

/// The files that survive the `execve`.
#[derive(Debug)]
struct Files {
    state: File,
    ram: File,
    /// The former program.
    previous: File,
    /// Its arguments, each followed by a NUL.
    arguments: File,
    /// The KVM VM of that program.
    vm: Option<OwnedFd>,
    /// Whether that program takes the rings of disks.
    takes_rings: bool,
}

impl Files {
    fn all(&self) -> [&File; 4] {
        [&self.state, &self.ram, &self.previous, &self.arguments]
    }

    /// Executes the next program. Returns only on a failure.
    fn execute(
        &self,
        program: &Path,
        arguments: impl IntoIterator<Item = OsString>,
        failed: Option<&str>,
    ) -> io::Error {
        let rings = self.takes_rings.then(Rings::all).flatten();
        if let Err(error) = self.keep(rings.as_ref(), FdFlags::empty()) {
            return error;
        }
        let numbers = self.all().map(AsRawFd::as_raw_fd);
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env(VARIABLE, variable(numbers, failed));
        match &self.vm {
            Some(vm) => command.env(FORMER_VM, vm.as_raw_fd().to_string()),
            None => command.env_remove(FORMER_VM),
        };
        match &rings {
            Some(rings) => command.env(rings::VARIABLE, rings.variable()),
            None => command.env_remove(rings::VARIABLE),
        };
        let error = command.exec();
        // No other program that this process executes may inherit them.
        let kept = self.keep(rings.as_ref(), FdFlags::CLOEXEC);
        kept.err().unwrap_or(error)
    }

    fn keep(&self, rings: Option<&Rings>, flags: FdFlags) -> io::Result<()> {
        let files = self.all().map(AsFd::as_fd).into_iter();
        let files = files.chain(self.vm.as_ref().map(AsFd::as_fd));
        for file in files.chain(rings.into_iter().flat_map(Rings::descriptors)) {
            rustix::io::fcntl_setfd(file, flags)?;
        }
        Ok(())
    }
}

fn variable(numbers: [RawFd; 4], failed: Option<&str>) -> String {
    let numbers = NAMES.iter().zip(numbers);
    let mut parts: Vec<String> = numbers
        .map(|(name, number)| format!("{name}{number}"))
        .collect();
    parts.extend(failed.map(|reason| format!("failed={reason}")));
    parts.join(",")
}

/// The numbers and the reason in the variable.
fn parse(text: &str) -> Option<([RawFd; 4], Option<String>)> {
    let mut parts = text.splitn(5, ',');
    let mut numbers = [0; 4];
    for (name, number) in NAMES.iter().zip(&mut numbers) {
        *number = parts.next()?.strip_prefix(name)?.parse().ok()?;
    }
    let failed = match parts.next() {
        None => None,
        Some(failed) => Some(failed.strip_prefix("failed=")?.to_owned()),
    };
    Some((numbers, failed))
}

/// Whether another program has handed a VM over.
pub(super) fn is_there() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Takes the handed-over state, if any. Must run before this process opens a descriptor without
/// close-on-exec.
pub(super) fn take() -> Result<Option<Taken>, Error> {
    let Some(value) = std::env::var_os(VARIABLE) else {
        return Ok(None);
    };
    let Some((numbers, failed)) = value.to_str().and_then(parse) else {
        return Err(Error::failed(format!(
            "{VARIABLE} has the invalid value {value:?}: unset it"
        )));
    };
    let own = |number| {
        inherited::own(number).map_err(|reason| {
            Error::failed(format!("{VARIABLE}: the descriptor {number} {reason}"))
        })
    };
    let file = |number| own(number).map(File::from);
    let [state, ram, previous, arguments] = numbers;
    let vm = std::env::var_os(FORMER_VM).map(|value| {
        let number = value.to_str().and_then(|value| value.parse().ok());
        let number = number.ok_or_else(|| {
            Error::failed(format!(
                "{FORMER_VM} is {value:?}, which is not a descriptor: unset it"
            ))
        })?;
        own(number)
    });
    Ok(Some(Taken {
        files: Files {
            state: file(state)?,
            ram: file(ram)?,
            previous: file(previous)?,
            arguments: file(arguments)?,
            vm: vm.transpose()?,
            takes_rings: rings::take(own)?,
        },
        failed,
    }))
}

impl Taken {
    /// The state of the VM to resume.
    pub(super) fn origin(&self) -> Result<Origin, SnapshotError> {
        let Files { state, ram, .. } = &self.files;
        let ram = ram.try_clone().map_err(SnapshotError::Descriptor)?;
        let handed_over = HandedOver::read(state, ram, self.failed.clone())?;
        Ok(Origin::HandedOver(Box::new(handed_over)))
    }

    /// Completes the hand-over: the VM runs here. KVM destroys the former VM in the background.
    pub(super) fn resume(self) {
        let vm = self.files.vm;
        let closing = Builder::new().name("vm-teardown".to_owned());
        if let Err(error) = closing.spawn(move || {
            seccomp::enter(seccomp::Thread::VmTeardown);
            drop(vm);
        }) {
            tracing::debug!(%error, "closed the former KVM VM without a thread");
        }
    }

    /// Hands everything back to the former program, with the reason. Returns only on a failure.
    pub(super) fn give_back(&self, reason: &str) -> io::Error {
        let mut arguments = Vec::new();
        let mut file = &self.files.arguments;
        let read = file
            .rewind()
            .and_then(|()| file.take(ARGUMENTS_MAX).read_to_end(&mut arguments));
        if let Err(error) = read {
            return error;
        }
        let arguments = arguments
            .split_inclusive(|byte| *byte == 0)
            .filter_map(|argument| argument.strip_suffix(&[0]))
            .map(|argument| OsString::from_vec(argument.to_vec()));
        let program = format!("/proc/self/fd/{}", self.files.previous.as_raw_fd());
        let reason = reason.replace(['\n', '\0'], " ");
        self.files
            .execute(Path::new(&program), arguments, Some(&reason))
    }
}

/// Executes the next program. Returns only on a failure.
pub(super) fn hand_over(machine: HandOver) -> io::Error {
    let HandOver {
        program,
        state,
        ram,
        vm,
    } = machine;
    let files = this_program().map(|(previous, arguments)| Files {
        state,
        ram,
        previous,
        arguments,
        vm,
        takes_rings: true,
    });
    match files {
        Ok(files) => files.execute(&program, std::env::args_os().skip(1), None),
        Err(error) => error,
    }
}

/// The executable of this program at its start, even if its path has another file now, and its
/// arguments.
fn this_program() -> io::Result<(File, File)> {
    let memfd = rustix::fs::memfd_create("arguments", MemfdFlags::CLOEXEC)?;
    let mut arguments = File::from(memfd);
    for argument in std::env::args_os().skip(1) {
        arguments.write_all(argument.as_bytes())?;
        arguments.write_all(&[0])?;
    }
    Ok((File::open("/proc/self/exe")?, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_as_it_is_written() {
        for (numbers, failed) in [
            ([3, 4, 5, 6], None),
            ([7, 70, 700, 7000], Some("no, it did not")),
        ] {
            let text = variable(numbers, failed);
            assert_eq!(parse(&text), Some((numbers, failed.map(str::to_owned))));
        }
        for text in [
            "",
            "state=3",
            "state=3,ram=4,previous=5",
            "ram=3,state=4,previous=5,arguments=6",
            "state=3,ram=4,previous=5,arguments=x",
            "state=3,ram=4,previous=5,arguments=6,why=no",
            "state=3,ram=4,previous=5,arguments=99999999999",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
