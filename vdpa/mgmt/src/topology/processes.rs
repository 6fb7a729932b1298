//! Finds the processes that have character devices open, and the pages of them that are mapped.
//!
//! This module reads `/proc`: one scan of all processes for any number of devices. Text from other
//! processes (names, command lines) is for display only: it is limited in size and never acted
//! upon. A process that exits meanwhile is left out.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;

use vdpa::device::holder;
use vdpa::doorbell::DOORBELL_SIZE;

use crate::link::is_interface_name;

/// Maximum bytes of a command line to read.
const COMMAND_LINE_MAX: u64 = 64 << 10;

/// Maximum bytes of a memory map to read.
const MEMORY_MAP_MAX: u64 = 16 << 20;

/// Maximum bytes of the description of a descriptor to read.
const DESCRIPTOR_MAX: u64 = 64 << 10;

/// More queues than a device can have.
const QUEUES_MAX: u64 = 1 << 16;

/// The first PID namespace of a machine (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceHolder {
    /// Process id.
    pub pid: u32,
    /// Its name (`/proc/PID/comm`).
    pub command: String,
    /// Its executable (`/proc/PID/exe`), if this process may know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub executable: Option<PathBuf>,
    /// The virtual machine, if it is `bellhop run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bellhop: Option<BellhopRun>,
}

/// The virtual machine of a `bellhop run`, by its command line. A machine has no name of its own;
/// these tell it from others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BellhopRun {
    /// The file that it was configured with (`--file`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// The socket of its API (`--api-socket`). That of a node's virtual machine is in a directory
    /// with the machine's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_socket: Option<String>,
    /// Its kernel (`--kernel`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The name of this device in it (`id` of `--vdpa`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// A process with a device, and the device's pages in its memory.
#[derive(Debug, Clone)]
pub(super) struct Opener {
    pub(super) holder: DeviceHolder,
    /// Queues whose doorbells it has mapped; `None` if the map may not be read.
    pub(super) doorbells: Option<BTreeSet<u32>>,
}

/// The device files that all processes have open.
#[derive(Debug, Clone, Default)]
pub(super) struct Processes {
    /// By device number (`st_rdev`).
    openers: HashMap<u64, Vec<Opener>>,
    /// Whether all processes were visible.
    pub(super) all_seen: bool,
}

/// The character devices to find: device number and name of the file.
pub(super) type Wanted = HashMap<u64, String>;

impl Processes {
    /// Scans all processes of the `/proc` at `directory`. A failure only hides processes.
    pub(super) fn look(directory: &Path, wanted: &Wanted) -> Self {
        if wanted.is_empty() {
            // No holder can be missed.
            return Self {
                openers: HashMap::new(),
                all_seen: true,
            };
        }
        let namespace = fs::read_link(directory.join("self/ns/pid"));
        let mut processes = Self {
            openers: HashMap::new(),
            all_seen: namespace.is_ok_and(|name| name == Path::new(FIRST_NAMESPACE)),
        };
        let mut pids: Vec<u32> = fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        pids.sort_unstable();
        // Without the first process /proc is mounted so that it hides those of other users.
        processes.all_seen &= pids.first() == Some(&1);
        for pid in pids {
            processes.look_at(&directory.join(pid.to_string()), pid, wanted);
        }
        processes
    }

    fn look_at(&mut self, process: &Path, pid: u32, wanted: &Wanted) {
        let entries = match fs::read_dir(process.join("fd")) {
            Ok(entries) => entries,
            Err(error) => {
                self.all_seen &= error.kind() != ErrorKind::PermissionDenied;
                return;
            }
        };
        let mut seen = HashSet::new();
        for entry in entries.flatten() {
            // A stat of a file on a dead network file system would hang.
            if !fs::read_link(entry.path()).is_ok_and(|target| may_be_device(&target)) {
                continue;
            }
            let Ok(file) = fs::metadata(entry.path()) else {
                continue;
            };
            let number = file.rdev();
            if !file.file_type().is_char_device() || !seen.insert(number) {
                continue;
            }
            if let Some(name) = wanted.get(&number) {
                let opener = Opener {
                    holder: describe(process, pid, name),
                    doorbells: doorbells(process, &file),
                };
                self.openers.entry(number).or_default().push(opener);
            }
        }
    }

    /// The processes that have this device open, by PID.
    pub(super) fn openers(&self, number: u64) -> &[Opener] {
        self.openers.get(&number).map_or(&[], Vec::as_slice)
    }
}

/// The tap that a process has open, from the `/proc` at `directory`; the first one by descriptor.
pub(super) fn tap(directory: &Path, pid: u32) -> Option<String> {
    let descriptors = fs::read_dir(directory.join(pid.to_string()).join("fdinfo")).ok()?;
    descriptors.flatten().find_map(|descriptor| {
        let text = read_capped(&descriptor.path(), DESCRIPTOR_MAX)?;
        let text = String::from_utf8(text).ok()?;
        // A queue without an interface has an empty name (drivers/net/tun.c).
        let name = text.lines().find_map(|line| line.strip_prefix("iff:\t"))?;
        is_interface_name(name).then(|| name.to_owned())
    })
}

/// Whether a file is in a directory of device files, or has the name of one. A process in a
/// container may have its own directory of them.
fn may_be_device(target: &Path) -> bool {
    let name = target.file_name().and_then(OsStr::to_str);
    holder::is_in_dev(target) || name.is_some_and(|name| name.starts_with("vhost-vdpa-"))
}

fn describe(process: &Path, pid: u32, device: &str) -> DeviceHolder {
    let executable = fs::read_link(process.join("exe")).ok();
    let command = holder::process_name(process);
    let program = match &executable {
        Some(path) => path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default(),
        None => command.clone(),
    };
    // The kernel's suffix for a program that was replaced since.
    let program = program.strip_suffix(" (deleted)").unwrap_or(&program);
    let bellhop = match program {
        "bellhop" => read_capped(&process.join("cmdline"), COMMAND_LINE_MAX)
            .and_then(|line| bellhop_run(&line, device)),
        _ => None,
    };
    DeviceHolder {
        pid,
        command,
        executable,
        bellhop,
    }
}

/// The VM of a command line, arguments each followed by a NUL, if it is
/// `bellhop [--option …] run …`.
fn bellhop_run(line: &[u8], device: &str) -> Option<BellhopRun> {
    let words: Vec<String> = line
        .split(|&byte| byte == 0)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let mut words = words.iter().skip(1).map(String::as_str);
    // Options before the subcommand: `--log-level LEVEL`, `--log-level=LEVEL`.
    loop {
        match words.next()? {
            "run" => break,
            "--log-level" => drop(words.next()),
            option if option.starts_with("--") => {}
            _ => return None,
        }
    }
    let mut run = BellhopRun::default();
    while let Some(word) = words.next() {
        let (option, value) = match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, Some(value)),
            _ if word.starts_with("--") || word == "-f" => (word, words.next()),
            _ => continue,
        };
        let value = value.map(str::to_owned);
        match option {
            "-f" | "--file" | "--config" => run.config = value,
            "--api-socket" => run.api_socket = value,
            "--kernel" => run.kernel = value,
            "--vdpa" => run.id = run.id.or_else(|| id_of(&value?, device)),
            _ => {}
        }
    }
    Some(run)
}

/// The name that the options of `--vdpa` give to this device, if they are about it.
fn id_of(options: &str, device: &str) -> Option<String> {
    let value = |key: &str| {
        let mut pairs = options.split(',').filter_map(|pair| pair.split_once('='));
        pairs.find(|pair| pair.0 == key).map(|pair| pair.1)
    };
    // The path may come first without its key.
    let path = match options.split(',').next() {
        Some(first) if first.starts_with('/') => first,
        _ => value("path")?,
    };
    let path = Path::new(path);
    (path.file_name()?.to_str()? == device).then(|| value("id").map(str::to_owned))?
}

/// The pages of an open file that a process has mapped writable: a page is the doorbell of the
/// queue with its number.
fn doorbells(process: &Path, file: &Metadata) -> Option<BTreeSet<u32>> {
    let map = read_capped(&process.join("maps"), MEMORY_MAP_MAX)?;
    let page = u64::try_from(DOORBELL_SIZE).ok()?;
    let mut found = BTreeSet::new();
    for line in String::from_utf8_lossy(&map).lines() {
        if let Some((offset, len)) = mapping(line, file) {
            let first = offset / page;
            let pages = len.div_ceil(page).min(QUEUES_MAX);
            let end = first.saturating_add(pages).min(QUEUES_MAX);
            found.extend((first..end).filter_map(|queue| u32::try_from(queue).ok()));
        }
    }
    Some(found)
}

/// Offset and length in bytes from a line of `/proc/PID/maps`, if it is a shared, writable mapping
/// of this file: `START-END PERMISSIONS OFFSET MAJOR:MINOR INODE PATH` (proc_pid_maps(5)).
fn mapping(line: &str, file: &Metadata) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let inode: u64 = words.next()?.parse().ok()?;
    let device = (
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let of_file = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    if inode != file.ino()
        || device != of_file
        || permissions.get(1) != Some(&b'w')
        || permissions.get(3) != Some(&b's')
    {
        return None;
    }
    let start = u64::from_str_radix(start, 16).ok()?;
    let len = u64::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    Some((offset, len))
}

/// A file's content; `None` if it may not be read or is longer than `max`.
fn read_capped(path: &Path, max: u64) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    let file = File::open(path).ok()?;
    file.take(max + 1).read_to_end(&mut content).ok()?;
    (u64::try_from(content.len()).ok()? <= max).then_some(content)
}

#[cfg(test)]
mod tests;
