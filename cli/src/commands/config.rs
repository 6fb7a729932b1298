//! `bellhop config`: files that describe VMs.

use std::path::PathBuf;

use bellhop_common::client::Address;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use bellhop_node::vm_file;
use serde_json::json;

use crate::commands::machine_arguments::Description;
use crate::commands::vm::create::make_paths_absolute;
use crate::config_file;
use crate::setting::Setting;

/// Check files that describe VMs, and print their schema
///
/// `bellhop run` and `bellhop vm create`, `replace`, `apply` and `diff` read the same files.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop config check web.toml
  bellhop config schema > bellhop-vm.schema.json")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Check a file as the daemon does, without the daemon
    ///
    /// The command checks neither the host's devices nor the files that it names.
    #[command(after_long_help = "\
Examples:
  bellhop config check web.toml
  bellhop config check web.yaml --set memory=2G
  generate | bellhop config check -")]
    Check {
        /// TOML, JSON or YAML; - is standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,

        /// Set any key of the file first (may be repeated)
        #[arg(long = "set", value_name = "KEY=VALUE")]
        settings: Vec<Setting>,
    },
    /// Print the JSON Schema of a file, for editors and validators
    #[command(after_long_help = "\
It is the schema `VmSpec` of the daemon's API, with `name`, `labels` and
`annotations`.

Examples:
  bellhop config schema > bellhop-vm.schema.json
  bellhop config schema | jq '.properties | keys'")]
    Schema,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Check { file, settings } => {
            let mut read = Description::read(file, settings)?;
            make_paths_absolute(&mut read.fields, &Address::Socket(PathBuf::new()))?;
            vm_file::check(read.name.as_deref(), read.fields)
                .map_err(|error| config_file::wrong(file).because(error))?;
            let checked = json!({ "file": file, "name": read.name, "valid": true });
            let text = || format!("{}: valid\n", printable(&file.to_string_lossy()));
            format.print(&checked, text)
        }
        Command::Schema => {
            let schema = vm_file::schema();
            format.print(&schema, || format!("{schema:#}\n"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Code, Error> {
        let file = std::env::temp_dir().join(format!("bellhop-check-{}.toml", std::process::id()));
        std::fs::write(&file, text).unwrap();
        let command = Command::Check {
            file: file.clone(),
            settings: vec!["cpus=2".parse().unwrap()],
        };
        let checked = execute(&Arguments { command }, Format::default());
        std::fs::remove_file(&file).unwrap();
        checked
    }

    #[test]
    fn a_file_is_valid_or_the_error_names_it() {
        let good = "name = 'web'\nkernel = 'vmlinuz'\n[[nics]]\nid = 'a'\nfrom = 'eth0'\n";
        assert_eq!(check(good).unwrap(), Code::Success);
        for bad in [
            "name = 'Web'\nkernel = 'k'",
            "kernel = 'k'\ncolour = 1",
            "a =",
        ] {
            let error = check(bad).unwrap_err();
            assert_eq!(error.code(), Code::InvalidInput, "{bad}");
            assert!(error.to_string().contains("bellhop-check-"), "{error}");
        }
    }
}
