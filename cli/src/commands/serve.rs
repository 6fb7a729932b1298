//! `bellhop serve`: the node daemon in the foreground.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::exit::Code;
use crate::logging::Level;
use crate::node::{self, AccessFiles, CertificateFiles, NodeError, Options, Paths};

/// Serve this node: its NICs and its virtual machines, by an API
///
/// Machines outlive the daemon: it may be stopped, killed and replaced, and the next one
/// takes over what runs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop serve
  curl --unix-socket /run/bellhop/node.socket http://node/v1/version
  bellhop serve --group kvm
  bellhop serve --listen 192.0.2.1:8443 --tls-cert node.crt --tls-key node.key \\
      --tls-client-ca clients.crt --tokens tokens

On the Unix socket its mode says who may connect: root (0600), or with --group that group, too (0660). Whoever may,
may do everything. By TCP a client needs a certificate of --tls-client-ca and, in each request, a token of --tokens:
  curl --cacert ca.crt --cert me.crt --key me.key -H \"Authorization: Bearer $TOKEN\" https://node:8443/v1/vms

Each line of --tokens is `ROLE NAME SHA256`, the last being the output of `printf %s \"$TOKEN\" | sha256sum`. Roles:
read (look), operate (start, pause, stop, reset machines too), admin (everything). The file's mode must be 0600,
like that of the key.

SIGHUP reads certificates and tokens again. SIGTERM and SIGINT end the daemon; its machines go on.")]
pub(crate) struct Arguments {
    /// What is to outlive a reboot of the host
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/bellhop")]
    state_dir: PathBuf,

    /// Sockets, and what a reboot of the host may take away
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/bellhop")]
    runtime_dir: PathBuf,

    /// How much the machines' processes log, each to STATE-DIR/vms/NAME/vmm.log
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    machine_log_level: Level,

    /// Show each step to whoever listens on this Unix socket, and wait until that one lets it go on: for tests
    #[arg(long, value_name = "SOCKET", hide = true)]
    step_observer: Option<PathBuf>,

    /// A group that may use the socket, too: a name in /etc/group, or a number
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    #[command(flatten)]
    remote: Remote,
}

/// Options for TCP: all of them or none.
#[derive(Debug, clap::Args)]
struct Remote {
    /// Listen for TCP, too, for clients with a certificate and a token
    #[arg(long, value_name = "ADDRESS:PORT",
        requires_all = ["tls_cert", "tls_key", "tls_client_ca", "tokens"])]
    listen: Option<SocketAddr>,

    /// With --listen: the daemon's certificate and those between it and its authority (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_cert: Option<PathBuf>,

    /// With --listen: the certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_key: Option<PathBuf>,

    /// With --listen: the authorities of clients' certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_client_ca: Option<PathBuf>,

    /// With --listen: the tokens that clients may have
    #[arg(long, value_name = "FILE", requires = "listen")]
    tokens: Option<PathBuf>,
}

impl Remote {
    /// Where, and who may come in. clap has seen to it that there are all or none.
    fn access(&self) -> Option<(SocketAddr, AccessFiles)> {
        let certificates = CertificateFiles {
            certificate: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            client_ca: self.tls_client_ca.clone()?,
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

/// Serves until a signal comes.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, NodeError> {
    node::run(&Options {
        paths: Paths::new(&arguments.state_dir, &arguments.runtime_dir),
        group: arguments.group.clone(),
        remote: arguments.remote.access(),
        log_level: arguments.machine_log_level.to_string(),
        step_observer: arguments.step_observer.clone(),
    })
}
