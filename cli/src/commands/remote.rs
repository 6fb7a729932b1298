//! `bellhop remote`: names of node daemons.

use std::path::Path;

use bellhop_common::client::{Address, Credentials, Http, Remote, Remotes};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde_json::{Value, json};

/// Name the daemons of other nodes, for --remote
///
/// The names are in $XDG_CONFIG_HOME/bellhop/remotes.toml (~/.config by default), which holds paths
/// of keys and tokens, not their contents.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop remote add node2 https://node2:8443 --ca ca.crt --cert me.crt --key me.key \\
      --token-file token
  bellhop vm list --remote node2
  bellhop vm migrate web node2
  bellhop remote use node2
  bellhop remote use local
  bellhop remote list

A command asks the daemon of --node, --remote, BELLHOP_NODE, BELLHOP_REMOTE, or `bellhop remote
use`, in this order. Without any it asks the one on this host, whose name is local. --node-ca,
--node-cert, --node-key and --node-token-file override the files of a remote. With --remote the
variables BELLHOP_NODE* have no effect.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Add(Add),
    /// List the remotes
    #[command(
        visible_alias = "ls",
        after_long_help = "\
Examples:
  bellhop remote list
  bellhop remote list -o name"
    )]
    List,
    /// Have commands ask this remote by default
    #[command(after_long_help = "\
Examples:
  bellhop remote use node2
  bellhop remote use local")]
    Use(Named),
    /// Remove the name of a remote; its files stay
    #[command(
        visible_alias = "rm",
        alias = "delete",
        after_long_help = "\
Examples:
  bellhop remote remove node2"
    )]
    Remove(Named),
}

/// Add a remote
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop remote add node2 https://node2:8443 --ca ca.crt --cert me.crt --key me.key \\
      --token-file token
  bellhop remote add test /run/bellhop-test/node.socket

The command reads the files, and does not ask the daemon.")]
struct Add {
    /// Its name: letters, digits, dots, underscores and hyphens
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    remote: Remote,
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
struct Named {
    /// The remote; local is the daemon on this host
    #[arg(value_name = "NAME")]
    name: String,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let path = Remotes::path().ok_or_else(|| {
        Error::failed("no home directory has the file of remotes: set HOME or XDG_CONFIG_HOME")
    })?;
    match &arguments.command {
        Command::List => {
            let remotes = Remotes::load(&path)?;
            format.print_table(&items(&remotes), || table(&remotes))
        }
        command => {
            change(command, &path)?;
            Ok(Code::Success)
        }
    }
}

fn change(command: &Command, path: &Path) -> Result<(), Error> {
    Remotes::change(path, |remotes| match command {
        Command::List => Ok(()),
        Command::Add(Add { name, remote }) => remotes.add(name, checked(remote.clone())?),
        Command::Use(Named { name }) => remotes.choose(name),
        Command::Remove(Named { name }) => remotes.remove(name),
    })
}

/// A remote whose files can be used, by absolute paths.
fn checked(remote: Remote) -> Result<Remote, Error> {
    let Remote {
        ca,
        cert,
        key,
        token_file,
        ..
    } = &remote;
    let is_far = matches!(remote.address, Address::Https { .. });
    if is_far && [ca, cert, key, token_file].contains(&&None) {
        return Err(Error::wrong(
            "an https address needs --ca, --cert, --key and --token-file",
        ));
    }
    let remote = remote.absolute();
    let remote = remote.map_err(Error::context("a path cannot be made absolute"))?;
    Http::new(&remote.address, &Credentials::default().or(&remote))?;
    Ok(remote)
}

fn items(remotes: &Remotes) -> Vec<Value> {
    let item = |(name, remote): (&str, Remote)| {
        let default = name == remotes.default_name();
        let mut item = json!({ "name": name, "default": default, "address": remote.address });
        for (key, file) in files(&remote) {
            item[key] = json!(file);
        }
        item
    };
    remotes.iter().map(item).collect()
}

fn files(remote: &Remote) -> [(&'static str, Option<String>); 4] {
    let text = |path: &Option<std::path::PathBuf>| Some(path.as_ref()?.display().to_string());
    [
        ("ca", text(&remote.ca)),
        ("cert", text(&remote.cert)),
        ("key", text(&remote.key)),
        ("token_file", text(&remote.token_file)),
    ]
}

fn table(remotes: &Remotes) -> Table {
    let rows = remotes.iter().map(|(name, remote)| {
        let default = if name == remotes.default_name() {
            "yes"
        } else {
            "-"
        };
        let [ca, cert, key, token] =
            files(&remote).map(|(_, file)| file.unwrap_or_else(|| "-".to_owned()));
        let address = remote.address.to_string();
        [
            name.to_owned(),
            default.to_owned(),
            address,
            ca,
            cert,
            key,
            token,
        ]
    });
    let heading = ["NAME", "DEFAULT", "ADDRESS", "CA", "CERT", "KEY", "TOKEN"];
    Table::new(heading, rows).with_wide(4)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_remote_is_added_used_listed_and_removed() {
        let home = std::env::temp_dir().join(format!("bellhop-remote-{}", std::process::id()));
        let path = home.join("remotes.toml");
        let run = |line: &str| {
            let line = Line::try_parse_from(line.split(' ')).unwrap();
            change(&line.arguments.command, &path)
        };
        let listed = || table(&Remotes::load(&path).unwrap()).draw(false);
        run("remote add two /run/two").unwrap();
        assert_eq!(
            run("remote add two /run/2").unwrap_err().code(),
            Code::Conflict
        );
        run("remote use two").unwrap();
        assert!(listed().contains("two    yes  /run/two"), "{}", listed());
        let items = items(&Remotes::load(&path).unwrap());
        assert_eq!(
            items[0],
            json!({"name": "local", "default": false,
            "address": "/run/bellhop/node.socket", "ca": null, "cert": null, "key": null,
            "token_file": null})
        );
        assert_eq!(items[1]["default"], true);
        run("remote rm two").unwrap();
        assert!(listed().starts_with("local  yes"), "{}", listed());
        assert_eq!(run("remote use two").unwrap_err().code(), Code::NotThere);
        std::fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn https_needs_all_files_and_they_are_read() {
        let remote = |line: &str| {
            let line = Line::try_parse_from(line.split(' ')).unwrap();
            match line.arguments.command {
                Command::Add(add) => checked(add.remote),
                other => panic!("{other:?}"),
            }
        };
        let error = remote("remote add b https://b:1 --ca c --cert c --key k").unwrap_err();
        assert_eq!(error.code(), Code::WrongCommandLine);
        let all = "--ca /nonexistent/c --cert c --key k --token-file t";
        let error = remote(&format!("remote add b https://b:1 {all}")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/c"), "{error}");
        assert_eq!(remote("remote add b /run/b").unwrap().ca, None);
    }
}
