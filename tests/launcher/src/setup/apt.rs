//! Reads the machine's own apt configuration: the mirror and the proxy. The repository names no
//! mirror.
//!
//! This module owns the parsing of apt's two source formats (sources.list(5)): one-line `deb
//! [options] URI suite component…` and deb822 stanzas. It skips everything that it does not
//! understand; the archive tool's own default then applies.

use std::path::{Path, PathBuf};
use std::process::Command;

/// One binary source: where, and which suites.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    uri: String,
    suites: Vec<String>,
}

/// Options of apt that the new root's installation shares with the machine.
const SHARED_OPTIONS: [&str; 4] = [
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
];

/// A sources.list for `suite` from the mirrors that this machine uses, or
/// `None` where it is not Debian or its sources are not understood.
pub fn sources_list(suite: &str) -> Option<String> {
    let release = std::fs::read_to_string("/etc/os-release").ok()?;
    let codename = debian_codename(&release)?;
    let mut sources = Vec::new();
    for file in source_files() {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        if file.extension().is_some_and(|kind| kind == "sources") {
            sources.extend(parse_deb822(&text));
        } else {
            sources.extend(parse_lines(&text));
        }
    }
    list_for(suite, &codename, &sources)
}

/// The machine's settings for `SHARED_OPTIONS`, as apt configuration lines.
pub fn shared_options() -> Vec<String> {
    let Ok(output) = Command::new("apt-config").arg("dump").output() else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| {
            line.split_once(' ').is_some_and(|(name, value)| {
                value != "\"\";"
                    && SHARED_OPTIONS
                        .iter()
                        .any(|option| option.eq_ignore_ascii_case(name))
            })
        })
        .map(|line| line.trim_end_matches(';').to_owned())
        .collect()
}

fn source_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    files.extend(
        crate::files::list(Path::new("/etc/apt/sources.list.d"))
            .unwrap_or_default()
            .into_iter()
            .filter(|path| {
                path.extension()
                    .is_some_and(|kind| kind == "list" || kind == "sources")
            }),
    );
    files
}

/// `VERSION_CODENAME` of an os-release(5) text, if it is Debian's own.
fn debian_codename(os_release: &str) -> Option<String> {
    let value = |key: &str| {
        os_release
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches('"').to_owned())
    };
    (value("ID")? == "debian").then(|| value("VERSION_CODENAME"))?
}

fn list_for(suite: &str, codename: &str, sources: &[Source]) -> Option<String> {
    let uri_of = |wanted: &str| {
        sources
            .iter()
            .find(|source| source.suites.iter().any(|suite| suite == wanted))
            .map(|source| source.uri.as_str())
    };
    let archive = uri_of(codename)?;
    let mut list = format!("deb {archive} {suite} main\ndeb {archive} {suite}-updates main\n");
    if let Some(security) = uri_of(&format!("{codename}-security")) {
        list.push_str(&format!("deb {security} {suite}-security main\n"));
    }
    Some(list)
}

fn parse_lines(text: &str) -> Vec<Source> {
    text.lines()
        .filter_map(|line| {
            let rest = line.trim().strip_prefix("deb ")?.trim_start();
            let rest = match rest.strip_prefix('[') {
                Some(options) => options.split_once(']')?.1,
                None => rest,
            };
            let mut words = rest.split_whitespace();
            Some(Source {
                uri: words.next()?.to_owned(),
                suites: vec![words.next()?.to_owned()],
            })
        })
        .collect()
}

fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut stanza: Vec<(String, String)> = Vec::new();
    // An empty line after the last stanza ends it like the others.
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            sources.extend(source_of(&stanza));
            stanza.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = stanza.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((key, value)) = line.split_once(':') {
            stanza.push((key.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    sources
}

fn source_of(stanza: &[(String, String)]) -> Option<Source> {
    let value = |key: &str| {
        stanza
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    };
    if value("enabled").is_some_and(|enabled| enabled.eq_ignore_ascii_case("no"))
        || !value("types")?.split_whitespace().any(|kind| kind == "deb")
    {
        return None;
    }
    Some(Source {
        uri: value("uris")?.split_whitespace().next()?.to_owned(),
        suites: value("suites")?
            .split_whitespace()
            .map(str::to_owned)
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_give_the_same_list() {
        let lines = parse_lines(
            "# comment\ndeb-src file:/m/debian old main\n\
             deb [arch=amd64 signed-by=/k] file:/m/debian old main contrib\n\
             deb file:/m/security old-security main\n",
        );
        let stanzas = parse_deb822(
            "Types: deb deb-src\n# comment\nURIs: file:/m/debian\nSuites: old\n old-updates\n\n\
             Enabled: no\nTypes: deb\nURIs: file:/other\nSuites: old-security\n\n\
             Types: deb\nURIs: file:/m/security\nSuites: old-security",
        );
        let expected = "deb file:/m/debian new main\ndeb file:/m/debian new-updates main\n\
                        deb file:/m/security new-security main\n";
        assert_eq!(list_for("new", "old", &lines).as_deref(), Some(expected));
        assert_eq!(list_for("new", "old", &stanzas).as_deref(), Some(expected));
    }

    #[test]
    fn odd_input_is_skipped() {
        assert!(parse_lines("deb\ndeb [x\ndeb one\n\u{0}").is_empty());
        assert!(parse_deb822("URIs\n value\n:\nTypes: deb\n").is_empty());
        assert_eq!(list_for("new", "old", &[]), None);
        assert_eq!(debian_codename("ID=ubuntu\nVERSION_CODENAME=x\n"), None);
        assert_eq!(
            debian_codename("ID=debian\nVERSION_CODENAME=\"x\"\n").as_deref(),
            Some("x")
        );
    }
}
