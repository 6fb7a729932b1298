//! `bellhop completions`.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing;
use clap_complete::env::Shells;

use crate::completion::VARIABLE;

/// Print the shell script that completes command lines
///
/// The script calls this command at each completion, so it also completes names: of VMs, NICs, vDPA
/// devices, management devices and PCI functions. Names of VMs come from the daemon that the line
/// or BELLHOP_NODE names. Names that take longer than 200 ms are left out.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Store the script in the shell's directory for completions. It takes effect in new shells. It needs
`bellhop` in PATH, in the version that printed it.

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

/// For a script that zsh loads as a function when it completes for the first time.
const ZSH_FIRST: &str = "\
if [[ ${funcstack[1]-} == _bellhop ]]; then
    _clap_dynamic_completer_bellhop \"$@\"
fi
";

/// Prints the script.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    listing::print(&script(&arguments.shell)?)
}

fn script(name: &str) -> Result<Vec<u8>, Error> {
    let shells = Shells::builtins();
    let shell = shells.completer(name);
    let shell = shell.ok_or_else(|| Error::wrong(format!("unknown shell {name}")))?;
    let mut script = Vec::new();
    shell
        .write_registration(VARIABLE, "bellhop", "bellhop", "bellhop", &mut script)
        .map_err(Error::unwritten)?;
    if name == "zsh" {
        script.extend_from_slice(ZSH_FIRST.as_bytes());
    }
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shell_asks_this_command() {
        for shell in ["bash", "zsh", "fish"] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            for part in [format!("{VARIABLE}={shell}"), " bellhop".to_owned()] {
                let plain = script.replace(['"', '\''], "");
                assert!(plain.contains(&part), "{part}: {script}");
            }
            // zsh calls this function by its name.
            assert!(shell != "zsh" || script.contains("function _clap_dynamic_completer_bellhop("));
        }
    }
}
