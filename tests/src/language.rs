//! The lint of the repository's language: long lines, words to avoid and long sentences.
//!
//! ```text
//!   *.rs *.c *.h ─▶ source: comments, strings, names ─┐
//!   *.md, documentation ──────────────▶ prose: words, ─┼─▶ findings ─▶ tests/language
//!   *.toml, units ────────────────────▶    sentences  ─┘
//! ```
//! The file `tests/language` has the words to avoid, and the number of findings of each folder and
//! rule. More findings fail, fewer too: the numbers only fall. This module knows no grammar but
//! that of a sentence's end.

mod prose;
mod source;

use prose::{Line, Word};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The table, relative to the repository's root.
const TABLE: &str = "tests/language";

/// Columns of a line, and words of a sentence.
const COLUMNS: usize = 100;
const WORDS: usize = 25;

/// Sets the table's numbers to those found, where they are lower.
const LOWER: &str = "BELLHOP_LOWER_LANGUAGE";

/// What a passage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Documentation, which is Markdown.
    Doc,
    Comment,
    /// A string, or a whole file.
    Text,
    /// The name of a function.
    Name,
}

/// Lines that belong together.
#[derive(Debug)]
struct Passage {
    kind: Kind,
    lines: Vec<Line>,
}

impl Passage {
    fn ends_on(&self, line: usize) -> bool {
        self.lines.last().is_some_and(|(last, _)| *last == line)
    }
}

/// A place that breaks a rule.
#[derive(Debug, PartialEq)]
struct Finding {
    rule: &'static str,
    line: usize,
    text: String,
}

/// All findings in one file.
fn findings(name: &str, text: &str, avoid: &[&str]) -> Vec<Finding> {
    let markdown = name.ends_with(".md");
    let passages = match name.rsplit('.').next() {
        Some("rs" | "c" | "h") => source::passages(text),
        _ => vec![Passage {
            kind: if markdown { Kind::Doc } else { Kind::Text },
            lines: (1..).zip(text.lines().map(str::to_owned)).collect(),
        }],
    };
    let mut found = long_lines(text, markdown);
    for passage in passages {
        let prose = passage.kind == Kind::Doc;
        let blocks = if prose {
            prose::blocks(&passage.lines)
        } else {
            vec![passage.lines]
        };
        for words in blocks.iter().map(|block| prose::words(block)) {
            for phrase in avoid {
                let lines = prose::occurrences(&words, phrase).into_iter();
                let text = |line| Finding {
                    rule: "word",
                    line,
                    text: format!("\"{phrase}\""),
                };
                found.extend(lines.map(text));
            }
            if prose {
                found.extend(prose::sentences(&words).filter_map(long_sentence));
            }
        }
    }
    found
}

/// Exempt are parts of Markdown that cannot be broken: tables, code, and lines with a long link.
fn long_lines(text: &str, markdown: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (line, text) in (1..).zip(text.lines()) {
        let trimmed = text.trim_start();
        fenced ^= markdown && prose::is_fence(trimmed);
        let link = |word: &str| word.contains("://") && word.len() > COLUMNS / 2;
        let exempt = fenced || trimmed.starts_with('|') || text.split(' ').any(link);
        let columns = text.chars().count();
        if columns > COLUMNS && !(markdown && exempt) {
            let text = format!("{columns} columns");
            found.push(Finding {
                rule: "line",
                line,
                text,
            });
        }
    }
    found
}

fn long_sentence(words: &[Word]) -> Option<Finding> {
    let first = words.first().filter(|_| words.len() > WORDS)?;
    let text = format!("{} words after \"{}\"", words.len(), first.text);
    Some(Finding {
        rule: "sentence",
        line: first.line,
        text,
    })
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The repository's files with one of `endings`, as paths relative to its root, sorted. Hidden
/// directories and cargo's output hold none.
pub(crate) fn files(endings: &[&str]) -> Vec<String> {
    fn visit(directory: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().unwrap().is_file() {
                files.push(entry.path());
            } else if entry.file_type().unwrap().is_dir()
                && name != "target"
                && !name.starts_with('.')
            {
                visit(&entry.path(), files);
            }
        }
    }
    let (root, mut found) = (root(), Vec::new());
    visit(&root, &mut found);
    let found = found
        .iter()
        .map(|path| path.strip_prefix(&root).unwrap().to_string_lossy());
    let wanted = |path: &str| endings.iter().any(|ending| path.ends_with(ending));
    let mut found: Vec<_> = found
        .filter(|path| wanted(path))
        .map(String::from)
        .collect();
    found.sort();
    found
}

/// A row of the table: folder, rule and number. Others are phrases to avoid, or comments.
fn row(line: &str) -> Option<(&str, &str, usize)> {
    let mut words = line.split(' ');
    let row = (words.next()?, words.next()?, words.next()?.parse().ok()?);
    words.next().is_none().then_some(row)
}

#[test]
fn findings_only_fall() {
    let table = fs::read_to_string(root().join(TABLE)).unwrap();
    let avoid = table.lines().filter_map(|line| line.strip_prefix("avoid "));
    let avoid: Vec<_> = avoid.collect();
    assert!(!avoid.is_empty(), "{TABLE} has no phrases");
    let mut found: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for (folder, rule, _) in table.lines().filter_map(row) {
        found.insert((folder.to_owned(), rule.to_owned()), Vec::new());
    }
    for path in files(&[".rs", ".c", ".h", ".md", ".toml", ".service", ".conf"]) {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let generated = |first: &str| first.contains("Generated from");
        if text.lines().next().is_some_and(generated) {
            continue;
        }
        let folder = path.split_once('/').map_or(".", |(folder, _)| folder);
        for Finding { rule, line, text } in findings(&path, &text, &avoid) {
            let places = found.entry((folder.to_owned(), rule.to_owned()));
            let places = places.or_default();
            places.push(format!("{path}:{line}: {text}"));
        }
    }
    let lowers = std::env::var_os(LOWER).is_some();
    let mut wrong = Vec::new();
    for ((folder, rule), places) in &found {
        let mut rows = table.lines().filter_map(row);
        let allowed = rows.find(|row| (row.0, row.1) == (folder.as_str(), rule.as_str()));
        let allowed = allowed.map_or(0, |(_, _, number)| number);
        let number = places.len();
        if number > allowed {
            let places = places.join("\n");
            wrong.push(format!(
                "{folder} {rule}: {number} findings, and {TABLE} allows {allowed}. Correct the \
                 new ones among:\n{places}"
            ));
        } else if number < allowed && !lowers {
            wrong.push(format!(
                "{folder} {rule}: {number} findings; lower the number {allowed} in {TABLE} \
                 ({LOWER}=1 writes it)"
            ));
        }
    }
    if lowers {
        let lowered = table.lines().filter_map(|line| match row(line) {
            Some((folder, rule, allowed)) => {
                let places = &found[&(folder.to_owned(), rule.to_owned())];
                let number = places.len().min(allowed);
                (number > 0).then(|| format!("{folder} {rule} {number}\n"))
            }
            None => Some(format!("{line}\n")),
        });
        fs::write(root().join(TABLE), lowered.collect::<String>()).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_rule_finds_its_place() {
    let seen = |name: &str, text: &str| -> Vec<(&'static str, usize)> {
        let found = findings(name, text, &["two three"]);
        found.iter().map(|one| (one.rule, one.line)).collect()
    };
    let (line, sentence) = ("x".repeat(COLUMNS + 1), "x ".repeat(WORDS + 1));
    let rust =
        format!("// {line}\n/// A.\n/// {sentence}.\nfn two_three() {{ \"two\n three\" }}\n");
    assert_eq!(
        seen("a.rs", &rust),
        [("line", 1), ("sentence", 3), ("word", 4), ("word", 4)]
    );
    let markdown = format!("{line}\n\n| {line} |\n```\n{line}\n```\nhttps://{line} `two three`\n");
    assert_eq!(seen("a.md", &markdown), [("line", 1)]);
    assert_eq!(seen("a.toml", "# two\nthree"), [("word", 1)]);
    // Comments and strings may be longer than 25 words.
    assert!(seen("a.c", &format!("/* {sentence} */\n\"{sentence}\"")).is_empty());
}
