//! The packages that a test installs in the lab host: the lab's build of `bellhop` by the recipe of
//! releases.

use lab::files;
use lab::process::output;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The packages that the test installs. Dropping it purges them, also after a failure.
pub(crate) struct Packages {
    pub(crate) directory: PathBuf,
}

impl Packages {
    /// Builds version 1, and version 2 with the same files.
    pub(crate) fn build() -> Self {
        let name = format!("lab-package-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        files::create_directory(&directory).unwrap();
        let packages = Self { directory };
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/package/build");
        let bellhop = std::env::var_os("BELLHOP").unwrap();
        let mut build = Command::new(recipe);
        build.arg(bellhop).arg("1").arg(&packages.directory);
        output(build.arg("none")).unwrap();
        let again = "dpkg-deb --raw-extract \"$1\" \"$2\" &&
            sed -i 's/^Version: 1$/Version: 2/' \"$2/DEBIAN/control\" &&
            dpkg-deb -Znone --build \"$2\" \"$3\"";
        let mut build = Command::new("sh");
        build.args(["-c", again, "sh"]).arg(packages.file("1"));
        build.arg(packages.directory.join("tree"));
        output(build.arg(packages.file("2"))).unwrap();
        packages
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn file(&self, version: &str) -> String {
        let path = self.path(&format!("bellhop_{version}_amd64.deb"));
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Packages {
    fn drop(&mut self) {
        // systemd is gone by now, and with it all processes of the package.
        let _ = dpkg(&["--purge", "bellhop"]).stderr(Stdio::null()).status();
        let _ = fs::remove_dir_all(&self.directory);
        let mut delete = Command::new("vdpa");
        delete.args(["dev", "del", "web.net0"]);
        let _ = delete.stderr(Stdio::null()).status();
    }
}

/// The lab host's disk is memory.
pub(crate) const DPKG: [&str; 2] = ["dpkg", "--force-unsafe-io"];

fn dpkg(words: &[&str]) -> Command {
    let mut command = Command::new(DPKG[0]);
    command.arg(DPKG[1]).args(words);
    command
}
