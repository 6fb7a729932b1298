//! Trees in the form of `tree`.
//!
//! Owns the connecting lines. Texts are not trusted: control characters do not reach a terminal.

use std::ffi::OsString;

use crate::text::printable;

/// A line and its children.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    text: String,
    children: Vec<Node>,
}

impl Node {
    /// A line without children.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            children: Vec::new(),
        }
    }

    /// Appends these children.
    #[must_use]
    pub fn with(mut self, children: impl IntoIterator<Item = Self>) -> Self {
        self.children.extend(children);
        self
    }

    /// The line and all its descendants, one line each.
    #[must_use]
    pub fn draw(&self, lines: Lines) -> String {
        let mut text = String::new();
        self.draw_below(lines, "", "", &mut text);
        text
    }

    /// `first` precedes this line, `rest` precedes every line below it.
    fn draw_below(&self, lines: Lines, first: &str, rest: &str, text: &mut String) {
        text.push_str(first);
        text.push_str(&printable(&self.text));
        text.push('\n');
        let [branch, last, beside, below] = lines.drawn();
        for (index, child) in self.children.iter().enumerate() {
            let is_last = index + 1 == self.children.len();
            let (mark, indent) = if is_last {
                (last, below)
            } else {
                (branch, beside)
            };
            let first = format!("{rest}{mark}");
            child.draw_below(lines, &first, &format!("{rest}{indent}"), text);
        }
    }
}

/// The characters of connecting lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lines {
    /// Box-drawing characters of UTF-8.
    Boxes,
    /// Characters of ASCII.
    Ascii,
}

impl Lines {
    /// The characters of this process's locale.
    #[must_use]
    pub fn of_locale() -> Self {
        // The first that is set and not empty decides (POSIX, 8.2).
        let variables = ["LC_ALL", "LC_CTYPE", "LANG"];
        let set = variables.into_iter().filter_map(std::env::var_os);
        Self::of(set)
    }

    fn of(locales: impl Iterator<Item = OsString>) -> Self {
        let mut locales = locales.filter(|locale| !locale.is_empty());
        let locale = locales.next().unwrap_or_default();
        let locale = locale.to_string_lossy().to_lowercase();
        if locale.contains("utf-8") || locale.contains("utf8") {
            Self::Boxes
        } else {
            Self::Ascii
        }
    }

    /// The text before a child, before the last child, and before the descendants of either.
    fn drawn(self) -> [&'static str; 4] {
        match self {
            Self::Boxes => ["├── ", "└── ", "│   ", "    "],
            Self::Ascii => ["|-- ", "`-- ", "|   ", "    "],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_drawn_as_tree_draws_it() {
        let node = Node::new("a").with([
            Node::new("b").with([Node::new("c").with([Node::new("d")]), Node::new("e")]),
            Node::new("f").with([Node::new("g\x1b[2J\n")]),
        ]);
        let expected = "\
a
├── b
│   ├── c
│   │   └── d
│   └── e
└── f
    └── g?[2J?
";
        assert_eq!(node.draw(Lines::Boxes), expected);
        let ascii = expected
            .replace(['├', '│'], "|")
            .replace('└', "`")
            .replace('─', "-");
        assert_eq!(node.draw(Lines::Ascii), ascii);
    }

    #[test]
    fn the_first_locale_that_is_set_decides() {
        let of = |locales: &[&str]| Lines::of(locales.iter().map(|&locale| locale.into()));
        assert_eq!(of(&["", "de_DE.UTF-8"]), Lines::Boxes);
        assert_eq!(of(&["C.utf8", "C"]), Lines::Boxes);
        assert_eq!(of(&["C", "C.UTF-8"]), Lines::Ascii);
        assert_eq!(of(&[]), Lines::Ascii);
    }
}
