//! The options that select the daemon of a command.

use super::{Address, Credentials, Http, Node};
use crate::error::Error;

/// Which daemon is asked.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeArguments {
    /// The node's daemon: the path of its socket, or https://HOST:PORT (--help lists what https needs)
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        env = "BELLHOP_NODE",
        default_value = "/run/bellhop/node.socket",
        help_heading = "Connection options"
    )]
    node: Address,

    #[command(flatten)]
    credentials: Credentials,
}

impl NodeArguments {
    /// Creates a client for the daemon.
    ///
    /// # Errors
    /// See [`Http::new`].
    pub fn connect(&self) -> Result<Node, Error> {
        Ok(Node::new(Http::new(&self.node, &self.credentials)?))
    }

    /// The credentials for a daemon on another host.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The daemon's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.node
    }
}
