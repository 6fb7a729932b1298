//! File operations whose errors name the action and the path: a thin layer over `std::fs`.

use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Reads a whole file.
///
/// # Errors
/// [`Error::File`].
pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(Error::file("read", path))
}

/// Reads a whole UTF-8 file.
///
/// # Errors
/// [`Error::File`], also when it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(Error::file("read", path))
}

/// Writes a whole file, creating or replacing it.
///
/// # Errors
/// [`Error::File`].
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, bytes).map_err(Error::file("write", path))
}

/// Creates a directory and its parents.
///
/// # Errors
/// [`Error::File`].
pub fn create_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(Error::file("create", path))
}

/// Renames a file or directory.
///
/// # Errors
/// [`Error::File`].
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::file("rename", from))
}

/// Copies a file.
///
/// # Errors
/// [`Error::File`].
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .map_err(Error::file("copy", from))
}

/// The entries of a directory, sorted by name.
///
/// # Errors
/// [`Error::File`].
pub fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(Error::file("list", path))? {
        entries.push(entry.map_err(Error::file("list", path))?.path());
    }
    entries.sort();
    Ok(entries)
}

/// Every regular file below a directory, sorted by path.
///
/// # Errors
/// [`Error::File`].
pub fn walk(path: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut pending = vec![path.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in list(&directory)? {
            let kind = fs::symlink_metadata(&entry)
                .map_err(Error::file("read", &entry))?
                .file_type();
            if kind.is_dir() {
                pending.push(entry);
            } else if kind.is_file() {
                files.push(entry);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The last `count` lines of a text.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines
        .get(lines.len().saturating_sub(count)..)
        .unwrap_or_default()
        .join("\n")
}
