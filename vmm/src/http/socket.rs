//! The Unix socket: created, distinguished from a stale one, removed.
//!
//! Owns the file. It must not know the protocol on the socket.
//!
//! ```text
//!   path free ──────────────────────────────────> bound, mode 0600
//!   a socket exists, no answer: removed ────────> bound
//!   a socket exists, a server answers ──────────> error, left alone
//!   any other file exists ──────────────────────> error, left alone
//! ```

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The mode of the socket: only the user of this process may connect.
const MODE: Mode = Mode::from_raw_mode(0o600);
/// Connections that the kernel queues until they are accepted.
const BACKLOG: i32 = 64;

/// Why the socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another server uses it.
    #[error("another process serves {0} already; give another path, or stop that process")]
    InUse(PathBuf),
    /// The file is not a socket, so it is not treated as a stale one.
    #[error("{0} exists and is not a socket; give another path")]
    NotASocket(PathBuf),
    /// The name is too long for a Unix socket (107 bytes), or has a zero byte.
    #[error("{path} cannot be a socket's name: at most 107 bytes")]
    Name {
        /// The path.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("cannot create the socket {path}")]
    Make {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The file of a bound socket; removed on drop, unless another file has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
    /// While it is open, others find the socket in use, and its inode is not reused.
    _listener: OwnedFd,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|there| there == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a socket's file");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Binds and listens, with the mode 0600. The listener is non-blocking.
///
/// # Errors
/// See [`SocketError`].
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
    let make = |source| SocketError::Make {
        path: path.to_owned(),
        source,
    };
    let address = SocketAddrUnix::new(path).map_err(|error| SocketError::Name {
        path: path.to_owned(),
        source: error.into(),
    })?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|error| make(error.into()))?;
    // The file inherits the socket's mode, so other users can never connect.
    rustix::fs::fchmod(&socket, MODE).map_err(|error| make(error.into()))?;
    match rustix::net::bind(&socket, &address) {
        Err(rustix::io::Errno::ADDRINUSE) => {
            remove_stale(path)?;
            rustix::net::bind(&socket, &address).map_err(|error| make(error.into()))?;
        }
        bound => bound.map_err(|error| make(error.into()))?,
    }
    // At once: until then connections to the new file are refused, and another server treats it as
    // a stale one.
    rustix::net::listen(&socket, BACKLOG).map_err(|error| make(error.into()))?;
    let file = SocketFile {
        path: path.to_owned(),
        identity: identity(path).map_err(make)?,
        _listener: socket.try_clone().map_err(make)?,
    };
    Ok((UnixListener::from(socket), file))
}

/// Connects to the socket of a process that its guest may have captured. Follows no link that the
/// process has put in the place of its socket: it would lead to a socket of another process.
///
/// # Errors
/// Those of open(2) and connect(2): no server listens there, or the file is a link.
pub async fn connect_directly(path: &Path) -> io::Result<tokio::net::UnixStream> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    tokio::net::UnixStream::connect(format!("/proc/self/fd/{}", file.as_raw_fd())).await
}

/// Removes a socket on which no server answers.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let make = |source| SocketError::Make {
        path: path.to_owned(),
        source,
    };
    let metadata = fs::symlink_metadata(path).map_err(make)?;
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing a stale socket");
            fs::remove_file(path).map_err(make)
        }
        // A datagram socket (EPROTOTYPE) is in use, too.
        _ => Err(SocketError::InUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_socket_is_created_and_deleted() {
        let directory = Directory::new("api-socket");
        let path = directory.0.join("s");
        // No server listens here any more.
        drop(UnixListener::bind(&path).unwrap());
        let (_listener, file) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert!(matches!(listen(&path), Err(SocketError::InUse(_))));
        drop(file);
        assert!(!path.exists());
        // Another server replaced the file by force: the drop does not remove that file.
        let (_listener, file) = listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        UnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn a_link_leads_to_no_other_socket() {
        let directory = Directory::new("api-link");
        let path = directory.0.join("s");
        let (_listener, _file) = listen(&path).unwrap();
        connect_directly(&path).await.unwrap();
        let link = directory.0.join("l");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(connect_directly(&link).await.is_err());
        let missing = connect_directly(&directory.0.join("m")).await.unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn other_files_at_the_socket_path_stay() {
        let directory = Directory::new("api-no-socket");
        let path = directory.0.join("f");
        fs::write(&path, "mine").unwrap();
        assert!(matches!(listen(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        let link = directory.0.join("l");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert!(listen(&link).is_err());
        assert!(fs::symlink_metadata(&link).is_ok());
        let long = directory.0.join("n".repeat(200));
        assert!(matches!(listen(&long), Err(SocketError::Name { .. })));
        assert!(matches!(
            listen(&directory.0.join("no/such")),
            Err(SocketError::Make { .. })
        ));
    }
}
