//! `cargo lab package`: a deb and a tarball of `bellhop`, with SBOM, licences and checksums.
//!
//! This module owns the build of the program and of the documents. The recipe
//! `images/package/build` lays out the packages; a test in the lab host calls the recipe alone
//! (`api_package`).

use crate::cache::Cache;
use crate::error::Result;
use crate::files;
use crate::process::run_logged;
use crate::progress::Progress;
use crate::setup::{self, binaries};
use std::path::PathBuf;
use std::process::Command;

mod dependencies;

use dependencies::Dependencies;

/// The workspace's version, which `bellhop` shares.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Arguments of `cargo lab package`.
#[derive(Debug, clap::Args)]
pub struct PackageArguments {
    /// The Cargo profile that builds the program
    #[arg(long, value_name = "PROFILE", default_value = "dist")]
    profile: String,
    /// The directory for the packages [default: target/package]
    #[arg(long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,
}

/// Builds the packages and prints the directory that holds them.
///
/// # Errors
/// Those of [`binaries::bellhop`] and of `Dependencies::read`; [`crate::Error::Program`] with the
/// last lines of the recipe.
pub fn package(arguments: &PackageArguments) -> Result<u8> {
    let repository = setup::repository()?;
    let bellhop = binaries::bellhop(&repository, &arguments.profile)?;
    let default = || repository.join("target/package");
    let output = arguments.output.clone().unwrap_or_else(default);
    let documents = output.join("documents");
    files::create_directory(&documents)?;
    let dependencies = Dependencies::read(&repository)?;
    files::write(&documents.join("bellhop.cdx.json"), dependencies.sbom())?;
    files::write(
        &documents.join("licences.third-party"),
        dependencies.licences()?,
    )?;
    let progress = Progress::start("packages");
    let mut build = Command::new(repository.join("images/package/build"));
    build
        .args([&bellhop, &PathBuf::from(VERSION), &output])
        .arg("xz")
        .arg(&documents);
    run_logged(&mut build, &Cache::open()?.log("package"), &progress)?;
    drop(progress);
    println!("{}", output.display());
    Ok(0)
}
