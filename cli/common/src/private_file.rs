//! Files that only their owner may read, replaced whole: a reader sees the old or the new content.
//!
//! Must not know any content.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Creates a file with this content and mode 0600, or replaces it.
///
/// # Errors
/// The kernel's; then the old file is unchanged.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    let new = Path::new(&new);
    let replaced = create(new, content, 0o600).and_then(|()| fs::rename(new, path));
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
    file.write_all(content)?;
    file.sync_all()
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
        // A directory is no file to replace, and nothing stays of the attempt.
        fs::create_dir(directory.join("full")).unwrap();
        replace(&directory.join("full"), b"d").unwrap_err();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
        fs::remove_dir_all(directory).unwrap();
    }
}
