//! Credentials in files: who this host is, and who others may be.
//!
//! Owns the files' checks (`file.rs`) and what PEM (RFC 7468) has in them. It must not know what is spoken to whom: the
//! migration, the node daemon and the command line each make their own configuration of what they get here.

mod file;

use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

pub use file::{FileError, Holder, Secrecy, read};

/// Why a file of certificates or with a key is not used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// It cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is not what it should be.
    #[error("{path} has no {wanted} in PEM (`-----BEGIN …`)")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What should be there.
        wanted: &'static str,
        /// What is wrong.
        #[source]
        source: pem::Error,
    },
    /// An authority that cannot be used as one.
    #[error("{path} has a certificate that cannot be an authority")]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: rustls::Error,
    },
}

/// The certificates in a file: one at least.
///
/// # Errors
/// See [`PemError`].
pub fn certificates(path: &Path, holder: Holder) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let failed = |source| PemError::Pem {
        path: path.to_owned(),
        wanted: "certificate",
        source,
    };
    let bytes = read(path, Secrecy::Public, holder)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(failed)?;
    match found.is_empty() {
        true => Err(failed(pem::Error::NoItemsFound)),
        false => Ok(found),
    }
}

/// The certificates in a file, as authorities that are believed.
///
/// # Errors
/// See [`PemError`].
pub fn authorities(path: &Path, holder: Holder) -> Result<RootCertStore, PemError> {
    let mut authorities = RootCertStore::empty();
    for authority in certificates(path, holder)? {
        let added = authorities.add(authority);
        added.map_err(|source| PemError::Authority {
            path: path.to_owned(),
            source,
        })?;
    }
    Ok(authorities)
}

/// The private key in a file, which nobody but its owner may read.
///
/// # Errors
/// See [`PemError`].
pub fn private_key(path: &Path, holder: Holder) -> Result<PrivateKeyDer<'static>, PemError> {
    let bytes = read(path, Secrecy::Secret, holder)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|source| PemError::Pem {
        path: path.to_owned(),
        wanted: "private key",
        source,
    })
}
