//! Files that say who may come in: read whole, and only if nobody else can have written or, where that matters, read them.
//!
//! Owns the checks. It must not know what is in a file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The largest file, in bytes: a bundle of certificates or a list of tokens.
const SIZE_MAX: u64 = 1024 * 1024;

/// Who besides the owner may have rights to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Secrecy {
    /// Others may read it, none may write it: a certificate.
    Public,
    /// Nobody else may read it: a key, a list of tokens.
    Secret,
}

impl Secrecy {
    /// Mode bits that must not be set.
    fn forbidden(self) -> u32 {
        match self {
            Self::Public => 0o022,
            Self::Secret => 0o077,
        }
    }
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
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
    /// Others have rights to it.
    #[error(
        "others than its owner may {right} {path} (its mode is {mode:04o}): `chmod go-{letters} {path}`"
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// What they may do.
        right: &'static str,
        /// What is to be taken away.
        letters: &'static str,
    },
    /// More than anybody needs.
    #[error("{0} has more than {SIZE_MAX} bytes")]
    TooLarge(PathBuf),
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
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let flags = i32::try_from(flags).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(flags).open(path);
    let file: File = file.map_err(failed)?;
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
    let mode = metadata.mode() & 0o7777;
    if mode & secrecy.forbidden() != 0 {
        let (right, letters) = match secrecy {
            Secrecy::Public => ("write", "w"),
            Secrecy::Secret => ("use", "rwx"),
        };
        return Err(FileError::Mode {
            path: path.to_owned(),
            mode,
            right,
            letters,
        });
    }
    let mut bytes = Vec::new();
    let read = file.take(SIZE_MAX + 1).read_to_end(&mut bytes);
    let length = read.map_err(failed)?;
    match u64::try_from(length) {
        Ok(length) if length <= SIZE_MAX => Ok(bytes),
        _ => Err(FileError::TooLarge(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn with_mode(name: &str, mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("bellhop-{name}-{}", std::process::id()));
        fs::write(&path, "content").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_mode_that_lets_others_in_is_refused_with_the_remedy() {
        for (mode, public, secret) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o640, true, false),
            (0o644, true, false),
            (0o604, true, false),
            (0o620, false, false),
            (0o602, false, false),
        ] {
            let path = with_mode(&format!("mode-{mode:o}"), mode);
            assert_eq!(read(&path, Secrecy::Public).is_ok(), public, "{mode:o}");
            let found = read(&path, Secrecy::Secret);
            assert_eq!(found.is_ok(), secret, "{mode:o}");
            if let Err(error) = found {
                assert!(error.to_string().contains("chmod go-rwx"), "{error}");
            }
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn only_a_regular_file_of_a_sane_size_is_read() {
        let directory = std::env::temp_dir();
        let refused = read(&directory, Secrecy::Public).unwrap_err();
        assert!(matches!(refused, FileError::NotAFile(_)), "{refused}");
        let zero = read(Path::new("/dev/zero"), Secrecy::Public).unwrap_err();
        assert!(matches!(zero, FileError::NotAFile(_)), "{zero}");
        let missing = read(&directory.join("bellhop-none"), Secrecy::Public).unwrap_err();
        assert!(matches!(missing, FileError::Read { .. }), "{missing}");
        let huge = with_mode("huge", 0o600);
        let file = OpenOptions::new().write(true).open(&huge).unwrap();
        file.set_len(SIZE_MAX + 1).unwrap();
        let refused = read(&huge, Secrecy::Secret).unwrap_err();
        assert!(matches!(refused, FileError::TooLarge(_)), "{refused}");
        file.set_len(SIZE_MAX).unwrap();
        assert!(read(&huge, Secrecy::Secret).is_ok());
        fs::remove_file(huge).unwrap();
    }
}
