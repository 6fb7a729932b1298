//! The transcript in `docs/first-vm.md`: a newcomer's path from the deb to a VM on a second daemon.
//!
//! ```text
//!   docs/first-vm.md ─> `console` blocks ─> each command, by a shell beside systemd
//!                          └─> output lines ─> must be those of the command
//! ```
//! Numbers may differ, and a line `...` stands for any lines.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "package/packages.rs"]
#[allow(dead_code, reason = "another test uses more of it")]
mod packages;
#[path = "package/systemd.rs"]
#[allow(dead_code, reason = "another test uses more of it")]
mod systemd;

use lab::sim::require_lab;
use packages::Packages;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use systemd::Systemd;

const DOCUMENT: &str = "../docs/first-vm.md";

/// A command of the transcript and its output.
struct Step {
    command: String,
    output: Vec<String>,
}

fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match line {
            "```console" => inside = true,
            "```" => inside = false,
            _ if !inside => {}
            _ => match (line.strip_prefix("# "), steps.last_mut()) {
                (Some(command), _) => steps.push(Step {
                    command: command.to_owned(),
                    output: Vec::new(),
                }),
                (None, Some(step)) if step.command.ends_with('\\') => {
                    step.command.push('\n');
                    step.command.push_str(line);
                }
                (None, Some(step)) => step.output.push(line.to_owned()),
                (None, None) => panic!("output before the first command: {line}"),
            },
        }
    }
    steps
}

/// A line without the numbers and the widths of columns, which differ from run to run.
fn comparable(line: &str) -> String {
    let mut text = String::new();
    for letter in line
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
    {
        match letter {
            '0'..='9' if text.ends_with('0') => {}
            '0'..='9' => text.push('0'),
            other => text.push(other),
        }
    }
    text
}

fn matches(wanted: &[String], printed: &[&str]) -> bool {
    match wanted.split_first() {
        None => printed.is_empty(),
        Some((line, rest)) if line == "..." => {
            (0..=printed.len()).any(|from| matches(rest, &printed[from..]))
        }
        Some((line, rest)) => printed.split_first().is_some_and(|(first, others)| {
            comparable(first) == comparable(line) && matches(rest, others)
        }),
    }
}

#[test]
fn the_transcript_of_the_first_vm_is_true() {
    require_lab().unwrap();
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCUMENT);
    let steps = steps(&fs::read_to_string(document).unwrap());
    assert!(steps.len() > 8, "{} commands", steps.len());
    let packages = Packages::build();
    let kernel = std::env::var_os("GUEST_KERNEL").unwrap();
    symlink(kernel, packages.path("vmlinuz")).unwrap();
    let ramdisk = std::env::var_os("GUEST_INITRAMFS").unwrap();
    symlink(ramdisk, packages.path("initrd.img")).unwrap();
    let host = Systemd::start();
    let directory = packages.directory.display();
    let mut wrong = Vec::new();
    for step in steps {
        let mut script = format!("cd {directory} && {}", step.command);
        if step.command.starts_with("bellhop serve ") {
            // A reader is slower than a script.
            script.push_str("\nuntil [ -S /run/bellhop-2/node.socket ]; do sleep 0.1; done");
        }
        let done = host.run(&["sh", "-c", &format!("exec 2>&1; {script}")]);
        let printed = String::from_utf8_lossy(&done.stdout);
        println!("# {}\n{printed}", step.command);
        assert!(done.status.success(), "{}: {printed}", step.command);
        let lines: Vec<&str> = printed.lines().collect();
        if !matches(&step.output, &lines) {
            wrong.push(step.command);
        }
    }
    assert!(wrong.is_empty(), "the transcript differs after {wrong:#?}");
}
