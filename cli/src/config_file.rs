//! Reads a configuration from a TOML, JSON or YAML file, or from standard input.
//!
//! Owns file formats and their limits.

use std::fmt::Display;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use bellhop_common::error::Error;
use serde::de::DeserializeOwned;

/// The maximum file size in bytes, far above any configuration. It protects against reading a
/// device file or a disk image into memory by mistake.
const MAX_BYTES: u64 = 1 << 20;

/// The format of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    Toml,
    Json,
    Yaml,
}

impl Syntax {
    /// The format by a file's extension; by its text if there is none, as for standard input.
    fn of(path: &Path, text: &str) -> Self {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension {
            Some("toml") => Self::Toml,
            Some("json") => Self::Json,
            Some("yaml" | "yml") => Self::Yaml,
            _ => Self::of_text(text),
        }
    }

    /// The format by the first line with a value: `{`, `key = …`, `[table]` or `key: …`.
    fn of_text(text: &str) -> Self {
        if text.trim_start().starts_with('{') {
            return Self::Json;
        }
        let mut lines = text.lines().map(str::trim);
        let first = lines.find(|line| !(line.is_empty() || line.starts_with(['#', '-', '%'])));
        match first
            .unwrap_or_default()
            .chars()
            .find(|c| "[=:".contains(*c))
        {
            Some(':') => Self::Yaml,
            _ => Self::Toml,
        }
    }

    fn parse<T: DeserializeOwned>(
        self,
        text: &str,
    ) -> Result<T, Box<dyn std::error::Error + Send + Sync>> {
        Ok(match self {
            Self::Toml => toml::from_str(text)?,
            Self::Json => serde_json::from_str(text)?,
            Self::Yaml => {
                // Otherwise `off` would be a boolean, and errors would have several lines.
                let options = serde_saphyr::options! {
                    strict_booleans: true,
                    with_snippet: false,
                };
                serde_saphyr::from_str_with_options(text, options)?
            }
        })
    }
}

/// Reads `path`, whose extension determines the format. `-` is standard input.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let unread = || format!("cannot read the configuration file {}", path.display());
    let mut text = String::new();
    let source: io::Result<Box<dyn Read>> = if path == Path::new("-") {
        Ok(Box::new(io::stdin()))
    } else {
        fs::File::open(path).map(|file| Box::new(file) as Box<dyn Read>)
    };
    source
        .and_then(|source| source.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(Error::context(unread()))?;
    if u64::try_from(text.len()).is_ok_and(|len| len > MAX_BYTES) {
        return Err(bad(path, "is larger than 1 MiB"));
    }
    let parsed = Syntax::of(path, &text).parse(&text);
    parsed.map_err(|source| wrong(path).because(source))
}

/// The values of a file are wrong.
pub(crate) fn wrong(path: &Path) -> Error {
    bad(path, "is wrong")
}

fn bad(path: &Path, problem: impl Display) -> Error {
    let path = path.display();
    Error::invalid_input(format!("the configuration file {path} {problem}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    #[test]
    fn each_format_has_the_same_values() {
        let wanted = json!({"kernel": "/k", "cpus": 2, "ring_watch": "off", "memory": "512M",
            "nics": [{"id": "a", "mac": "52:54:00:12:34:56", "stall_kick": true}]});
        let toml = "# A VM.\nkernel = '/k'\ncpus = 2\nring_watch = 'off'\nmemory = '512M'\n\
                    [[nics]]\nid = 'a'\nmac = '52:54:00:12:34:56'\nstall_kick = true\n";
        let yaml = "---\nkernel: /k\ncpus: 2\nring_watch: off\nmemory: 512M\nnics:\n\
                    - id: a\n  mac: 52:54:00:12:34:56\n  stall_kick: true\n";
        let json = wanted.to_string();
        for (text, syntax) in [
            (toml, Syntax::Toml),
            (yaml, Syntax::Yaml),
            (json.as_str(), Syntax::Json),
        ] {
            assert_eq!(Syntax::of(Path::new("-"), text), syntax);
            assert_eq!(syntax.parse::<Value>(text).unwrap(), wanted);
        }
    }

    #[test]
    fn a_format_is_known_by_its_name_or_its_first_line() {
        for (path, text, syntax) in [
            ("a.toml", "{", Syntax::Toml),
            ("a.yml", "a = 1", Syntax::Yaml),
            ("a.json", "a: 1", Syntax::Json),
            ("/dev/fd/63", "\n# a: b\na = 'b:c'", Syntax::Toml),
            ("-", "[labels]\na = 'b'", Syntax::Toml),
            ("-", "  {\"a\": 1}", Syntax::Json),
            ("-", "memory: {size: 1G}", Syntax::Yaml),
            ("-", "memory = {size = '1G'}", Syntax::Toml),
            ("-", "", Syntax::Toml),
            ("-", "ж", Syntax::Toml),
        ] {
            assert_eq!(Syntax::of(Path::new(path), text), syntax, "{path} {text}");
        }
    }

    #[test]
    fn hostile_texts_are_refused() {
        let aliases = "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n".to_owned()
            + &(0..20)
                .map(|level| {
                    let (from, to) = if level % 2 == 0 {
                        ("b", "c")
                    } else {
                        ("c", "b")
                    };
                    format!(
                        "k{level}: &{to} [{}]\n",
                        vec![format!("*{from}"); 9].join(", ")
                    )
                })
                .collect::<String>();
        let deep = format!("a: {}", "[".repeat(100_000));
        for (syntax, text) in [
            (Syntax::Yaml, aliases.as_str()),
            (Syntax::Yaml, deep.as_str()),
            (Syntax::Yaml, "a: 1\na: 2"),
            (Syntax::Yaml, "- a"),
            (Syntax::Yaml, "a: *b"),
            (Syntax::Toml, deep.as_str()),
            (Syntax::Toml, "kernel = "),
            (Syntax::Json, "[]"),
        ] {
            let parsed = syntax.parse::<Map<String, Value>>(text);
            assert!(parsed.is_err(), "{syntax:?} {text:.40}");
        }
    }
}
