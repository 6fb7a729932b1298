//! Named remotes: the daemons that a user works with, each with its address and credentials.
//!
//! Owns the user's file `remotes.toml`: its place, its form and its replacement. Must not know any
//! subcommand.
//!
//! ```toml
//! default = "node2"
//!
//! [remotes.node2]
//! address = "https://node2:8443"
//! ca = "/home/ops/ca.crt"
//! cert = "/home/ops/ops.crt"
//! key = "/home/ops/ops.key"
//! token_file = "/home/ops/token"
//! ```

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use bellhop_api::address::{Address, SOCKET};
use serde::{Deserialize, Serialize};
use vmm::credentials::{self, Holder, Secrecy};

use crate::error::Error;
use crate::private_file;

/// The name of the daemon on this host, which needs no record.
pub const LOCAL: &str = "local";

/// The longest name, in bytes.
const NAME_MAX: usize = 64;

/// A daemon, and the files that https needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// The daemon: `https://HOST:PORT`, `ssh://[USER@]HOST[:PORT][/SOCKET]`, or its socket's path
    /// on this host
    #[arg(value_name = "ADDRESS")]
    pub address: Address,

    /// With https: the authorities that may have issued the daemon's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,

    /// With https: the client's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,

    /// With https: the certificate's private key (PEM)
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,

    /// With https: the file with the client's token
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
}

impl Remote {
    /// The daemon on this host.
    #[must_use]
    pub fn local() -> Self {
        Self {
            address: Address::Socket(SOCKET.into()),
            ca: None,
            cert: None,
            key: None,
            token_file: None,
        }
    }

    /// Makes all paths absolute.
    ///
    /// # Errors
    /// There is no working directory, or a path is empty.
    pub fn absolute(mut self) -> io::Result<Self> {
        if let Address::Socket(path) = &mut self.address {
            *path = std::path::absolute(&*path)?;
        }
        let files = [
            &mut self.ca,
            &mut self.cert,
            &mut self.key,
            &mut self.token_file,
        ];
        for file in files.into_iter().flatten() {
            *file = std::path::absolute(&*file)?;
        }
        Ok(self)
    }
}

/// All remotes of a user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remotes {
    /// The default remote of commands; none for the local daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<String>,
    #[serde(default)]
    remotes: BTreeMap<String, Remote>,
}

impl Remotes {
    /// The path of this user's file; none without a home directory.
    #[must_use]
    pub fn path() -> Option<PathBuf> {
        let directory = |variable| {
            let path = PathBuf::from(std::env::var_os(variable)?);
            path.is_absolute().then_some(path)
        };
        let config = directory("XDG_CONFIG_HOME");
        let config = config.or_else(|| Some(directory("HOME")?.join(".config")));
        Some(config?.join("bellhop/remotes.toml"))
    }

    /// The remotes of this user.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn of_user() -> Result<Self, Error> {
        let path = Self::path();
        path.map_or_else(|| Ok(Self::default()), |path| Self::load(&path))
    }

    /// Reads the file; without one there are no remotes.
    ///
    /// # Errors
    /// The file cannot be read, others may read it, or it is malformed.
    pub fn load(path: &Path) -> Result<Self, Error> {
        if !path.exists() {
            return Ok(Self::default());
        }
        let bytes = credentials::read(path, Secrecy::Secret, Holder::Caller)?;
        toml::from_slice(&bytes).map_err(|source| {
            Error::invalid_input(format!("{} is wrong", path.display())).because(source)
        })
    }

    /// Changes the file. Simultaneous changes, also of other processes, come one after the other.
    ///
    /// # Errors
    /// As for [`load`](Self::load); or the change fails, or the file cannot be written. Then it is
    /// unchanged.
    pub fn change(
        path: &Path,
        change: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let failed = || format!("cannot write {}", path.display());
        let mut directory = DirBuilder::new();
        let directory = directory.recursive(true).mode(0o700);
        let created = path
            .parent()
            .map_or(Ok(()), |parent| directory.create(parent));
        let lock = created.and_then(|()| private_file::lock(path));
        let _lock = lock.map_err(Error::context(failed()))?;
        let mut remotes = Self::load(path)?;
        change(&mut remotes)?;
        let text = toml::to_string(&remotes).map_err(Error::context(failed()))?;
        private_file::replace(path, text.as_bytes()).map_err(Error::context(failed()))
    }

    /// Whether a text can be the name of a remote: then it is not an address.
    #[must_use]
    pub fn is_name(text: &str) -> bool {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        (1..=NAME_MAX).contains(&text.len()) && text.bytes().all(known)
    }

    /// The remote of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<Remote, Error> {
        if name == LOCAL {
            return Ok(Remote::local());
        }
        let remote = self.remotes.get(name).cloned();
        remote.ok_or_else(|| {
            Error::not_there(format!("no remote is named {name:?}"))
                .hint("`bellhop remote list` lists them, `bellhop remote add` adds one")
        })
    }

    /// The remotes by name, the local daemon first.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Remote)> {
        let named = self.remotes.iter();
        let named = named.map(|(name, remote)| (name.as_str(), remote.clone()));
        std::iter::once((LOCAL, Remote::local())).chain(named)
    }

    /// The name of the default remote of commands.
    #[must_use]
    pub fn default_name(&self) -> &str {
        self.default.as_deref().unwrap_or(LOCAL)
    }

    /// Adds a remote.
    ///
    /// # Errors
    /// The name is invalid, or taken.
    pub fn add(&mut self, name: &str, remote: Remote) -> Result<(), Error> {
        if !Self::is_name(name) {
            return Err(Error::wrong(format!(
                "{name:?} is not a valid name: use 1 to {NAME_MAX} letters, digits, dots, \
                 underscores or hyphens"
            )));
        }
        if name == LOCAL || self.remotes.contains_key(name) {
            let message = format!("a remote with the name {name} exists already");
            return Err(Error::conflict(message).hint("`bellhop remote remove` removes it"));
        }
        self.remotes.insert(name.to_owned(), remote);
        Ok(())
    }

    /// Makes this remote the default.
    ///
    /// # Errors
    /// There is no such remote.
    pub fn choose(&mut self, name: &str) -> Result<(), Error> {
        self.get(name)?;
        self.default = (name != LOCAL).then(|| name.to_owned());
        Ok(())
    }

    /// Removes a remote; if it was the default, the local daemon becomes it.
    ///
    /// # Errors
    /// There is no such remote, or it is the local daemon.
    pub fn remove(&mut self, name: &str) -> Result<(), Error> {
        self.get(name)?;
        if self.remotes.remove(name).is_none() {
            return Err(Error::conflict(
                "cannot remove the remote of the local daemon",
            ));
        }
        if self.default.as_deref() == Some(name) {
            self.default = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::exit::Code;

    fn remote(address: &str) -> Remote {
        Remote {
            address: address.parse().unwrap(),
            token_file: Some("token".into()),
            ..Remote::local()
        }
    }

    #[test]
    fn remotes_survive_in_a_file_of_their_owner() {
        let home = std::env::temp_dir().join(format!("bellhop-remotes-{}", std::process::id()));
        let path = home.join("bellhop/remotes.toml");
        assert_eq!(Remotes::load(&path).unwrap().default_name(), LOCAL);
        let node2 = remote("https://node2:8443").absolute().unwrap();
        assert!(node2.token_file.as_ref().unwrap().is_absolute());
        Remotes::change(&path, |remotes| {
            remotes.add("node2", node2.clone())?;
            remotes.choose("node2")
        })
        .unwrap();
        let mut loaded = Remotes::load(&path).unwrap();
        assert_eq!(loaded.default_name(), "node2");
        assert_eq!(loaded.get("node2").unwrap(), node2);
        let names: Vec<&str> = loaded.iter().map(|(name, _)| name).collect();
        assert_eq!(names, [LOCAL, "node2"]);
        loaded.remove("node2").unwrap();
        assert_eq!(loaded, Remotes::default());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Remotes::load(&path).unwrap_err().to_string();
        assert!(error.contains("chmod go-rwx"), "{error}");
        for bad in [
            "default = 1",
            "other = 1",
            "[remotes.a]\nca = \"b\"",
            "[remotes.a]\naddress = \"http://a:1\"",
            "[remotes.a]\naddress = \"https://a:1\"\npassword = \"b\"",
            "\u{0}",
        ] {
            private_file::replace(&path, bad.as_bytes()).unwrap();
            let error = Remotes::load(&path).unwrap_err();
            assert_eq!(error.code(), Code::InvalidInput, "{bad}");
        }
        fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn simultaneous_changes_lose_nothing() {
        let home = std::env::temp_dir().join(format!("bellhop-changes-{}", std::process::id()));
        let path = home.join("remotes.toml");
        let add = |name: &str| {
            let added = Remotes::change(&path, |remotes| remotes.add(name, remote("/run/b")));
            added.unwrap();
        };
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || (0..8).for_each(|number| add(&format!("{thread}-{number}"))));
            }
        });
        assert_eq!(Remotes::load(&path).unwrap().remotes.len(), 64);
        // A change that fails leaves the file as it is.
        Remotes::change(&path, |remotes| remotes.remove("none")).unwrap_err();
        assert_eq!(Remotes::load(&path).unwrap().remotes.len(), 64);
        fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn names_are_unique_and_no_addresses() {
        let mut remotes = Remotes::default();
        remotes.add("a", remote("https://a:1")).unwrap();
        for (name, code) in [
            ("a", Code::Conflict),
            (LOCAL, Code::Conflict),
            ("", Code::WrongCommandLine),
            ("tcp:a", Code::WrongCommandLine),
            ("a/b", Code::WrongCommandLine),
            ("a".repeat(NAME_MAX + 1).as_str(), Code::WrongCommandLine),
        ] {
            let error = remotes.add(name, remote("/run/b")).unwrap_err();
            assert_eq!(error.code(), code, "{name}");
        }
        for error in [
            remotes.get("b").unwrap_err(),
            remotes.choose("b").unwrap_err(),
            remotes.remove("b").unwrap_err(),
        ] {
            assert_eq!(error.code(), Code::NotThere);
        }
        assert_eq!(remotes.remove(LOCAL).unwrap_err().code(), Code::Conflict);
    }
}
