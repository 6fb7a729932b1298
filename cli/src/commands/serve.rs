//! `bellhop serve`: the node daemon in the foreground.

mod file;

use std::net::SocketAddr;
use std::path::PathBuf;

use bellhop_common::client::Credentials;
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_node::{AccessFiles, CertificateFiles, Options, Paths, Road, VmUsers};
use tracing::level_filters::LevelFilter;
use vmm::migration::tls::TlsFiles;

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
needs the role admin there. Both daemons need certificates for the guest's data, and the address of
their certificate:
  bellhop serve … --migration-host node2 --migration-cert node2.crt \\
    --migration-key node2.key --migration-ca ca.crt

SIGHUP reads certificates and tokens again. SIGTERM and SIGINT end the daemon; VMs keep running.")]
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

    #[command(flatten)]
    move_by: MoveBy,

    #[command(flatten)]
    credentials: Credentials,
}

/// Options for VMs that migrate to and from this host over a network: all of them or none.
#[derive(Debug, clap::Args)]
struct MoveBy {
    /// The name or address of this host for incoming VMs. The kernel chooses a free TCP port for
    /// each: a firewall must let the other nodes connect
    #[arg(long, value_name = "HOST",
        requires_all = ["migration_cert", "migration_key", "migration_ca"])]
    migration_host: Option<String>,

    /// With --migration-host: this host's certificate for that address, and intermediate
    /// certificates up to its authority (PEM)
    #[arg(long, value_name = "FILE", requires = "migration_host")]
    migration_cert: Option<PathBuf>,

    /// With --migration-host: the private key of that certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "migration_host")]
    migration_key: Option<PathBuf>,

    /// With --migration-host: the authority of the other hosts' certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "migration_host")]
    migration_ca: Option<PathBuf>,
}

impl MoveBy {
    /// All options or none, which clap ensures. The VMs' processes have another working directory.
    fn road(&self) -> Option<Road> {
        let file = |path: &Option<PathBuf>| std::path::absolute(path.as_ref()?).ok();
        Some(Road {
            host: self.migration_host.clone()?,
            tls: TlsFiles {
                certificate: file(&self.migration_cert)?,
                key: file(&self.migration_key)?,
                authority: file(&self.migration_ca)?,
            },
        })
    }
}

/// Options for TCP: all of them or none.
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

    /// With --listen: the file of the clients' tokens
    #[arg(long, value_name = "FILE", requires = "listen")]
    tokens: Option<PathBuf>,
}

impl Remote {
    /// The address and the access control. clap ensures that all options are given, or none.
    fn access(&self) -> Option<(SocketAddr, AccessFiles)> {
        let certificates = CertificateFiles {
            certificate: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            client_ca: self.tls_ca.clone()?,
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
        road: arguments.move_by.road(),
        vm_users: arguments.vm_uids.clone(),
        step_observer: arguments.step_observer.clone(),
    });
    done.map_err(|error| Error::transparent(ErrorKind::Failed, error))?;
    Ok(Code::Success)
}
