//! The crates that `bellhop` is linked from: as an SBOM (CycloneDX 1.5) and as licence texts.
//!
//! This module owns the reading of `cargo metadata` and `Cargo.lock`. `cargo-cyclonedx` would write
//! into each crate's folder, and neither it nor `cargo-about` is worth its build here. This module
//! must not know packages.

use crate::error::{Error, Result};
use crate::files;
use crate::process::{self, output};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The program's crate.
const ROOT: &str = "bellhop";

/// How names of files with licence terms begin, in upper case.
const TERMS: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// The part of `cargo metadata` that is used here.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for the workspace's own crates.
    source: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

#[derive(Debug, Deserialize)]
struct EdgeKind {
    /// `None` for a dependency that is linked; else `dev` or `build`.
    kind: Option<String>,
}

impl Edge {
    fn is_linked(&self) -> bool {
        self.dep_kinds.iter().any(|kind| kind.kind.is_none())
    }
}

/// The root crate and its transitive dependencies.
#[derive(Debug)]
pub(super) struct Dependencies {
    root: Package,
    /// In the order of their references.
    others: Vec<Package>,
    /// From a crate to its direct dependencies, by reference.
    edges: BTreeMap<String, BTreeSet<String>>,
    /// From a crate's reference to the SHA-256 of its file.
    checksums: BTreeMap<String, String>,
}

impl Dependencies {
    /// Queries cargo.
    ///
    /// # Errors
    /// [`Error::Start`] and [`Error::Program`] of cargo; [`Error::File`]; [`Error::Invalid`] for an
    /// answer in another format.
    pub(super) fn read(repository: &Path) -> Result<Self> {
        let metadata = output(
            process::cargo()
                .args(["metadata", "--format-version=1", "--locked"])
                .arg("--filter-platform=x86_64-unknown-linux-gnu")
                .current_dir(repository),
        )?;
        let lock = files::read_text(&repository.join("Cargo.lock"))?;
        Self::parse(&metadata, &lock)
    }

    fn parse(metadata: &[u8], lock: &str) -> Result<Self> {
        let invalid = |why: String| Error::invalid("the answer of `cargo metadata`", why);
        let metadata: Metadata =
            serde_json::from_slice(metadata).map_err(|error| invalid(error.to_string()))?;
        let Metadata { packages, resolve } = metadata;
        let references: BTreeMap<String, String> = packages
            .iter()
            .map(|package| (package.id.clone(), reference(package)))
            .collect();
        let reference_of = |id: &String| references.get(id).cloned();
        let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for Node { id, deps } in &resolve.nodes {
            let next = deps.iter().filter(|edge| edge.is_linked());
            let next = next.filter_map(|edge| reference_of(&edge.pkg)).collect();
            all.extend(reference_of(id).map(|id| (id, next)));
        }
        let is_root = |package: &Package| package.name == ROOT && package.source.is_none();
        let (root, mut others): (Vec<_>, Vec<_>) = packages.into_iter().partition(is_root);
        let root = root.into_iter().next();
        let root = root.ok_or_else(|| invalid(format!("it has no crate {ROOT}")))?;
        let mut edges = BTreeMap::new();
        let mut pending = vec![reference(&root)];
        while let Some(from) = pending.pop() {
            if let Some(next) = all.remove(&from) {
                pending.extend(next.iter().cloned());
                edges.insert(from, next);
            }
        }
        others.retain(|package| edges.contains_key(&reference(package)));
        others.sort_by_key(reference);
        Ok(Self {
            root,
            others,
            edges,
            checksums: checksums(lock),
        })
    }

    /// The SBOM, the same for the same `Cargo.lock`.
    pub(super) fn sbom(&self) -> String {
        let components: Vec<Value> = self
            .others
            .iter()
            .map(|package| self.component(package, "library"))
            .collect();
        let edges: Vec<Value> = self
            .edges
            .iter()
            .map(|(from, next)| json!({ "ref": from, "dependsOn": next }))
            .collect();
        let sbom = json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": { "component": self.component(&self.root, "application") },
            "components": components,
            "dependencies": edges,
        });
        format!("{sbom:#}\n")
    }

    fn component(&self, package: &Package, kind: &str) -> Value {
        let Package { name, version, .. } = package;
        let mut component = json!({
            "type": kind,
            "bom-ref": reference(package),
            "name": name,
            "version": version,
        });
        if let Some(license) = &package.license {
            // An old spelling of OR.
            let expression = license.replace('/', " OR ");
            component["licenses"] = json!([{ "expression": expression }]);
        }
        if package.source.is_some() {
            component["purl"] = json!(format!("pkg:cargo/{name}@{version}"));
        }
        if let Some(hash) = self.checksums.get(&reference(package)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
        }
        component
    }

    /// The licence terms of the crates outside the workspace, each text once.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(super) fn licences(&self) -> Result<String> {
        let mut texts = BTreeMap::<String, BTreeSet<String>>::new();
        let mut all = String::new();
        for package in self.others.iter().filter(|one| one.source.is_some()) {
            let name = format!("{} {}", package.name, package.version);
            let license = package.license.as_deref().unwrap_or("see below");
            let _ = writeln!(all, "{name}: {license}");
            let folder = package.manifest_path.parent().unwrap_or(Path::new("/"));
            for path in files::list(folder)? {
                if path.is_file() && has_terms(&path) {
                    let text = String::from_utf8_lossy(&files::read(&path)?).into_owned();
                    texts.entry(text).or_default().insert(name.clone());
                }
            }
        }
        for (text, names) in texts {
            let names: Vec<String> = names.into_iter().collect();
            let _ = write!(
                all,
                "\n{:-<72}\n{}:\n\n{}\n",
                "",
                names.join(", "),
                text.trim_end()
            );
        }
        Ok(all)
    }
}

/// A crate's name within the SBOM. Cargo's IDs contain paths of this machine.
fn reference(package: &Package) -> String {
    format!("{}@{}", package.name, package.version)
}

fn has_terms(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_uppercase();
    TERMS.iter().any(|terms| name.starts_with(terms))
}

/// The checksums in a `Cargo.lock`. Crates of the workspace have none.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let field = |package: &str, name: &str| {
        let mut lines = package.lines();
        lines.find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix(" = \"")?;
            Some(value.strip_suffix('"')?.to_owned())
        })
    };
    lock.split("[[package]]")
        .filter_map(|package| {
            let (name, version) = (field(package, "name")?, field(package, "version")?);
            Some((format!("{name}@{version}"), field(package, "checksum")?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_linked_crates_are_named_with_their_checksums() {
        let package = |name: &str, source: Value| {
            json!({
                "id": format!("path+file:///somewhere#{name}"), "name": name, "version": "1.0.0",
                "license": "MIT/Apache-2.0", "source": source,
                "manifest_path": "/nowhere/Cargo.toml",
            })
        };
        let edge = |name: &str, kind: Value| {
            let id = format!("path+file:///somewhere#{name}");
            json!({ "pkg": id, "dep_kinds": [{ "kind": kind, "target": null }] })
        };
        let node = |name: &str, deps: Value| {
            let id = format!("path+file:///somewhere#{name}");
            json!({ "id": id, "deps": deps })
        };
        let registry = json!("registry+https://example.org");
        let metadata = json!({
            "packages": [
                package("z", registry.clone()), package("a", registry.clone()),
                package("bellhop", Value::Null), package("tested", registry.clone()),
                package("builder", registry),
            ],
            "resolve": { "nodes": [
                node("bellhop", json!([
                    edge("z", Value::Null), edge("tested", json!("dev")),
                    edge("builder", json!("build")),
                ])),
                node("z", json!([edge("a", Value::Null)])),
                node("a", json!([])),
            ] },
        });
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\
                    source = \"x\"\nchecksum = \"abc\"\n\n[[package]]\nname = \"bellhop\"\n\
                    version = \"1.0.0\"\n";
        let read = Dependencies::parse(metadata.to_string().as_bytes(), lock).unwrap();
        let sbom: Value = serde_json::from_str(&read.sbom()).unwrap();
        let names: Vec<&Value> = sbom["components"].as_array().unwrap().iter().collect();
        assert_eq!(names.len(), 2, "{sbom:#}");
        let a = names[0];
        assert_eq!(
            (&a["name"], &a["purl"]),
            (&json!("a"), &json!("pkg:cargo/a@1.0.0"))
        );
        assert_eq!(a["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(a["hashes"][0]["content"], "abc");
        let root = &sbom["metadata"]["component"];
        assert_eq!(
            (&root["name"], &root["purl"]),
            (&json!("bellhop"), &Value::Null)
        );
        // The SBOM must not contain paths of the build machine.
        assert!(!sbom.to_string().contains("somewhere"), "{sbom:#}");
        assert_eq!(
            sbom["dependencies"][1],
            json!({ "ref": "bellhop@1.0.0", "dependsOn": ["z@1.0.0"] })
        );
        assert!(Dependencies::parse(b"{}", lock).is_err());
    }

    #[test]
    fn each_crate_of_bellhop_has_a_checksum_and_terms() {
        let repository = crate::setup::repository().unwrap();
        let read = Dependencies::read(&repository).unwrap();
        let sbom: Value = serde_json::from_str(&read.sbom()).unwrap();
        let components = sbom["components"].as_array().unwrap();
        assert!(components.iter().any(|one| one["name"] == "vmm"));
        assert!(components.iter().any(|one| one["name"] == "redb"));
        // Only tests depend on it.
        assert!(components.iter().all(|one| one["name"] != "proptest"));
        for one in components {
            assert!(one["licenses"][0]["expression"].is_string(), "{one}");
            assert_eq!(one["purl"].is_string(), one["hashes"].is_array(), "{one}");
        }
        let licences = read.licences().unwrap();
        assert!(licences.contains("redb ") && licences.contains("Permission is hereby granted"));
    }
}
