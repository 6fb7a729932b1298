//! Files that only their owner may read, replaced whole: a reader sees the old or the new content.
//!
//! Must not know any content.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, chown};
use std::path::Path;

/// Locks out other changes of a file, also of other processes, until the result is dropped. The
/// lock is on the file `.NAME.lock` beside it, because a replaced file is another one.
///
/// # Errors
/// The kernel's.
pub fn lock(path: &Path) -> io::Result<File> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".lock");
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(target.with_file_name(name))?;
    file.lock()?;
    Ok(file)
}

/// Creates a file with this content and mode 0600, or replaces it. The owner of a replaced file and
/// a link to it stay.
///
/// # Errors
/// The kernel's; then the old file is unchanged.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut new = target.clone().into_os_string();
    new.push(format!(".{}", std::process::id()));
    let new = Path::new(&new);
    let replaced = create(new, content, 0o600)
        .and_then(|()| match fs::metadata(&target) {
            Ok(old) => chown(new, Some(old.uid()), Some(old.gid())),
            Err(_) => Ok(()),
        })
        .and_then(|()| fs::rename(new, &target));
    if replaced.is_err() {
        let _ = fs::remove_file(new);
    }
    replaced
}

/// Creates a file with this content and mode; it must not exist.
///
/// # Errors
/// The kernel's.
pub fn create(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(mode).open(path)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = fs::remove_file(path);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_only_its_owner_may_read_it() {
        let directory =
            std::env::temp_dir().join(format!("bellhop-private-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let path = directory.join("file");
        replace(&path, b"a").unwrap();
        replace(&path, b"b").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"b");
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o600
        );
        create(&path, b"c", 0o644).unwrap_err();
        let link = directory.join("link");
        std::os::unix::fs::symlink("file", &link).unwrap();
        replace(&link, b"e").unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("file"));
        assert_eq!(fs::read(&path).unwrap(), b"e");
        fs::remove_file(&link).unwrap();
        // A directory is no file to replace, and nothing stays of the attempt.
        fs::create_dir(directory.join("full")).unwrap();
        replace(&directory.join("full"), b"d").unwrap_err();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
        fs::remove_dir_all(directory).unwrap();
    }
}
