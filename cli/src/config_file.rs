//! Reads a machine's configuration from a TOML or JSON file.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

/// No configuration is near this size; a device file or a disk image given by
/// mistake is not read into memory.
const MAX_BYTES: u64 = 1 << 20;

/// Why a configuration file could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigFileError {
    #[error("cannot read the configuration file {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("the configuration file {0} is larger than 1 MiB")]
    TooLarge(PathBuf),
    #[error("the configuration file {0} must end in .toml or .json")]
    UnknownFormat(PathBuf),
    #[error("the configuration file {path} is wrong")]
    Toml {
        path: PathBuf,
        source: Box<toml::de::Error>,
    },
    #[error("the configuration file {path} is wrong")]
    Json {
        path: PathBuf,
        source: serde_json::Error,
    },
}

/// Reads `path`, whose extension names the format.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigFileError> {
    let read_error = |source| ConfigFileError::Read {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    fs::File::open(path)
        .map_err(read_error)?
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(read_error)?;
    if u64::try_from(text.len()).is_ok_and(|len| len > MAX_BYTES) {
        return Err(ConfigFileError::TooLarge(path.to_owned()));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(&text).map_err(|source| ConfigFileError::Toml {
            path: path.to_owned(),
            source: Box::new(source),
        }),
        Some("json") => serde_json::from_str(&text).map_err(|source| ConfigFileError::Json {
            path: path.to_owned(),
            source,
        }),
        _ => Err(ConfigFileError::UnknownFormat(path.to_owned())),
    }
}
