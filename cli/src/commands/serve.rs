//! `bellhop serve`: the node daemon in the foreground.

mod file;

use std::net::SocketAddr;
use std::path::PathBuf;

use bellhop_common::client::Credentials;
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_node::{AccessFiles, CertificateFiles, Options, Paths, VmUsers};
use tracing::level_filters::LevelFilter;

use crate::logging;

pub(crate) use file::with_file;

/// Run the node daemon: an API for NICs and VMs of this host
///
/// VMs outlive the daemon. After a stop, a crash or an upgrade, the next daemon adopts the running
/// VMs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop serve
  curl --unix-socket /run/bellhop/node.socket http://node/v1/version
  bellhop serve --group kvm
  bellhop serve --config node.toml
  bellhop serve --listen 192.0.2.1:8443 --tls-cert node.crt --tls-key node.key \\
      --tls-ca clients.crt --tokens tokens

The file of --config (TOML) has options by their names: `state_dir = \"/srv/bellhop\"`. Options on
the command line override it. Without --config the daemon reads /etc/bellhop/bellhop.toml, if it
exists.

The mode of the Unix socket controls access: root (0600), or with --group that group, too (0660).
Its clients may use all of the API. Over TCP a client needs a certificate of --tls-ca and, in each
request, a token of --tokens:
  curl --cacert ca.crt --cert me.crt --key me.key -H \"Authorization: Bearer $TOKEN\" \\
    https://node:8443/v1/vms

`bellhop token create` adds a token to --tokens. Each line is `ROLE NAME SHA256 [EXPIRY]`; SHA256 is
the output of `printf %s \"$TOKEN\" | sha256sum`. Roles: read (look), operate (start, pause, stop,
reset VMs too), admin (everything). The file's mode must be 0600, like that of the key.

VMs migrate between daemons (`bellhop vm migrate NAME https://NODE:8443`). The source daemon sends
requests to the destination with --node-ca, --node-cert, --node-key and --node-token-file. The token
needs the role admin there. The destination needs an address for the guest's data, which the daemons
protect by certificates for this migration only:
  bellhop serve … --migration-host node2

SIGHUP reads certificates, revoked ones and tokens again. SIGTERM and SIGINT end the daemon; VMs
keep running.")]
pub(crate) struct Arguments {
    /// Read more options from this TOML file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The directory for files that survive a reboot of the host
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/bellhop")]
    state_dir: PathBuf,

    /// The directory for sockets and files that a reboot may delete
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/bellhop")]
    runtime_dir: PathBuf,

    /// End VMs that run in the runtime directory without a record in the state directory. Without
    /// this the daemon refuses to start beside them. Their guests lose their state
    #[arg(long)]
    end_orphans: bool,

    /// The log level of the VMs' processes, each with STATE-DIR/vms/NAME/vmm.log
    #[arg(long, value_name = "LEVEL", value_parser = logging::level(), default_value = "warn")]
    machine_log_level: LevelFilter,

    /// The user and group IDs of the VMs' processes, one for each VM. Reserve them for this daemon:
    /// no other user, container or daemon of this host may have them. off: VMs run as root, without
    /// capabilities, and see the host's files
    ///
    /// Each VM's process has an empty root directory, in which only its own files exist.
    #[arg(long, value_name = "FIRST-LAST|off", default_value_t)]
    vm_uids: VmUsers,

    /// Report each step on this Unix socket, and wait for a reply before the next one: for tests
    #[arg(long, value_name = "SOCKET", hide = true)]
    step_observer: Option<PathBuf>,

    /// A group that may also use the socket: a name in /etc/group, or a number
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    #[command(flatten)]
    remote: Remote,

    /// The name or address of this host for VMs that arrive over a network. The kernel chooses a
    /// free TCP port for each: a firewall must let the other nodes connect
    #[arg(long, value_name = "HOST")]
    migration_host: Option<String>,

    #[command(flatten)]
    credentials: Credentials,
}

/// Options for TCP: all of them or none, except the revoked certificates.
#[derive(Debug, clap::Args)]
struct Remote {
    /// Also listen on TCP, for clients with a certificate and a token
    #[arg(long, value_name = "ADDRESS:PORT",
        requires_all = ["tls_cert", "tls_key", "tls_ca", "tokens"])]
    listen: Option<SocketAddr>,

    /// With --listen: the daemon's certificate, and intermediate certificates up to its authority
    /// (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_cert: Option<PathBuf>,

    /// With --listen: the certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_key: Option<PathBuf>,

    /// With --listen: the authorities of clients' certificates (PEM)
    #[arg(
        long,
        alias = "tls-client-ca",
        value_name = "FILE",
        requires = "listen"
    )]
    tls_ca: Option<PathBuf>,

    /// With --listen: the revoked certificates of clients (CRL, PEM): a list of each authority of
    /// --tls-ca. Once one expires, the daemon accepts no client by TCP until it reads another
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_crl: Option<PathBuf>,

    /// With --listen: the file of the clients' tokens
    #[arg(long, value_name = "FILE", requires = "listen")]
    tokens: Option<PathBuf>,
}

impl Remote {
    /// The address and the access control. clap ensures that all required options are given, or
    /// none.
    fn access(&self) -> Option<(SocketAddr, AccessFiles)> {
        let certificates = CertificateFiles {
            certificate: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            client_ca: self.tls_ca.clone()?,
            client_crl: self.tls_crl.clone(),
        };
        let tokens = self.tokens.clone()?;
        Some((
            self.listen?,
            AccessFiles {
                certificates,
                tokens,
            },
        ))
    }
}

/// Serves until a signal arrives.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    if let Some(file) = &arguments.config {
        tracing::info!(file = %file.display(), "read options from a file");
    }
    let done = bellhop_node::run(&Options {
        paths: Paths::new(&arguments.state_dir, &arguments.runtime_dir),
        group: arguments.group.clone(),
        remote: arguments.remote.access(),
        log_level: arguments.machine_log_level.to_string(),
        credentials: arguments.credentials.clone(),
        migration_host: arguments.migration_host.clone(),
        end_orphans: arguments.end_orphans,
        vm_users: arguments.vm_uids.clone(),
        step_observer: arguments.step_observer.clone(),
    });
    done.map_err(|error| Error::transparent(ErrorKind::Failed, error))?;
    Ok(Code::Success)
}
