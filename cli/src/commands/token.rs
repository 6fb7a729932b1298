//! `bellhop token`: the tokens of clients, in the file that `bellhop serve --tokens` reads.

use std::path::PathBuf;
use std::time::Duration;

use bellhop_api::node::Role;
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use bellhop_node::{Token, Tokens};
use serde_json::{Value, json};

use crate::units::seconds;

/// How the daemon learns of a change.
const RELOAD: &str = "the daemon applies it after `systemctl reload bellhop` (SIGHUP)";

/// Create, list and revoke tokens of clients over TCP
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop token create --role operate --name grafana --expires 90d
  bellhop token list
  bellhop token revoke grafana

The file has the SHA-256 of each token, and mode 0600. The daemon reads it at start and on SIGHUP
(`systemctl reload bellhop`). It rejects expired tokens.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(Create),
    /// List the tokens
    #[command(
        visible_alias = "ls",
        after_long_help = "\
Examples:
  bellhop token list
  bellhop token list --file tokens -o json"
    )]
    List(File),
    Revoke(Revoke),
}

/// Create a token, and print it once
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop token create --role read --expires 90d >token
  bellhop token create --role admin --name node2 --file /etc/bellhop/tokens")]
struct Create {
    /// Its permissions: read (look), operate (start, pause, stop, reset VMs too) or admin
    /// (everything)
    #[arg(long, value_name = "ROLE")]
    role: Role,

    /// Its name in the audit log and for `bellhop token revoke`; the default is a random name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Its lifetime, such as 12h or 90d; without it the token does not expire
    #[arg(long, value_name = "DURATION", value_parser = seconds(1..=u32::MAX))]
    expires: Option<u32>,

    #[command(flatten)]
    file: File,
}

/// Revoke a token
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "rm",
    alias = "remove",
    after_long_help = "\
Examples:
  bellhop token revoke grafana"
)]
struct Revoke {
    /// The token's name
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    file: File,
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
struct File {
    /// The file of tokens
    #[arg(
        long = "file",
        value_name = "FILE",
        default_value = "/etc/bellhop/tokens"
    )]
    path: PathBuf,
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let failed = |error| Error::transparent(ErrorKind::Failed, error);
    match &arguments.command {
        Command::Create(Create {
            role,
            name,
            expires,
            file,
        }) => {
            let lifetime = expires.map(|seconds| Duration::from_secs(seconds.into()));
            let created = Tokens::create(&file.path, *role, name.as_deref(), lifetime);
            let (token, entry) = created.map_err(failed)?;
            let mut created = item(&entry);
            created["token"] = json!(token);
            eprintln!("the token {} is not shown again; {RELOAD}", entry.name);
            format.print(&created, || format!("{token}\n"))
        }
        Command::List(file) => {
            let tokens = Tokens::load(&file.path).map_err(failed)?;
            let items: Vec<Value> = tokens.iter().map(item).collect();
            format.print_table(&items, || table(&tokens))
        }
        Command::Revoke(Revoke { name, file }) => {
            if !Tokens::revoke(&file.path, name).map_err(failed)? {
                let shown = file.path.display();
                return Err(Error::not_there(format!("{shown} has no token {name:?}"))
                    .hint("`bellhop token list` lists them"));
            }
            eprintln!("the token {name} is revoked; {RELOAD}");
            format.print_done(&json!({ "name": name, "revoked": true }))
        }
    }
}

fn item(token: &Token) -> Value {
    json!({
        "name": token.name,
        "role": token.role.to_string(),
        "expires": token.expires,
        "expired": token.has_expired(),
    })
}

fn table(tokens: &Tokens) -> Table {
    let rows = tokens.iter().map(|token| {
        let expires = token.expires.as_deref().unwrap_or("never");
        let state = if token.has_expired() {
            "expired"
        } else {
            "valid"
        };
        [token.name.as_str(), &token.role.to_string(), expires, state].map(str::to_owned)
    });
    Table::new(["NAME", "ROLE", "EXPIRES", "STATE"], rows)
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
    fn a_token_is_created_listed_and_revoked() {
        let directory = std::env::temp_dir().join(format!("bellhop-token-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("tokens");
        let run = |line: &str| {
            let file = ["--file", path.to_str().unwrap()];
            let words = line.split(' ').chain(file);
            let line = Line::try_parse_from(words).unwrap();
            execute(&line.arguments, Format::default())
        };
        run("token create --role admin --name ops").unwrap();
        run("token create --role read --name grafana --expires 90d").unwrap();
        run("token create --role read --name grafana").unwrap_err();
        run("token list").unwrap();
        let tokens = Tokens::load(&path).unwrap();
        let drawn = table(&tokens).draw(false);
        assert!(drawn.starts_with("ops      admin  never"), "{drawn}");
        assert!(drawn.ends_with("Z  valid\n"), "{drawn}");
        let json = tokens.iter().map(item).collect::<Vec<Value>>();
        assert_eq!(
            json[0],
            json!({"name": "ops", "role": "admin", "expires": null,
            "expired": false})
        );
        assert_eq!(run("token revoke a").unwrap_err().code(), Code::NotThere);
        let missing = directory.join("tokesn");
        Tokens::revoke(&missing, "ops").unwrap_err();
        let names = std::fs::read_dir(&directory).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name());
        assert!(names.all(|name| !name.to_string_lossy().contains("tokesn")));
        run("token revoke grafana").unwrap();
        let error = run("token revoke ops").unwrap_err().to_string();
        assert!(error.contains("the only token"), "{error}");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn roles_and_durations_are_checked() {
        for words in [
            "--role root",
            "--role read --expires 0",
            "--role read --expires soon",
            "",
        ] {
            let line = format!("token create {words}");
            Line::try_parse_from(line.split_whitespace()).unwrap_err();
        }
    }
}
