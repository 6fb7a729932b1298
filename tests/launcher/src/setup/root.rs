//! The lab host's root: a Debian tree with the stock kernel, its headers and source, compilers, and
//! QEMU.
//!
//! Recipe: `images/host/{suite,packages,preferences,setup-hook}`. mmdebstrap builds it, without
//! privileges in a user namespace. Its programs run from outside with the tree's own dynamic loader
//! and libraries, so that nothing is installed on the machine.
//!
//! This module owns the tree and the ways to run something in or from it.

use super::apt;
use crate::cache::{Cache, CacheLock, RecipeHash, remove_tree};
use crate::error::{Error, Result};
use crate::files;
use crate::process::{output, run_logged};
use crate::progress::Progress;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Raise this when the code here changes the tree's content.
const VERSION: u32 = 1;

/// Set for the setup hook where the mirror has no backports.
const WITHOUT_BACKPORTS: &str = "LAB_WITHOUT_BACKPORTS";

/// How often apt tries to download a file again.
const DOWNLOAD_RETRIES: &str = "Acquire::Retries \"3\"";

/// Files that no test reads: a third of the tree.
const EXCLUDED: [&str; 4] = [
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
];

/// The finished root.
#[derive(Debug, Clone)]
pub struct Root {
    directory: PathBuf,
    hash: RecipeHash,
}

impl Root {
    /// Builds the root where it is not in the cache yet. `images` is the repository's directory of
    /// that name.
    ///
    /// # Errors
    /// [`Error::Program`] with mmdebstrap's last lines; [`Error::File`].
    pub fn ensure(cache: &Cache, lock: &CacheLock, images: &Path) -> Result<Self> {
        let hash = hash(images)?;
        let entry = cache.entry("root", &hash);
        let entry = cache.ensure(lock, entry, |partial| {
            let progress = Progress::start("lab host root");
            build(cache, &images.join("host"), partial, &progress)
        })?;
        cache.retire_others(lock, "root", &entry);
        Ok(Self {
            directory: entry.directory().to_path_buf(),
            hash,
        })
    }

    /// The hash that later steps start from.
    pub fn hash(&self) -> &RecipeHash {
        &self.hash
    }

    /// The tree.
    pub fn tree(&self) -> PathBuf {
        self.directory.join("tree")
    }

    /// The release of the stock kernel ("6.12.…-amd64").
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is not exactly one; [`Error::File`].
    pub fn kernel_release(&self) -> Result<String> {
        let releases = files::list(&self.tree().join("usr/lib/modules"))?;
        match releases.as_slice() {
            [one] => Ok(one
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()),
            several => Err(Error::invalid(
                "the lab host's root",
                format!("it has {} kernels instead of one", several.len()),
            )),
        }
    }

    /// The stock kernel, a bzImage.
    ///
    /// # Errors
    /// As [`Self::kernel_release`].
    pub fn kernel_image(&self) -> Result<PathBuf> {
        let release = self.kernel_release()?;
        Ok(self.tree().join("boot").join(format!("vmlinuz-{release}")))
    }

    /// A program of the tree, to run on this machine without chroot. `program` is its path in the
    /// tree without the leading slash.
    pub fn program(&self, program: &str) -> Command {
        let tree = self.tree();
        let mut command = Command::new(tree.join("lib64/ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(tree.join("usr/lib/x86_64-linux-gnu"))
            .arg(tree.join(program));
        command
    }

    /// A program to run inside the tree: by chroot as root, else in a user namespace that maps the
    /// tree's owners.
    pub fn chroot(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = if rustix::process::geteuid().is_root() {
            Command::new("/usr/sbin/chroot")
        } else {
            let mut command = Command::new("unshare");
            command.args(["--map-root-user", "--map-auto", "/usr/sbin/chroot"]);
            command
        };
        command
            .arg(self.tree())
            .arg(program)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// The content of an xz file, decompressed by the tree's own xz.
    ///
    /// # Errors
    /// [`Error::Program`]; [`Error::Start`].
    pub fn decompress(&self, file: &Path) -> Result<Vec<u8>> {
        output(self.program("usr/bin/xz").arg("-dc").arg(file))
    }
}

/// The hash of the root's recipe.
///
/// # Errors
/// [`Error::File`].
pub(super) fn hash(images: &Path) -> Result<RecipeHash> {
    let recipe = images.join("host");
    let mut hash = RecipeHash::new("root", VERSION);
    for name in ["suite", "packages", "preferences", "setup-hook"] {
        hash.add_file(&recipe.join(name))?;
    }
    // A tree that root built and one of a user namespace have different owners.
    hash.add(&[u8::from(rustix::process::geteuid().is_root())]);
    Ok(hash)
}

fn build(cache: &Cache, recipe: &Path, partial: &Path, progress: &Progress) -> Result<()> {
    let suite = files::read_text(&recipe.join("suite"))?;
    let suite = suite.trim();
    let packages = package_list(&files::read_text(&recipe.join("packages"))?);
    let sources = match apt::sources_list(suite) {
        Some(list) => {
            let path = partial.join("mirror.list");
            files::write(&path, list)?;
            Some(path)
        }
        None => None,
    };
    let log = cache.log("root");
    let mut command = mmdebstrap(recipe, partial, suite, &packages, sources.as_deref());
    if run_logged(&mut command, &log, progress).is_ok() {
        return Ok(());
    }
    // A mirror that failed once may answer the second time.
    progress.line("failed; trying again");
    remove_tree(&partial.join("tree"))?;
    let Err(error) = run_logged(&mut command, &log, progress) else {
        return Ok(());
    };
    // Not every mirror carries backports. Without them QEMU comes from the suite.
    if !files::read_text(&log).is_ok_and(|log| log.contains(&format!("{suite}-backports"))) {
        return Err(error);
    }
    progress.line("failed with backports; trying without");
    remove_tree(&partial.join("tree"))?;
    command.env(WITHOUT_BACKPORTS, "1");
    // If both attempts fail, the first one's reason is the better one.
    run_logged(&mut command, &cache.log("root-without-backports"), progress).map_err(|_| error)
}

fn mmdebstrap(
    recipe: &Path,
    partial: &Path,
    suite: &str,
    packages: &str,
    sources: Option<&Path>,
) -> Command {
    let mut command = Command::new("mmdebstrap");
    if !rustix::process::geteuid().is_root() {
        command.arg("--mode=unshare");
    }
    command
        .args(["--variant=minbase", "--format=directory"])
        .arg(format!("--include={packages}"))
        .arg(format!(
            "--setup-hook={} \"$1\"",
            shell_quoted(&recipe.join("setup-hook").to_string_lossy())
        ));
    for path in EXCLUDED {
        command.arg(format!("--dpkgopt=path-exclude={path}"));
    }
    command.arg(format!("--aptopt={DOWNLOAD_RETRIES}"));
    for option in apt::shared_options() {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(suite).arg(partial.join("tree"));
    command.args(sources);
    // The stock kernel boots with the lab's own initramfs.
    command.env("INITRD", "No").env_remove(WITHOUT_BACKPORTS);
    command
}

/// Package names of the recipe, comma-separated.
fn package_list(text: &str) -> String {
    text.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(",")
}

/// A word that a POSIX shell reads back unchanged.
fn shell_quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_lists_leave_comments_out() {
        assert_eq!(package_list("# a\n\nb # c\n  d\n"), "b,d");
    }

    #[test]
    fn quoting_survives_quotes() {
        assert_eq!(shell_quoted("a'b c"), r"'a'\''b c'");
    }
}
