//! The options that select the daemon of a command.
//!
//! Owns their precedence: an option of the command line, then a variable, then the default remote.
//! A remote that the command line names takes no value from variables, which belong to another
//! daemon.

use std::sync::LazyLock;

use bellhop_api::address::SOCKET;
use clap::ArgMatches;
use clap::parser::ValueSource;

use super::{Address, Credentials, Http, Node, Remotes};
use crate::error::Error;

static LOCAL: LazyLock<Address> = LazyLock::new(|| Address::Socket(SOCKET.into()));

#[derive(Debug, Clone, clap::Args)]
struct NodeOptions {
    /// The node's daemon: the path of its socket, ssh://HOST, or https://HOST:PORT
    ///
    /// ssh://[USER@]HOST[:PORT][/SOCKET] is a login on that host. https also needs --node-ca,
    /// --node-cert, --node-key and --node-token-file. Without --node and --remote the default of
    /// `bellhop remote use` applies, which is initially /run/bellhop/node.socket.
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        env = "BELLHOP_NODE",
        help_heading = "Connection options"
    )]
    node: Option<Address>,

    /// The daemon's name in `bellhop remote list`; the other options here override its values
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "BELLHOP_REMOTE",
        hide_short_help = true,
        help_heading = "Connection options"
    )]
    remote: Option<String>,

    #[command(flatten)]
    credentials: Credentials,
}

/// The selected daemon.
#[derive(Debug, Clone)]
pub struct NodeArguments {
    /// None: the address of the remote.
    node: Option<Address>,
    /// None: the default.
    remote: Option<String>,
    credentials: Credentials,
}

impl clap::Args for NodeArguments {
    fn augment_args(command: clap::Command) -> clap::Command {
        NodeOptions::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        NodeOptions::augment_args_for_update(command)
    }
}

impl clap::FromArgMatches for NodeArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let NodeOptions {
            mut node,
            mut remote,
            mut credentials,
        } = NodeOptions::from_arg_matches(matches)?;
        if is_typed("remote") {
            node = node.filter(|_| is_typed("node"));
        } else if node.is_some() {
            remote = None;
        }
        if remote.is_some() || node.is_none() {
            // Those of the environment belong to the daemon of BELLHOP_NODE.
            credentials.retain(is_typed);
        }
        Ok(Self {
            node,
            remote,
            credentials,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl NodeArguments {
    /// Creates a client for the daemon.
    ///
    /// # Errors
    /// See [`Self::resolved`] and [`Http::new`].
    pub fn connect(&self) -> Result<Node, Error> {
        let Self {
            node, credentials, ..
        } = self.resolved()?;
        Ok(Node::new(Http::new(
            node.as_ref().unwrap_or(&LOCAL),
            &credentials,
        )?))
    }

    /// The same with the address and the credentials of the remote.
    ///
    /// # Errors
    /// The user's remotes cannot be read, or none has this name.
    pub fn resolved(&self) -> Result<Self, Error> {
        if self.node.is_some() && self.remote.is_none() {
            return Ok(self.clone());
        }
        self.resolved_by(&Remotes::of_user()?)
    }

    fn resolved_by(&self, remotes: &Remotes) -> Result<Self, Error> {
        let name = self.remote.as_deref();
        let remote = remotes.get(name.unwrap_or(remotes.default_name()))?;
        let credentials = self.credentials.clone().or(&remote);
        Ok(Self {
            node: self.node.clone().or(Some(remote.address)),
            remote: None,
            credentials,
        })
    }

    /// The credentials for a daemon on another host, once [resolved](Self::resolved).
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The daemon's address, once [resolved](Self::resolved).
    #[must_use]
    pub fn address(&self) -> &Address {
        self.node.as_ref().unwrap_or(&LOCAL)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::Remote;
    use super::*;
    use crate::exit::Code;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        node: NodeArguments,
    }

    fn credentials(line: &str) -> Credentials {
        parse(line).credentials
    }

    fn parse(line: &str) -> NodeArguments {
        let words = std::iter::once("x").chain(line.split_whitespace());
        Line::try_parse_from(words).unwrap().node
    }

    #[test]
    fn options_override_the_remote_and_the_remote_the_default() {
        let remote = |host: &str| Remote {
            address: format!("https://{host}:1").parse().unwrap(),
            ca: Some("ca".into()),
            token_file: Some("token".into()),
            ..Remote::local()
        };
        let mut remotes = Remotes::default();
        remotes.add("a", remote("a")).unwrap();
        remotes.add("b", remote("b")).unwrap();
        let resolved = |line: &str, remotes: &Remotes| {
            let node = parse(line).resolved_by(remotes).unwrap();
            (node.address().to_string(), node.credentials)
        };
        assert_eq!(
            resolved("", &remotes),
            (SOCKET.to_owned(), Credentials::default())
        );
        remotes.choose("a").unwrap();
        let stored = credentials("--node-ca ca --node-token-file token");
        for (line, address) in [
            ("", "https://a:1"),
            ("--remote b", "https://b:1"),
            ("--remote b --node https://c:1", "https://c:1"),
        ] {
            assert_eq!(
                resolved(line, &remotes),
                (address.to_owned(), stored.clone())
            );
        }
        let (_, given) = resolved("--remote b --node-token-file other", &remotes);
        assert_eq!(given, credentials("--node-ca ca --node-token-file other"));
        let (address, given) = resolved("--remote local", &remotes);
        assert_eq!((address.as_str(), given), (SOCKET, Credentials::default()));
        let error = parse("--remote c").resolved_by(&remotes).unwrap_err();
        assert_eq!(error.code(), Code::NotThere);
        // Needs no file.
        let node = parse("--node /run/x").resolved().unwrap();
        assert_eq!(*node.address(), Address::Socket("/run/x".into()));
        assert_eq!(node.credentials, Credentials::default());
    }
}
