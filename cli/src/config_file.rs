//! Reads a machine's configuration from a TOML or JSON file.

use std::fs;
use std::io::Read;
use std::path::Path;

use bellhop_common::error::Error;
use serde::de::DeserializeOwned;

/// No configuration is near this size; a device file or a disk image given by
/// mistake is not read into memory.
const MAX_BYTES: u64 = 1 << 20;

/// Reads `path`, whose extension names the format.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let shown = path.display();
    let bad = |problem| Error::invalid_input(format!("the configuration file {shown} {problem}"));
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(Error::context(format!(
            "cannot read the configuration file {shown}"
        )))?;
    if u64::try_from(text.len()).is_ok_and(|len| len > MAX_BYTES) {
        return Err(bad("is larger than 1 MiB"));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(&text).map_err(|source| bad("is wrong").because(source)),
        Some("json") => {
            serde_json::from_str(&text).map_err(|source| bad("is wrong").because(source))
        }
        _ => Err(bad("must end in .toml or .json")),
    }
}
