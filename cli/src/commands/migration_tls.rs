//! The options that protect a migration without daemons, for source and destination.

use std::path::{Path, PathBuf};

use bellhop_api::machine::{MigrationSecret, Pairing};
use bellhop_common::error::Error;
use vmm::credentials::{self, Holder, Secrecy};
use vmm::migration::tls::TlsFiles;

/// The protection of the guest's data on the network. The paths are on the host of the command.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TlsArguments {
    /// Over TCP: this host's certificate, and intermediate certificates up to its authority (PEM)
    #[arg(long, alias = "tls-certificate", value_name = "FILE")]
    tls_cert: Option<PathBuf>,

    /// Over TCP: the certificate's private key (PEM)
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,

    /// Over TCP: the authority that must have issued the other host's certificate (PEM)
    #[arg(long, alias = "tls-authority", value_name = "FILE")]
    tls_ca: Option<PathBuf>,

    /// Over TCP without TLS: the network carries the guest's memory unencrypted, so use it only on
    /// a private network
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_key", "tls_ca"])]
    pub(crate) plaintext: bool,

    /// A file with 64 hexadecimal digits, the same at both ends: the destination refuses a source
    /// without it, whatever its certificate. `openssl rand -hex 32` writes one
    #[arg(long, value_name = "FILE")]
    migration_secret: Option<PathBuf>,
}

impl TlsArguments {
    /// Maps each path with `change`.
    pub(crate) fn map_paths<E>(
        mut self,
        change: impl Fn(&Path) -> Result<PathBuf, E>,
    ) -> Result<Self, E> {
        for path in [&mut self.tls_cert, &mut self.tls_key, &mut self.tls_ca]
            .into_iter()
            .flatten()
        {
            *path = change(path)?;
        }
        Ok(self)
    }

    /// Whether any option is given.
    pub(crate) fn is_given(&self) -> bool {
        let files = [&self.tls_cert, &self.tls_key, &self.tls_ca];
        let files = files.iter().any(|file| file.is_some());
        self.plaintext || files || self.migration_secret.is_some()
    }

    /// The secret in its file, if one is given. This process reads the file.
    ///
    /// # Errors
    /// The file cannot be read, other users can read it, or it has no secret.
    pub(crate) fn pairing(&self) -> Result<Option<Pairing>, Error> {
        let Some(path) = &self.migration_secret else {
            return Ok(None);
        };
        let text = credentials::read(path, Secrecy::Secret, Holder::Caller)?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        let secret = MigrationSecret::try_from(text)
            .map_err(Error::context(format!("cannot use {}", path.display())))?;
        Ok(Some(Pairing { secret, tls: None }))
    }

    /// The files, if they are given.
    ///
    /// # Errors
    /// Only some of the options are given.
    pub(crate) fn files(&self) -> Result<Option<TlsFiles>, Error> {
        let clone = (
            self.tls_cert.clone(),
            self.tls_key.clone(),
            self.tls_ca.clone(),
        );
        match clone {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(authority)) => Ok(Some(TlsFiles {
                certificate,
                key,
                authority,
            })),
            _ => Err(Error::wrong(
                "--tls-cert, --tls-key and --tls-ca belong together: give all three",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        tls: TlsArguments,
    }

    #[test]
    fn three_files_belong_together() {
        let parse = |words: &[&str]| {
            let line = std::iter::once(&"x").chain(words);
            Line::try_parse_from(line).map(|line| line.tls)
        };
        for all in [
            ["--tls-cert=c", "--tls-key=k", "--tls-ca=a"],
            ["--tls-certificate=c", "--tls-key=k", "--tls-authority=a"],
        ] {
            let all = parse(&all).unwrap();
            assert!(all.files().unwrap().is_some() && all.is_given());
        }
        let none = parse(&[]).unwrap();
        assert!(none.files().unwrap().is_none() && !none.is_given());
        let one = parse(&["--tls-key=k"]).unwrap();
        assert!(one.files().unwrap_err().to_string().contains("all three") && one.is_given());
        parse(&["--tls-key=k", "--plaintext"]).unwrap_err();
    }

    #[test]
    fn a_secret_comes_from_a_file_of_its_owner() {
        let name = format!("bellhop-migration-secret-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let pairing = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let option = format!("--migration-secret={}", path.display());
            let tls = Line::try_parse_from(["x", &option]).unwrap().tls;
            assert!(tls.is_given());
            tls.pairing()
        };
        let digits = "a5".repeat(32);
        let secret = pairing(&format!("{digits}\n"), 0o600).unwrap().unwrap();
        assert_eq!(secret.secret, MigrationSecret([0xa5; 32]));
        for (text, mode, said) in [
            (digits.as_str(), 0o644, "chmod"),
            (&digits[1..], 0o600, "64 hexadecimal digits"),
        ] {
            let error = pairing(text, mode).unwrap_err();
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            let text = format!("{error} {}", cause.unwrap_or_default());
            assert!(
                text.contains(said) && !text.contains(&digits[1..]),
                "{text}"
            );
        }
        fs::remove_file(&path).unwrap();
    }
}
