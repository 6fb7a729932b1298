//! `bellhop nic add --vm VM` and `nic swap --vm VM`: earlier spellings of `bellhop vm nic`.

use bellhop_common::client::NodeArguments;

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
pub(super) struct OfVm<T: clap::Args> {
    /// The VM
    #[arg(long, value_name = "NAME")]
    pub(super) vm: String,

    #[command(flatten)]
    pub(super) options: T,

    #[command(flatten)]
    pub(super) node: NodeArguments,
}
