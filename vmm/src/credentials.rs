//! Credentials in files: those of this host, and the authorities that authenticate peers.
//!
//! Owns the files' checks (`file.rs`) and the reading of PEM (RFC 7468). It must not know the
//! protocols or peers. The migration, the node daemon and the command line each build their own
//! configuration from these parts.

mod file;

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::Error;

pub use file::{Holder, Secrecy, read};

/// The certificates in a file: at least one.
///
/// # Errors
/// See [`Error`].
pub fn certificates(path: &Path, holder: Holder) -> Result<Vec<CertificateDer<'static>>, Error> {
    public(path, holder, "certificate")
}

/// The lists of revoked certificates (CRL) in a file: at least one. Their content is not checked.
///
/// # Errors
/// See [`Error`].
pub fn revocations(
    path: &Path,
    holder: Holder,
) -> Result<Vec<CertificateRevocationListDer<'static>>, Error> {
    public(path, holder, "list of revoked certificates")
}

fn public<T: PemObject>(path: &Path, holder: Holder, wanted: &str) -> Result<Vec<T>, Error> {
    let bytes = read(path, Secrecy::Public, holder)?;
    let found: Result<Vec<_>, _> = T::pem_slice_iter(&bytes).collect();
    let found = found.map_err(no_pem(path, wanted))?;
    if found.is_empty() {
        return Err(no_pem(path, wanted)(pem::Error::NoItemsFound));
    }
    Ok(found)
}

/// The certificates in a file, as trusted authorities.
///
/// # Errors
/// See [`Error`].
pub fn authorities(path: &Path, holder: Holder) -> Result<RootCertStore, Error> {
    let mut authorities = RootCertStore::empty();
    for authority in certificates(path, holder)? {
        let added = authorities.add(authority);
        added.map_err(|source| {
            let path = path.display();
            Error::tls(format!(
                "{path} has a certificate that cannot be an authority"
            ))
            .because(source)
        })?;
    }
    Ok(authorities)
}

/// The private key in a file, which only its owner may read.
///
/// # Errors
/// See [`Error`].
pub fn private_key(path: &Path, holder: Holder) -> Result<PrivateKeyDer<'static>, Error> {
    let bytes = read(path, Secrecy::Secret, holder)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(no_pem(path, "private key"))
}

fn no_pem(path: &Path, wanted: &str) -> impl FnOnce(pem::Error) -> Error {
    let message = format!("{} has no {wanted} in PEM (`-----BEGIN …`)", path.display());
    move |source| Error::tls(message).because(source)
}
