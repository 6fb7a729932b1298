//! Compares numbers and layouts with the headers of the lab's own kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use lab::sim::require_lab;
use vdpa::uapi::layout::{c_probe, compare};

/// The uapi headers of the running kernel, or of the distribution.
fn headers() -> Vec<PathBuf> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let build = Path::new("/lib/modules").join(release.trim()).join("build");
    // Debian keeps the architecture-independent part in its own package.
    let common = std::fs::canonicalize(&build).ok().and_then(|build| {
        let name = build.file_name()?.to_str()?.replace("amd64", "common");
        Some(build.with_file_name(name))
    });
    [Some(PathBuf::from("/usr")), common]
        .into_iter()
        .flatten()
        .map(|root| root.join("include/uapi"))
        .chain([PathBuf::from("/usr/include")])
        .filter(|include| include.join("linux/vhost.h").exists())
        .collect()
}

/// Builds and runs the probe with the two headers from `include`.
fn probe(include: &Path) -> String {
    let directory = std::env::temp_dir().join(format!("lab-uapi-{}", std::process::id()));
    let copies = directory.join("linux");
    std::fs::create_dir_all(&copies).unwrap();
    for header in ["vhost.h", "vhost_types.h"] {
        // Only these: the rest of a kernel's tree is not for userspace programs.
        std::fs::copy(include.join("linux").join(header), copies.join(header)).unwrap();
    }
    // Replaces what `make headers` would have removed.
    std::fs::write(copies.join("compiler.h"), "").unwrap();
    let (source, program) = (directory.join("probe.c"), directory.join("probe"));
    std::fs::write(&source, c_probe()).unwrap();
    let compiled = Command::new("gcc")
        .args(["-D__user=", "-I"])
        .arg(&directory)
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(compiled.success(), "the probe does not compile");
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_number_and_layout_is_that_of_the_kernels_headers() {
    require_lab().unwrap();
    let headers = headers();
    assert!(!headers.is_empty(), "no kernel headers");
    for include in headers {
        let compared = compare(&probe(&include));
        assert_eq!(compared, Ok(vec![]), "{}", include.display());
    }
}
