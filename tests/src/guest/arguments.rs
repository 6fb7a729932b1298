//! Bellhop's command line for a guest of the lab.

use crate::error::{Error, Result};
use crate::files;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The command line for Bellhop. Defaults: the lab's small kernel, its ramdisk, 1 processor, 256
/// MiB.
#[derive(Debug, Clone)]
pub struct BellhopArguments {
    program: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    cmdline: String,
    processors: u32,
    memory: String,
    devices: Vec<String>,
    pub(super) silence: Duration,
    pub(super) show: Option<&'static str>,
}

impl BellhopArguments {
    /// Boots the lab's small guest kernel.
    ///
    /// # Errors
    /// [`Error::Missing`] outside the lab.
    pub fn small() -> Result<Self> {
        Self::with("GUEST_KERNEL", "GUEST_INITRAMFS")
    }

    /// Boots Debian's stock kernel.
    ///
    /// # Errors
    /// [`Error::Missing`] outside the lab.
    pub fn stock() -> Result<Self> {
        Self::with("GUEST_KERNEL_STOCK", "GUEST_INITRAMFS_STOCK")
    }

    fn with(kernel: &str, initramfs: &str) -> Result<Self> {
        crate::sim::require_lab()?;
        Ok(Self {
            program: variable("BELLHOP")?,
            kernel: in_memory(&variable(kernel)?)?,
            initramfs: in_memory(&variable(initramfs)?)?,
            // Each character of the serial console costs two exits of an emulated processor:
            // warnings only. A later `loglevel=7` takes precedence.
            cmdline: "console=ttyS0 loglevel=4 panic=-1 lab".into(),
            processors: 1,
            memory: "256M".into(),
            devices: Vec::new(),
            silence: Duration::from_secs(60),
            show: None,
        })
    }

    /// Sets the number of processors.
    pub fn processors(mut self, count: u32) -> Self {
        self.processors = count;
        self
    }

    /// Sets the memory, as the `--memory` flag takes it.
    pub fn memory(mut self, size: &str) -> Self {
        size.clone_into(&mut self.memory);
        self
    }

    /// Uses another VMM that takes the same flags.
    pub fn program(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.program);
        self
    }

    /// Uses another kernel; the ramdisk stays the lab's.
    pub fn kernel(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.kernel);
        self
    }

    /// Appends words to the guest's kernel command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline.push(' ');
        self.cmdline.push_str(words);
        self
    }

    /// Adds a NIC on a vhost-vdpa device.
    pub fn vdpa(self, path: &Path) -> Self {
        self.argument("--vdpa", &format!("path={}", path.display()))
    }

    /// Adds a disk on a raw file.
    pub fn disk(self, path: &Path) -> Self {
        self.argument("--disk", &format!("path={}", path.display()))
    }

    /// Adds any other flag with its value.
    pub fn argument(mut self, flag: &str, value: &str) -> Self {
        self.devices.push(flag.to_owned());
        self.devices.push(value.to_owned());
        self
    }

    /// Prints the console's lines on standard error as they arrive, with a prefix.
    pub fn show(mut self, prefix: &'static str) -> Self {
        self.show = Some(prefix);
        self
    }

    /// Sets how long the console may be silent during boot.
    pub fn silence(mut self, limit: Duration) -> Self {
        self.silence = limit;
        self
    }

    /// The guest's kernel, for other VMMs' command lines.
    pub fn kernel_image(&self) -> &Path {
        &self.kernel
    }

    /// The guest's ramdisk.
    pub fn ramdisk(&self) -> &Path {
        &self.initramfs
    }

    /// Options of `bellhop run --restore`: the snapshot may name the guest's kernel and ramdisk.
    pub fn allow_boot_files(&self) -> [&OsStr; 4] {
        let option = OsStr::new("--allow-path");
        [
            option,
            self.kernel.as_os_str(),
            option,
            self.initramfs.as_os_str(),
        ]
    }

    /// The guest's kernel command line.
    pub fn kernel_words(&self) -> &str {
        &self.cmdline
    }

    /// Runs the program, which must refuse these arguments. Returns its message.
    ///
    /// # Errors
    /// It panics, or ends with another code than 1.
    pub fn refused(&self) -> Result<String> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .output()
            .map_err(Error::system("run bellhop"))?;
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() != Some(1) || message.contains("panicked") {
            let why = format!("it did not refuse: {}, {message}", output.status);
            return Err(Error::invalid("bellhop", why));
        }
        Ok(message)
    }

    /// The command line that starts the VMM.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("run")
            .arg("--kernel")
            .arg(&self.kernel)
            .arg("--initramfs")
            .arg(&self.initramfs)
            .args(["--cmdline", &self.cmdline])
            .args(["--cpus", &self.processors.to_string()])
            .args(["--memory", &self.memory])
            .args(&self.devices);
        command
    }
}

fn variable(name: &str) -> Result<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).ok_or_else(|| {
        Error::missing(
            format!("{name} is not set"),
            "run the test with `cargo lab test`",
        )
    })
}

/// Copies a file to the lab host's /tmp, which is memory. Its other files come from the outside,
/// which costs a second or two at each boot of a guest. Names in the cache have their content's
/// hash, so a copy never goes stale.
fn in_memory(path: &Path) -> Result<PathBuf> {
    if std::env::var_os("BELLHOP_LAB").is_none_or(|lab| lab != "host") {
        return Ok(path.to_path_buf());
    }
    let directory = std::env::temp_dir().join("lab-images");
    files::create_directory(&directory)?;
    let copy = directory.join(path.to_string_lossy().replace('/', "_"));
    if !copy.exists() {
        // A test that was killed must not leave half a kernel behind.
        let partial = directory.join(format!("partial-{}", std::process::id()));
        files::copy(path, &partial)?;
        files::rename(&partial, &copy)?;
    }
    Ok(copy)
}
