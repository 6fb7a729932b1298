//! `bellhop completions`.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing;
use clap::CommandFactory;
use clap_complete::Shell;

/// Print the script that lets a shell complete this command's words
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The script goes where the shell looks for such scripts, and holds from the next shell on.

Examples:
  bellhop completions bash > /usr/share/bash-completion/completions/bellhop
  bellhop completions zsh > /usr/share/zsh/vendor-completions/_bellhop
  bellhop completions fish > /usr/share/fish/vendor_completions.d/bellhop.fish

For this shell only:
  source <(bellhop completions bash)")]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

/// Prints the script.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    listing::print(&script(&arguments.shell)?)
}

fn script(shell: &str) -> Result<Vec<u8>, Error> {
    let shell: Shell = shell.parse().map_err(|why: String| Error::wrong(why))?;
    // Into memory first: the generator panics on a write error.
    let mut script = Vec::new();
    clap_complete::generate(
        shell,
        &mut crate::Arguments::command(),
        "bellhop",
        &mut script,
    );
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_gets_all_subcommands() {
        for shell in ["bash", "zsh", "fish"] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            for command in crate::Arguments::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}");
            }
        }
    }
}
