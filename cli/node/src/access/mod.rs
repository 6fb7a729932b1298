//! Access control: every caller is identified, and every change is logged.
//!
//! Owns certificates, tokens, roles and the audit log.
//!
//! ```text
//!   Unix socket (mode 0600, or 0660 with --group) ── SO_PEERCRED ─> uid, pid ──────────> admin ─┐
//!   TCP (--listen) ── TLS 1.3, client certificate ── handshake ──> subject                      │
//!                                                      └─ Authorization: Bearer TOKEN ─> role ──┤
//!                                                                                               v
//!                         endpoint <── sufficient <── TABLE (role.rs): method, path ─> needed role
//!                            └──> audit: who, what, outcome, request_id; failures are limited
//! ```
//!
//! File permissions control access to the Unix socket, and every client of it is `admin`. TCP needs
//! a certificate, a key, an authority for clients, and tokens. A client needs both a certificate
//! and a token, so neither a stolen token nor a stolen certificate is enough. Both can be revoked.
//! SIGHUP reloads all files together: if one of them is invalid, all of them stay as they were.

mod caller;
mod certificates;
mod check;
#[cfg(test)]
mod describe;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod example;
mod listener;
mod permit;
mod refusals;
mod role;
mod share;
mod subject;
#[cfg(test)]
pub(crate) mod testing;
mod tokens;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::watch;
use vmm::http::budget::Budget;

pub use certificates::CertificateFiles;
pub(crate) use check::{RequestedBy, check};
#[cfg(test)]
pub(crate) use describe::{describe, faults};
pub(crate) use listener::TlsListener;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use listener::TlsPeer;
pub(crate) use permit::{Permit, PermitEnd};
pub(crate) use share::share_with;

pub use tokens::{Token, Tokens};

use self::certificates::Tls;
use self::refusals::Refusals;
use super::error::Error;

/// The files that control access by TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessFiles {
    /// For the TLS handshake.
    pub certificates: CertificateFiles,
    /// For requests.
    pub tokens: PathBuf,
}

/// The contents of the files.
struct Loaded {
    tls: Tls,
    tokens: Arc<Tokens>,
}

impl Loaded {
    fn of(files: &AccessFiles) -> Result<Self, Error> {
        Ok(Self {
            tls: Tls::load(&files.certificates)?,
            tokens: Arc::new(Tokens::load(&files.tokens)?),
        })
    }
}

/// The current access control.
pub(crate) struct Access {
    /// None without TCP.
    remote: Option<(AccessFiles, RwLock<Loaded>)>,
    /// The number of reloads. Notified also when a token has expired.
    changes: watch::Sender<u64>,
    refusals: Refusals,
    /// Places of changes that run.
    running: Budget,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = self.remote.as_ref().map(|(files, _)| files);
        f.debug_struct("Access")
            .field("files", &files)
            .finish_non_exhaustive()
    }
}

impl Access {
    /// With `files`, callers may also use TCP.
    ///
    /// # Errors
    /// A file cannot be used.
    pub(crate) fn new(files: Option<AccessFiles>) -> Result<Self, Error> {
        let remote = files.map(|files| {
            let loaded = Loaded::of(&files)?;
            Ok::<_, Error>((files, RwLock::new(loaded)))
        });
        Ok(Self::of(remote.transpose()?))
    }

    fn of(remote: Option<(AccessFiles, RwLock<Loaded>)>) -> Self {
        Self {
            remote,
            changes: watch::Sender::default(),
            refusals: Refusals::default(),
            running: Budget::new(check::CHANGES_MAX),
        }
    }

    /// Reads all files again. Existing connections stay; the new files apply from the next request
    /// on, and streams end.
    ///
    /// # Errors
    /// A file cannot be used; then nothing changes.
    pub(crate) fn reload(&self) -> Result<(), Error> {
        if let Some((files, loaded)) = &self.remote {
            let new = Loaded::of(files)?;
            *loaded.write() = new;
            self.changes
                .send_modify(|loads| *loads = loads.wrapping_add(1));
        }
        Ok(())
    }

    fn loaded<T>(&self, look: impl FnOnce(&Loaded) -> T) -> Option<T> {
        let (_, loaded) = self.remote.as_ref()?;
        Some(look(&loaded.read()))
    }

    fn tls(&self) -> Option<Tls> {
        self.loaded(|loaded| loaded.tls.clone())
    }

    /// The number of reloads.
    fn loads(&self) -> u64 {
        *self.changes.borrow()
    }

    fn tokens(&self) -> Option<Arc<Tokens>> {
        self.loaded(|loaded| loaded.tokens.clone())
    }
}
