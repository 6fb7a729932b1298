//! The options with which every command that asks a daemon says which.

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
    /// The daemon, to be asked.
    ///
    /// # Errors
    /// See [`Http::new`].
    pub fn connect(&self) -> Result<Node, Error> {
        Ok(Node::new(Http::new(&self.node, &self.credentials)?))
    }

    /// With what one on another host is asked.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.node
    }
}
