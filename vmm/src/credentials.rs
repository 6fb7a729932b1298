//! Credentials in files: who this host is, and who others may be.
//!
//! Owns the files' checks (`file.rs`) and what PEM (RFC 7468) has in them. It must not know what is spoken to whom: the
//! migration, the node daemon and the command line each make their own configuration of what they get here.

mod file;

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::Error;

pub use file::{Holder, Secrecy, read};

/// The certificates in a file: one at least.
///
/// # Errors
/// See [`Error`].
pub fn certificates(path: &Path, holder: Holder) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = read(path, Secrecy::Public, holder)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(no_pem(path, "certificate"))?;
    if found.is_empty() {
        return Err(no_pem(path, "certificate")(pem::Error::NoItemsFound));
    }
    Ok(found)
}

/// The certificates in a file, as authorities that are believed.
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

/// The private key in a file, which nobody but its owner may read.
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
