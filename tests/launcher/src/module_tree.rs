//! Load order of kernel modules, from the kernel's own `modules.dep`.
//!
//! Format (modules.dep(5)): `path: dependency…`, paths relative to the release directory. A
//! module's dependencies are listed so that the last one must be loaded first.

use crate::error::{Error, Result};
use crate::files;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The modules of one kernel release.
#[derive(Debug)]
pub struct ModuleTree {
    directory: PathBuf,
    /// By name with underscores: its path and its dependencies' paths.
    modules: HashMap<String, (String, Vec<String>)>,
    built_in: Vec<String>,
}

impl ModuleTree {
    /// Reads the tables of a release directory (`…/lib/modules/RELEASE`).
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn read(directory: &Path) -> Result<Self> {
        let table = files::read_text(&directory.join("modules.dep"))?;
        let built_in = files::read_text(&directory.join("modules.builtin"))?;
        Ok(Self {
            directory: directory.to_path_buf(),
            modules: parse(&table),
            built_in: built_in.lines().map(module_name).collect(),
        })
    }

    /// Files of the wanted modules and of all their dependencies, each once, in an order in which
    /// they can be loaded. Built-in modules are left out.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a module that the kernel does not have.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<PathBuf>> {
        let mut order: Vec<&str> = Vec::new();
        for &name in wanted {
            let name = name.replace('-', "_");
            let Some((path, dependencies)) = self.modules.get(&name) else {
                if self.built_in.contains(&name) {
                    continue;
                }
                return Err(Error::invalid(
                    format!("kernel module {name}"),
                    format!("{} has no such module", self.directory.display()),
                ));
            };
            for path in dependencies.iter().rev().chain([path]) {
                if !order.contains(&path.as_str()) {
                    order.push(path);
                }
            }
        }
        Ok(order
            .into_iter()
            .map(|path| self.directory.join(path))
            .collect())
    }
}

/// A module's name from its path: no directory, no suffix, underscores.
pub fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko")
        .next()
        .unwrap_or(file)
        .trim()
        .replace('-', "_")
}

fn parse(table: &str) -> HashMap<String, (String, Vec<String>)> {
    table
        .lines()
        .filter_map(|line| {
            let (path, dependencies) = line.split_once(':')?;
            let dependencies = dependencies.split_whitespace().map(str::to_owned).collect();
            Some((module_name(path), (path.to_owned(), dependencies)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_come_first_and_once() {
        let tree = ModuleTree {
            directory: PathBuf::from("/m"),
            modules: parse("k/a-x.ko.xz: k/b.ko.xz k/c.ko.xz\nk/b.ko.xz: k/c.ko.xz\nk/c.ko.xz:\n"),
            built_in: vec!["d".into()],
        };
        let order = tree.load_order(&["a_x", "b", "d"]).unwrap();
        assert_eq!(
            order,
            ["/m/k/c.ko.xz", "/m/k/b.ko.xz", "/m/k/a-x.ko.xz"].map(PathBuf::from)
        );
        assert!(tree.load_order(&["e"]).is_err());
    }
}
