//! `bellhop man`.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::CommandFactory;

use crate::exit::Code;
use crate::manual;

/// Print this command's manual page, or write those of all subcommands into a directory
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Without a directory the page bellhop(1) is printed. With one, a file is written for each subcommand: bellhop.1,
bellhop-run.1, bellhop-nic-make.1, …; files of these names are replaced.

Examples:
  bellhop man | man -l -
  bellhop man /usr/local/share/man/man1
  man bellhop-nic-make")]
pub(crate) struct Arguments {
    /// Where the pages go; it must be there
    #[arg(value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

/// Why there are no pages.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("cannot make the manual")]
    Render(#[source] io::Error),
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot write the result")]
    Output(#[source] io::Error),
}

/// Writes the pages.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, CommandError> {
    let pages = manual::pages(crate::Arguments::command()).map_err(CommandError::Render)?;
    match &arguments.directory {
        Some(directory) => {
            for page in pages {
                let path = directory.join(page.file_name);
                fs::write(&path, page.text)
                    .map_err(|source| CommandError::Write { path, source })?;
            }
        }
        None => {
            let mut output = io::stdout().lock();
            for page in pages.iter().take(1) {
                let written = output.write_all(&page.text).and_then(|()| output.flush());
                written.map_err(CommandError::Output)?;
            }
        }
    }
    Ok(Code::Success)
}
