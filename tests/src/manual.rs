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

/// The pieces of code in a text, with their lines.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(number, line)| {
        let pieces = line.split('`').skip(1).step_by(2);
        pieces.map(move |piece| (number, piece))
    })
}

/// A page names a source by its path or by the end of it.
#[test]
fn named_sources_exist() {
    let sources = files(&[".rs"]);
    let is_path = |word: &&str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-./".contains(c);
        word.ends_with(".rs") && word.chars().all(plain)
    };
    let mut wrong = Vec::new();
    for page in files(&[".md"]) {
        let text = read(&page);
        for (line, word) in code(&text).filter(|(_, word)| is_path(word)) {
            let end = format!("/{word}");
            let named = |path: &String| path == word || path.ends_with(&end);
            if !sources.iter().any(named) {
                wrong.push(format!("{page}:{line}: {word}"));
            }
        }
    }
    assert!(wrong.is_empty(), "no such source:\n{}", wrong.join("\n"));
}

/// Whether a function of this name has the attribute of a test.
fn is_test(source: &str, name: &str) -> bool {
    let begin = format!("fn {name}(");
    source.match_indices(&begin).any(|(at, _)| {
        // Its attributes and comments, up to the end of another item or to a blank line.
        let above = source.get(..at).unwrap_or_default().rsplit('\n').skip(1);
        let mut above = above
            .map(str::trim)
            .take_while(|line| !line.is_empty() && !line.ends_with(['{', '}', ';']));
        above.any(|line| line == "#[test]" || line.starts_with("#[tokio::test"))
    })
}

#[test]
fn only_functions_with_the_attribute_are_tests() {
    let source = "\
        #[test]\nfn a() {\n}\nfn b() {}\n\
        // c\n    #[test]\n    #[expect(\n        x,\n    )]\n    fn c(\n\
        #[tokio::test]\nasync fn d() {}\n#[test]\n\nfn e() {}";
    let tests = ["a", "b", "c", "d", "e", "f"].map(|name| is_test(source, name));
    assert_eq!(tests, [true, false, true, true, false, false]);
}

/// `FILE` or `FILE::TEST`, with a file of `tests/tests` by its name and others by their path.
#[test]
fn the_tests_that_prove_a_feature_exist() {
    // Kernel modules begin with `vdpa_`, too.
    const AREAS: [&str; 11] = [
        "api_",
        "boot_",
        "hardware_",
        "mgmt_",
        "migration_",
        "rings_",
        "vdpa_backend",
        "vdpa_blk",
        "vdpa_iommu",
        "vdpa_net",
        "vdpa_swnic",
    ];
    let sources = files(&[".rs"]);
    let mut proofs = 0;
    let pages = [
        "docs/compatibility.md",
        "docs/design/untrusted-input.md",
        "docs/threat-model.md",
    ];
    let pages = pages.map(|page| (page, read(page)));
    let words = pages.iter().flat_map(|(page, text)| {
        code(text).map(move |(line, word)| (format!("{page}:{line}: {word}"), word))
    });
    for (place, word) in words {
        let (file, test) = word.split_once("::").unwrap_or((word, ""));
        let of_lab = AREAS.iter().any(|area| file.starts_with(area));
        if !of_lab && !file.contains("/tests/") && (test.is_empty() || !file.contains('/')) {
            continue;
        }
        let file = file.trim_end_matches(".rs").trim_end_matches('/');
        let begins = if of_lab {
            format!("tests/tests/{file}")
        } else {
            file.to_owned()
        };
        let (name, folder) = (format!("{begins}.rs"), format!("{begins}/"));
        let parts = sources.iter();
        let parts = parts.filter(|path| **path == name || path.starts_with(&folder));
        let parts: Vec<_> = parts.map(|path| read(path)).collect();
        assert!(!parts.is_empty(), "{place}: no such file");
        let has = parts.iter().any(|part| is_test(part, test));
        assert!(test.is_empty() || has, "{place}: no such test");
        proofs += 1;
    }
    assert!(proofs > 100, "{proofs}");
}

/// The parts of each quoted error, between the marks `…`, are in a string of the program.
#[test]
fn the_quoted_errors_are_those_of_the_program() {
    let page = read("docs/troubleshooting.md");
    let (_, table) = page.split_once("## Error texts").unwrap();
    // A string may continue on the next line.
    let joined = |path: &String| -> String {
        let text = read(path);
        text.split("\\\n").map(str::trim_start).collect()
    };
    let sources: Vec<_> = files(&[".rs"]).iter().map(joined).collect();
    let quoted = table
        .lines()
        .filter_map(|row| row.strip_prefix("| `")?.split('`').next());
    let parts: Vec<_> = quoted.flat_map(|text| text.split('…')).collect();
    assert!(parts.len() > 10, "{parts:?}");
    for part in parts {
        let found = sources.iter().any(|source| source.contains(part));
        assert!(found, "no error has the text {part:?}");
    }
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
