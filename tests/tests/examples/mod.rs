//! The manual's examples: runs every command of every `sh` block in README.md and `docs/` as
//! written.
//!
//! ```text
//!   DOCUMENTS ─▶ blocks ─▶ commands ─▶ PLACES: where each runs ─▶ one script for each place
//!                                        │ no line fits
//!                                        ▼
//!                                      the test fails
//! ```
//! A new example needs a line in [`PLACES`] only if none fits it. Its place runs it with all others
//! there, in the order of [`DOCUMENTS`], in one shell that exits at the first error. The place's
//! test replaces names that depend on the reader's machine (NICs) and provides files (a kernel).

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lab::evidence;
use lab::process::die_with_parent;

/// How long a script may take.
const LIMIT: Duration = Duration::from_secs(400);

/// The documents in the order in which their examples run: later ones use what earlier ones
/// created.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "docs/quickstart.md",
    "docs/api.md",
    "docs/node.md",
    "docs/nics.md",
    "docs/cli.md",
    "docs/cli-reference.md",
    "docs/compatibility.md",
    "docs/decisions.md",
    "docs/first-vm.md",
    "docs/glossary.md",
    "docs/injected-faults.md",
    "docs/migration.md",
    "docs/performance.md",
    "docs/production-host.md",
    "docs/SUMMARY.md",
    "docs/sandbox.md",
    "docs/software-nic.md",
    "docs/threat-model.md",
    "docs/troubleshooting.md",
    "docs/versions.md",
];

/// A command of a document, with the lines that continue it.
#[derive(Debug)]
pub(crate) struct Example {
    /// The document that holds it, relative to the repository's root.
    pub(crate) document: &'static str,
    /// The command as it is written there.
    pub(crate) command: String,
}

/// Where an example runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: it runs the tests, or the tests run it; only its words are checked.
    Lab,
    /// In the lab host with the simulator: `boot_examples`.
    Sim,
    /// With the SR-IOV NIC: `mgmt_sriov_examples`.
    Sriov,
    /// With the lab NIC: `mgmt_labnic_examples`.
    Labnic,
    /// In the lab host without a NIC and the simulator: `boot_examples`.
    Software,
}

/// The starts of commands, and where they run. The first line that fits counts.
const PLACES: &[(&str, &[Place])] = &[
    ("cargo ", &[Place::Lab]),
    ("bellhop mgmtdev ", &[Place::Sim]),
    ("bellhop dev ", &[Place::Sim]),
    ("modprobe -a vduse ", &[Place::Software]),
    ("ip link ", &[Place::Software]),
    ("ip addr ", &[Place::Software]),
    ("bellhop run --kernel /boot/", &[Place::Software]),
    ("bellhop run ", &[Place::Sim]),
    ("bellhop serve ", &[Place::Sim]),
    ("bellhop vm ", &[Place::Sim]),
    ("truncate ", &[Place::Sim]),
    ("alias vm=", &[Place::Sim]),
    ("vm ", &[Place::Sim]),
    ("bellhop nic create nic0 ", &[Place::Sriov]),
    ("bellhop nic create nic1 ", &[Place::Labnic]),
    ("bellhop nic list", &[Place::Sriov, Place::Labnic]),
    ("bellhop nic delete nic0", &[Place::Sriov]),
];

/// All examples in the order of [`DOCUMENTS`].
pub(crate) fn examples() -> Vec<Example> {
    let mut examples = Vec::new();
    for &document in DOCUMENTS {
        let path = root().join(document);
        let text = fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        let commands = commands(document, &text).into_iter();
        examples.extend(commands.map(|command| Example { document, command }));
    }
    examples
}

/// The repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The commands of one document's `sh` blocks.
fn commands(document: &str, text: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let (mut inside, mut continues) = (false, false);
    for line in text.lines() {
        match (inside, line.trim_end()) {
            (false, "```sh") => inside = true,
            (true, "```") => inside = false,
            (true, line) if !line.is_empty() => {
                match commands.last_mut().filter(|_| continues) {
                    Some(last) => {
                        last.push('\n');
                        last.push_str(line);
                    }
                    None => commands.push(line.to_owned()),
                }
                continues = line.ends_with('\\');
            }
            _ => {}
        }
    }
    assert!(!inside, "{document}: the last `sh` block has no end");
    assert!(!continues, "{document}: the last command has no end");
    commands
}

/// Where a command runs: the places of the first line of [`PLACES`] that fits.
pub(crate) fn places(command: &str) -> &'static [Place] {
    PLACES
        .iter()
        .find(|(begin, _)| command.starts_with(begin))
        .map_or(&[], |(_, places)| places)
}

/// Lines of [`PLACES`] that no longer fit any example.
#[allow(dead_code, reason = "one test checks it")]
pub(crate) fn unused_places() -> Vec<&'static str> {
    let examples = examples();
    let used = |begin: &str| examples.iter().any(|one| one.command.starts_with(begin));
    let begins = PLACES.iter().map(|(begin, _)| *begin);
    begins.filter(|begin| !used(begin)).collect()
}

/// Files in `docs/` that [`DOCUMENTS`] does not list: their examples would not run.
#[allow(dead_code, reason = "one test checks it")]
pub(crate) fn unlisted_documents() -> Vec<String> {
    let entries = fs::read_dir(root().join("docs")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.ends_with(".md"))
        .map(|name| format!("docs/{name}"))
        .filter(|document| !DOCUMENTS.contains(&document.as_str()))
        .collect()
}

/// A directory with the files that the examples use. Dropping it removes the directory.
pub(crate) struct Desk(PathBuf);

impl Desk {
    /// Creates it with `bellhop` and `curl` in PATH, and a guest's kernel and ramdisk.
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("bin")).unwrap();
        let desk = Self(path);
        let variable = |name: &str| PathBuf::from(std::env::var_os(name).unwrap());
        desk.link("bin/bellhop", &variable("BELLHOP"));
        desk.link("bin/curl", Path::new(env!("CARGO_BIN_EXE_lab-curl")));
        for kernel in ["vmlinux", "vmlinuz"] {
            desk.link(kernel, &variable("GUEST_KERNEL"));
        }
        desk.link("initrd.img", &variable("GUEST_INITRAMFS"));
        desk
    }

    fn link(&self, name: &str, target: &Path) {
        std::os::unix::fs::symlink(target, self.0.join(name)).unwrap();
    }

    /// Runs all examples of a place, then `afterwards`, in which `$daemon` is the process of the
    /// place's node daemon. Each of `words` is replaced by a name of this machine. The console's
    /// user exits each guest at once. Returns the script's output.
    #[track_caller]
    pub(crate) fn run(&self, place: Place, words: &[(&str, &str)], afterwards: &str) -> String {
        self.run_with_user(place, words, afterwards, |_| "exit\n".to_owned())
    }

    /// As [`Desk::run`]. Once a second, `user` gets the output so far, and returns what the user
    /// types at the console.
    #[track_caller]
    pub(crate) fn run_with_user(
        &self,
        place: Place,
        words: &[(&str, &str)],
        afterwards: &str,
        user: impl Fn(&str) -> String + Send + 'static,
    ) -> String {
        let mut script = String::from("set -e\n");
        let mut current = "";
        for Example { document, command } in examples() {
            if !places(&command).contains(&place) {
                continue;
            }
            if document != current {
                script.push_str(&format!("echo '== {document}'\n"));
                current = document;
            }
            let mut command = command;
            for (from, to) in words {
                command = command.replace(from, to);
            }
            script.push_str(&command);
            script.push('\n');
            if let Some((_, socket)) = behind(&command, " --api-socket ") {
                // A human reader is slower than a script.
                script.push_str(&wait_for(socket));
            }
            if command.starts_with("bellhop serve ") {
                script.push_str("daemon=$!\n");
                script.push_str(&wait_for("/run/bellhop/node.socket"));
            }
        }
        script.push_str(afterwards);
        script.push('\n');
        println!("{script}");
        let path = format!(
            "{}:{}",
            self.0.join("bin").display(),
            std::env::var("PATH").unwrap()
        );
        // Not a pipe: processes that a failed script leaves running would hold it open forever.
        let heard = self.0.join("heard");
        let writer = fs::File::create(&heard).unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .current_dir(&self.0)
            .env("PATH", path)
            .stdin(Stdio::piped())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer);
        let mut child = die_with_parent(&mut command).spawn().unwrap();
        let mut console = child.stdin.take().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        let output = heard.clone();
        let typist = std::thread::spawn(move || {
            // Before the guest's shell runs, no process reads this; after its end the socket is
            // gone.
            let typed = || user(&String::from_utf8_lossy(&fs::read(&output).unwrap()));
            while !seen.load(Ordering::Relaxed) && console.write_all(typed().as_bytes()).is_ok() {
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        let begin = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if begin.elapsed() > LIMIT => {
                    // While the guests of the script still run.
                    println!("{}", evidence::of_running(child.id()));
                    let _ = (child.kill(), child.wait());
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        over.store(true, Ordering::Relaxed);
        typist.join().unwrap();
        let said = String::from_utf8_lossy(&fs::read(heard).unwrap()).into_owned();
        println!("{said}");
        // The script announces each document, so the last heading names the one that failed.
        let document = said.lines().rev().find_map(|line| line.strip_prefix("== "));
        let document = document.unwrap_or("the script");
        assert!(status.is_some(), "{document}: no end within {LIMIT:?}");
        assert!(status.unwrap().success(), "{document}: {status:?}");
        said
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A script line that waits for a socket.
fn wait_for(socket: &str) -> String {
    format!("until [ -S {socket} ]; do sleep 0.1; done\n")
}

/// The text before a word, and the one word after it.
fn behind<'a>(text: &'a str, word: &str) -> Option<(&'a str, &'a str)> {
    let (before, rest) = text.split_once(word)?;
    Some((before, rest.split_whitespace().next()?))
}
