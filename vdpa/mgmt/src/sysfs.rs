//! Reads and writes files, links and directories of sysfs.
//!
//! The module does not depend on a particular bus.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::Path;
use std::str::FromStr;

use super::error::Error;

/// The names in a directory; empty if it does not exist.
pub(super) fn names(directory: &Path) -> Result<Vec<String>, Error> {
    Ok(entries(directory)?.unwrap_or_default())
}

/// The names in a directory, if it exists.
pub(super) fn entries(directory: &Path) -> Result<Option<Vec<String>>, Error> {
    let entries = match fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        entries => entries.map_err(Error::read(directory))?,
    };
    let names = entries.map(|entry| {
        let entry = entry.map_err(Error::read(directory))?;
        Ok(entry.file_name().to_string_lossy().into_owned())
    });
    names.collect::<Result<_, _>>().map(Some)
}

/// The name of a link's target, if there is one.
pub(super) fn link_name(link: &Path) -> Result<Option<String>, Error> {
    match fs::read_link(link) {
        Ok(target) => Ok(target
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::read(link)(source)),
    }
}

/// The text in a file of sysfs; `None` if the file is empty or does not exist.
pub(super) fn attribute(path: &Path) -> Result<Option<String>, Error> {
    match fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).trim().to_owned();
            Ok(Some(text).filter(|text| !text.is_empty()))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::read(path)(source)),
    }
}

/// The number in a file of sysfs, if there is one that fits the type.
pub(super) fn number<T: FromStr>(path: &Path) -> Result<Option<T>, Error> {
    Ok(attribute(path)?.and_then(|text| text.parse().ok()))
}

/// Writes to a file of sysfs in one piece. Never creates a missing file.
pub(super) fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(text.as_bytes())
}
