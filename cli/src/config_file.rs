//! Reads a configuration from a TOML or JSON file, or from standard input.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use bellhop_common::error::Error;
use serde::de::DeserializeOwned;

/// The maximum file size in bytes, far above any configuration. It protects against reading a
/// device file or a disk image into memory by mistake.
const MAX_BYTES: u64 = 1 << 20;

/// Reads `path`, whose extension determines the format. `-` is standard input, which is JSON if it
/// begins with a brace.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let shown = path.display();
    let bad = |problem| Error::invalid_input(format!("the configuration file {shown} {problem}"));
    let is_input = path == Path::new("-");
    let mut text = String::new();
    let source: io::Result<Box<dyn Read>> = if is_input {
        Ok(Box::new(io::stdin()))
    } else {
        fs::File::open(path).map(|file| Box::new(file) as Box<dyn Read>)
    };
    source
        .and_then(|source| source.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(Error::context(format!(
            "cannot read the configuration file {shown}"
        )))?;
    if u64::try_from(text.len()).is_ok_and(|len| len > MAX_BYTES) {
        return Err(bad("is larger than 1 MiB"));
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    let format = match extension {
        _ if is_input && text.trim_start().starts_with('{') => Some("json"),
        _ if is_input => Some("toml"),
        extension => extension,
    };
    match format {
        Some("toml") => toml::from_str(&text).map_err(|source| bad("is wrong").because(source)),
        Some("json") => {
            serde_json::from_str(&text).map_err(|source| bad("is wrong").because(source))
        }
        _ => Err(bad("must end in .toml or .json")),
    }
}
