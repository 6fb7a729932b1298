//! Tests of the repository's documents: links and their anchors, the book's table of contents, and
//! the example of a VM's configuration. `api_package` tests the drop-in for systemd.

use crate::language::{files, root};
use std::collections::BTreeSet;
use std::fs;
use vmm::config::VmConfig;
use vmm::{api, machine, migration};

const SUMMARY: &str = "docs/SUMMARY.md";

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The lines outside blocks of code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    })
}

/// The targets of a text's links within the repository, with their lines.
fn links(text: &str) -> Vec<(usize, &str)> {
    let targets = prose(text).flat_map(|(number, line)| {
        let targets = line.split("](").skip(1);
        targets.map(move |target| (number, target.split(')').next().unwrap_or(target)))
    });
    let here = |target: &str| !target.is_empty() && !target.contains("://");
    targets.filter(|(_, target)| here(target)).collect()
}

/// The anchors of a page's headings, as GitHub and mdBook write them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let titles = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    for title in titles.map(|title| title.trim_start_matches('#').trim()) {
        let letters = title.to_lowercase().replace(' ', "-");
        let anchor = letters.replace(|c: char| !c.is_alphanumeric() && c != '-' && c != '_', "");
        let same = (1..).map(|number| format!("{anchor}-{number}"));
        let mut names = std::iter::once(anchor.clone()).chain(same);
        anchors.extend(names.find(|name| !anchors.contains(name)));
    }
    anchors
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut wrong = Vec::new();
    for page in files(&[".md"]) {
        let text = read(&page);
        for (line, target) in links(&text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => root().join(&page),
                file => root().join(&page).with_file_name("").join(file),
            };
            let has_anchor = || anchors(&fs::read_to_string(&path).unwrap()).contains(anchor);
            if !path.exists() || !(anchor.is_empty() || has_anchor()) {
                wrong.push(format!("{page}:{line}: {target}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "links without a target:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn the_book_has_each_page_once() {
    let text = read(SUMMARY);
    let mut listed: Vec<_> = links(&text).into_iter().map(|(_, page)| page).collect();
    listed.sort_unstable();
    let pages = files(&[".md"]);
    let pages = pages.iter().filter(|page| *page != SUMMARY);
    let pages: Vec<_> = pages
        .filter_map(|page| page.strip_prefix("docs/"))
        .collect();
    assert_eq!(listed, pages, "{SUMMARY}");
}

#[test]
fn links_and_anchors_are_read_as_they_are_shown() {
    let text = "# A `b-c` d, e: f!\n```\n# no\n[no](no)\n```\n## G\n[h](i#j), [`k`](l)\n# G\n[m]()";
    assert_eq!(links(text), [(7, "i#j"), (7, "l")]);
    let anchors: Vec<_> = anchors(text).into_iter().collect();
    assert_eq!(anchors, ["a-b-c-d-e-f", "g", "g-1"]);
    assert!(links("[n](https://example.org)").is_empty());
}

#[test]
fn the_example_of_a_machine_is_a_configuration() {
    let config: VmConfig = toml::from_str(&read("docs/examples/machine.toml")).unwrap();
    assert_eq!(config.cpu_affinity.lists().len(), 4);
    assert_eq!((config.vdpa.len(), config.disks.len()), (1, 1));
}

/// The numbers in the table of `docs/versions.md`.
#[test]
fn the_page_about_versions_has_the_versions_of_the_program() {
    let text = read("docs/versions.md");
    let format = machine::state_versions().remove("format").unwrap();
    for (interface, number) in [
        ("VM API, node API", api::API_LEVEL),
        ("saved state", format),
        ("migration stream", migration::protocol::VERSION),
    ] {
        let begin = format!("| {interface} |");
        let row = text.lines().find(|line| line.starts_with(&begin)).unwrap();
        let today = row.split('|').nth(3).unwrap();
        assert_eq!(today.trim(), number.to_string(), "{interface}");
    }
}
