//! How a migration is protected, on the command line of whoever sends and of whoever receives.

use std::path::{Path, PathBuf};

use vmm::migration::tls::TlsFiles;

/// What protects the guest on its way; the paths are on the host that says them.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TlsArguments {
    /// Over TCP: this host's certificate and those between it and its authority, PEM
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        requires = "tls_authority"
    )]
    tls_certificate: Option<PathBuf>,

    /// Over TCP: the certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,

    /// Over TCP: the authority whose certificate the other host must have, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,

    /// Over TCP without TLS: only where nobody else is on the network, for the guest's memory goes over it as it is
    #[arg(long, conflicts_with = "tls_certificate")]
    pub(crate) plaintext: bool,
}

impl TlsArguments {
    /// The same, with each path as `change` makes it.
    pub(crate) fn map_paths<E>(
        mut self,
        change: impl Fn(&Path) -> Result<PathBuf, E>,
    ) -> Result<Self, E> {
        for path in [
            &mut self.tls_certificate,
            &mut self.tls_key,
            &mut self.tls_authority,
        ]
        .into_iter()
        .flatten()
        {
            *path = change(path)?;
        }
        Ok(self)
    }

    /// Whether anything is said.
    pub(crate) fn is_given(&self) -> bool {
        // One file cannot be given without the others.
        self.plaintext || self.tls_certificate.is_some()
    }

    /// The files, if they are given.
    pub(crate) fn files(&self) -> Option<TlsFiles> {
        Some(TlsFiles {
            certificate: self.tls_certificate.clone()?,
            key: self.tls_key.clone()?,
            authority: self.tls_authority.clone()?,
        })
    }
}
