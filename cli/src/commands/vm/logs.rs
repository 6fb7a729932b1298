//! `bellhop vm logs`: the log of a VM's process, or the output of its guest.

use std::io::{self, IsTerminal as _};
use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::node::{LOG_GAP, LOG_LINES, LOG_LINES_MAX, LOG_POSITION, VmLog};
use bellhop_common::client::{Node, path};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing;

use super::of_vm;

/// The interval of queries of an idle log.
const PERIOD: Duration = Duration::from_millis(500);
/// The time limit for an unreachable daemon while its log is followed.
const AWAY: Duration = Duration::from_secs(60);

/// Print the log of a VM's process, or its guest's output
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The daemon keeps the logs while the VM exists: up to 16 MiB each, and one older file of that size.
Times are in UTC. A terminal shows control characters as ?; a file or a pipe gets unchanged bytes.

Examples:
  bellhop vm logs web
  bellhop vm logs web --console -n 50
  bellhop vm logs web --follow")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Continue with new lines
    #[arg(short, long)]
    follow: bool,

    /// The output of the guest on its serial console
    #[arg(long)]
    console: bool,

    /// Number of last lines
    #[arg(short = 'n', long, value_name = "LINES", default_value_t = LOG_LINES,
          value_parser = clap::value_parser!(u32).range(..=i64::from(LOG_LINES_MAX)))]
    lines: u32,
}

pub(super) fn execute(arguments: &Arguments, node: &Node) -> Result<Code, Error> {
    let terminal = io::stdout().is_terminal();
    show(arguments, node, &mut |bytes| {
        if terminal {
            listing::print(for_terminal(bytes).as_bytes()).map(drop)
        } else {
            listing::print(bytes).map(drop)
        }
    })
}

/// Prints the kept output of a guest, at most its last 1 MiB.
pub(super) fn console(name: &str, node: &Node) -> Result<Code, Error> {
    let arguments = Arguments {
        name: name.to_owned(),
        follow: false,
        console: true,
        lines: LOG_LINES_MAX,
    };
    execute(&arguments, node)
}

pub(super) fn show(
    arguments: &Arguments,
    node: &Node,
    print: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
) -> Result<Code, Error> {
    let log = if arguments.console {
        VmLog::Console
    } else {
        VmLog::Vmm
    };
    let log = path(["logs", &log.to_string()]);
    let log = format!("{}{log}", of_vm(&arguments.name));
    let mut query = format!("tail={}", arguments.lines);
    let mut heard = None;
    loop {
        let answer = match node.get_whole(&format!("{log}?{query}")) {
            Err(error)
                if matches!(error.kind(), ErrorKind::NoDaemon | ErrorKind::TimedOut)
                    && heard.is_some_and(|heard: Instant| heard.elapsed() < AWAY) =>
            {
                thread::sleep(PERIOD);
                continue;
            }
            answer => answer?,
        };
        heard = Some(Instant::now());
        if answer.headers.contains_key(LOG_GAP) {
            tracing::warn!("a part of the log is missing here: it rotated too fast");
        }
        print(&answer.body)?;
        let position = answer.headers.get(LOG_POSITION);
        let Some(position) = position.and_then(|position| position.to_str().ok()) else {
            return Ok(Code::Success);
        };
        if !arguments.follow {
            return Ok(Code::Success);
        }
        query = format!("after={position}");
        if answer.body.is_empty() {
            thread::sleep(PERIOD);
        }
    }
}

/// Text without control characters except line breaks and tabulators.
fn for_terminal(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let shown = text.chars().filter(|c| *c != '\r');
    shown
        .map(|c| match c {
            '\n' | '\t' => c,
            c if c.is_control() => '?',
            c => c,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_does_not_write_to_the_terminal_by_its_log() {
        assert_eq!(
            for_terminal(b"a\tb\r\n\x1b[2Jc\xff\n"),
            "a\tb\n?[2Jc\u{fffd}\n"
        );
    }
}
