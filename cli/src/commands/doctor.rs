//! `bellhop doctor`: checks whether this host is ready, and shows how to fix it.

use std::io;

use bellhop_common::colour;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{self, Format};
use bellhop_diagnostics::doctor::{self, Host};
use rustix::termios::tcgetwinsize;

/// Check whether this host can run VMs on vDPA NICs
///
/// The command changes nothing, opens no vDPA device and needs no permissions. A part that it
/// cannot read is reported as unknown, with the reason.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Each finding has a state:
  ok        as it should be, or not needed here
  warning   works, but with limits
  missing   required for a VM on a vDPA NIC
  unknown   could not be determined

The fix of a finding follows it, one line each: commands for a root shell, or lines for the named
file. The last lines are the next commands on this host, from its devices, NICs and kernel to a VM.

Examples:
  bellhop doctor
  bellhop doctor -j | jq '.findings[] | select(.state == \"missing\")'
  bellhop doctor -j | jq -r '.next[]'

The exit code is 0 if no required part is missing, and 1 otherwise.")]
pub(crate) struct Arguments {}

/// Runs the checks and prints the report.
pub(crate) fn execute(_: &Arguments, format: Format) -> Result<Code, Error> {
    let report = doctor::report(&Host::this());
    if format.is_text() {
        let output = io::stdout();
        let columns = match tcgetwinsize(&output) {
            Ok(size) if size.ws_col > 0 => size.ws_col.into(),
            _ => doctor::COLUMNS,
        };
        let text = doctor::text(&report, colour::wanted(&output), columns);
        listing::print(text.as_bytes())?;
    } else {
        format.print_table(&report, || doctor::table(&report))?;
    }
    Ok(if report.fit {
        Code::Success
    } else {
        Code::Failed
    })
}
