//! Files that say who the other host may be: read whole, and only if nobody else can have written or, where
//! that matters, read them.
//!
//! Owns the checks. It must not know what is in a file.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// The largest file, in bytes: a bundle of certificates.
const SIZE_MAX: u64 = 1 << 20;

/// Who besides the owner may have rights to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Secrecy {
    /// Others may read it, none may write it: a certificate.
    Public,
    /// Nobody else may read it: a key.
    Secret,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A directory, a device or a pipe.
    #[error("{0} is no regular file")]
    NotAFile(PathBuf),
    /// More than anybody needs.
    #[error("{0} has more than {SIZE_MAX} bytes")]
    TooLarge(PathBuf),
    /// Somebody else could have changed it.
    #[error(
        "{path} belongs to user {owner}, who is neither this process' user nor root: `chown root {path}`"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Others may write it.
    #[error("others than its owner may write {0}: `chmod go-w {0}`")]
    Writable(PathBuf),
    /// Others have rights to a secret.
    #[error("others than its owner may use {0}, which is a secret: `chmod go-rwx {0}`")]
    NotSecret(PathBuf),
}

/// All of a file.
///
/// # Errors
/// See [`FileError`].
pub(super) fn read(path: &Path, secrecy: Secrecy) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Read {
        path: path.to_owned(),
        source,
    };
    // A pipe without a writer would block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(file.map_err(|errno| failed(errno.into()))?);
    // Of what is open, not of what has the name now.
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile(path.to_owned()));
    }
    let user = rustix::process::geteuid().as_raw();
    if ![0, user].contains(&metadata.uid()) {
        return Err(FileError::Owner {
            path: path.to_owned(),
            owner: metadata.uid(),
        });
    }
    match secrecy {
        Secrecy::Public if metadata.mode() & 0o022 != 0 => {
            return Err(FileError::Writable(path.to_owned()));
        }
        Secrecy::Secret if metadata.mode() & 0o077 != 0 => {
            return Err(FileError::NotSecret(path.to_owned()));
        }
        Secrecy::Public | Secrecy::Secret => {}
    }
    let mut bytes = Vec::new();
    let read = file.take(SIZE_MAX + 1).read_to_end(&mut bytes);
    match u64::try_from(read.map_err(failed)?) {
        Ok(length) if length <= SIZE_MAX => Ok(bytes),
        _ => Err(FileError::TooLarge(path.to_owned())),
    }
}
