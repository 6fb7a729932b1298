//! Files of credentials: read whole, and only if no other user could write or, for secrets, read
//! them.
//!
//! Owns the checks. It must not know the content of a file.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::Error;

/// The largest file, in bytes: a bundle of certificates or a list of tokens.
const SIZE_MAX: u64 = 1 << 20;

/// Whether other users may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Secrecy {
    /// Others may read it: a certificate.
    Public,
    /// Only its owner may read it: a key, a list of tokens.
    Secret,
}

/// The owner of the credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// A service that authenticates others by them: they belong to its user or to root, and no
    /// other user may write them.
    Service,
    /// The user of a command, who has chosen the files: only secrets are checked.
    Caller,
}

impl Holder {
    /// Mode bits that must not be set.
    const fn forbidden(self, secrecy: Secrecy) -> u32 {
        match (self, secrecy) {
            (_, Secrecy::Secret) => 0o077,
            (Self::Service, Secrecy::Public) => 0o022,
            (Self::Caller, Secrecy::Public) => 0,
        }
    }
}

/// Reads a whole file, of 1 MiB at most.
///
/// # Errors
/// See [`Error`].
pub fn read(path: &Path, secrecy: Secrecy, holder: Holder) -> Result<Vec<u8>, Error> {
    let shown = path.display();
    let failed = |source: io::Error| Error::tls(format!("cannot read {shown}")).because(source);
    // A pipe without a writer would block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(file.map_err(|errno| failed(errno.into()))?);
    // The metadata of the open file, not of the file that has the name now.
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(Error::tls(format!("{shown} is not a regular file")));
    }
    let user = rustix::process::geteuid().as_raw();
    if holder == Holder::Service && ![0, user].contains(&metadata.uid()) {
        return Err(Error::tls(format!(
            "{shown} belongs to user {}, who is neither this process' user nor root: `chown root \
             {shown}`",
            metadata.uid()
        )));
    }
    let mode = metadata.mode() & 0o7777;
    if mode & holder.forbidden(secrecy) != 0 {
        let (right, letters) = match secrecy {
            Secrecy::Public => ("write", "w"),
            Secrecy::Secret => ("use", "rwx"),
        };
        return Err(Error::tls(format!(
            "users other than its owner may {right} {shown} (its mode is {mode:04o}): `chmod \
             go-{letters} {shown}`"
        )));
    }
    let mut bytes = Vec::new();
    let read = file.take(SIZE_MAX + 1).read_to_end(&mut bytes);
    let length = read.map_err(failed)?;
    match u64::try_from(length) {
        Ok(length) if length <= SIZE_MAX => Ok(bytes),
        _ => Err(Error::tls(format!(
            "{shown} has more than {SIZE_MAX} bytes"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

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
            let found = read(&path, Secrecy::Public, Holder::Service);
            assert_eq!(found.is_ok(), public, "{mode:o}");
            assert!(read(&path, Secrecy::Public, Holder::Caller).is_ok());
            for holder in [Holder::Service, Holder::Caller] {
                let found = read(&path, Secrecy::Secret, holder);
                assert_eq!(found.is_ok(), secret, "{mode:o}");
                if let Err(error) = found {
                    assert!(error.to_string().contains("chmod go-rwx"), "{error}");
                }
            }
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn only_a_regular_file_of_a_sane_size_is_read() {
        let directory = std::env::temp_dir();
        let refused = read(&directory, Secrecy::Public, Holder::Service).unwrap_err();
        assert!(
            refused.to_string().contains("not a regular file"),
            "{refused}"
        );
        let zero = read(Path::new("/dev/zero"), Secrecy::Public, Holder::Service).unwrap_err();
        assert!(zero.to_string().contains("not a regular file"), "{zero}");
        let missing = read(
            &directory.join("bellhop-none"),
            Secrecy::Public,
            Holder::Service,
        )
        .unwrap_err();
        assert!(missing.to_string().starts_with("cannot read"), "{missing}");
        let huge = with_mode("huge", 0o600);
        let file = File::options().write(true).open(&huge).unwrap();
        file.set_len(SIZE_MAX + 1).unwrap();
        let refused = read(&huge, Secrecy::Secret, Holder::Service).unwrap_err();
        assert!(refused.to_string().contains("has more than"), "{refused}");
        file.set_len(SIZE_MAX).unwrap();
        assert!(read(&huge, Secrecy::Secret, Holder::Service).is_ok());
        fs::remove_file(huge).unwrap();
    }
}
