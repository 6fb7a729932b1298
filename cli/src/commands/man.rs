//! `bellhop man`.

use std::fs;
use std::path::PathBuf;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing;

use crate::manual;

/// Print the manual page, or write the pages of all commands
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Without a directory the command prints the page bellhop(1). With one, it writes a file for each
subcommand: bellhop.1, bellhop-run.1, bellhop-nic-create.1, … It replaces files of these names.

Examples:
  bellhop man | man -l -
  bellhop man /usr/local/share/man/man1
  man bellhop-nic-create")]
pub(crate) struct Arguments {
    /// An existing directory for the pages
    #[arg(value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

/// Writes the pages.
pub(crate) fn execute(arguments: &Arguments, all: clap::Command) -> Result<Code, Error> {
    let pages = manual::pages(all).map_err(Error::context("cannot create the manual"))?;
    match &arguments.directory {
        Some(directory) => {
            for page in pages {
                let path = directory.join(page.file_name);
                fs::write(&path, page.text)
                    .map_err(Error::context(format!("cannot write {}", path.display())))?;
            }
        }
        None => {
            for page in pages.iter().take(1) {
                listing::print(&page.text)?;
            }
        }
    }
    Ok(Code::Success)
}
