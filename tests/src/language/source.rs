//! Comments, strings and function names of Rust and C sources: a scanner, not a parser.

use super::{Kind, Passage};

/// The passages of a source in their order.
pub(super) fn passages(text: &str) -> Vec<Passage> {
    let mut scanner = Scanner {
        rest: text,
        line: 1,
        after_fn: false,
        found: Vec::new(),
    };
    while let Some(next) = scanner.rest.chars().next() {
        match next {
            '/' if scanner.rest.starts_with("//") => scanner.line_comment(),
            '/' if scanner.rest.starts_with("/*") => scanner.block_comment(),
            '"' => scanner.string(),
            '\'' => scanner.quote(),
            next if in_word(next) => scanner.word(),
            next => scanner.skip(next.len_utf8()),
        }
    }
    scanner.found
}

struct Scanner<'a> {
    rest: &'a str,
    /// The line on which `rest` begins.
    line: usize,
    /// The last word was `fn`.
    after_fn: bool,
    found: Vec<Passage>,
}

impl Scanner<'_> {
    fn skip(&mut self, length: usize) {
        let (skipped, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.line += skipped.matches('\n').count();
        self.rest = rest;
    }

    /// Adds a passage that begins on this line.
    fn add(&mut self, kind: Kind, text: &str) {
        let lines = text.split('\n').map(str::to_owned);
        let lines = (self.line..).zip(lines).collect();
        self.found.push(Passage { kind, lines });
    }

    /// Comments of one kind on adjacent lines are one passage.
    fn line_comment(&mut self) {
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        let text = &self.rest[2..length];
        let (kind, text) = match text.strip_prefix('!').or_else(|| text.strip_prefix('/')) {
            Some(text) if !text.starts_with('/') => (Kind::Doc, text),
            _ => (Kind::Comment, text),
        };
        match self.found.last_mut() {
            Some(last) if last.kind == kind && last.ends_on(self.line - 1) => {
                last.lines.push((self.line, text.to_owned()));
            }
            _ => self.add(kind, text),
        }
        self.skip(length);
    }

    fn block_comment(&mut self) {
        let body = &self.rest[2..];
        let text = body.split("*/").next().unwrap_or(body);
        self.add(Kind::Comment, &text.replace("\n *", "\n"));
        self.skip(text.len() + 4);
    }

    fn string(&mut self) {
        let (mut text, mut length) = (String::new(), self.rest.len());
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, char)) = chars.next() {
            match char {
                '"' => {
                    length = at + 1;
                    break;
                }
                // An escaped end of a line continues the text; others separate words.
                '\\' => match chars.next() {
                    Some((_, '\n')) => text.push('\n'),
                    _ => text.push(' '),
                },
                char => text.push(char),
            }
        }
        self.add(Kind::Text, &text);
        self.skip(length);
    }

    /// A character, or the mark of a lifetime.
    fn quote(&mut self) {
        let mut chars = self.rest.chars().skip(1);
        let length = match (chars.next(), chars.next()) {
            (Some('\\'), Some(escaped)) => {
                let begin = 2 + escaped.len_utf8();
                begin + self.rest[begin..].find('\'').map_or(0, |end| end + 1)
            }
            (Some(char), Some('\'')) => 2 + char.len_utf8(),
            _ => 1,
        };
        self.skip(length);
    }

    /// An identifier, a keyword or a number; or the beginning of a raw string.
    fn word(&mut self) {
        let end = self.rest.find(|char: char| !in_word(char));
        let (word, after) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        if let ("r" | "br" | "cr", Some((mark, body))) = (word, raw(after)) {
            self.add(Kind::Text, body);
            return self.skip(word.len() + mark + body.len() + mark);
        }
        if std::mem::replace(&mut self.after_fn, word == "fn") {
            self.add(Kind::Name, &word.replace('_', " "));
        }
        self.skip(word.len());
    }
}

/// The length of a raw string's mark (hashes and quote), and the text between its two marks.
fn raw(text: &str) -> Option<(usize, &str)> {
    let open = text.trim_start_matches('#');
    let hashes = &text[..text.len() - open.len()];
    let body = open.strip_prefix('"')?.split(&format!("\"{hashes}")).next();
    Some((hashes.len() + 1, body?))
}

fn in_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

#[cfg(test)]
mod tests {
    use super::{Kind, passages};

    /// Kind, first line and text of each passage.
    fn seen(text: &str) -> Vec<(Kind, usize, String)> {
        let passages = passages(text).into_iter();
        let seen = passages.map(|passage| {
            let lines: Vec<_> = passage.lines.iter().map(|(_, line)| line.trim()).collect();
            (passage.kind, passage.lines[0].0, lines.join("|"))
        });
        seen.collect()
    }

    fn one(kind: Kind, line: usize, text: &str) -> (Kind, usize, String) {
        (kind, line, text.to_owned())
    }

    #[test]
    fn comments_of_one_kind_on_adjacent_lines_are_one_passage() {
        let text = "//! a\n//! b\n\n/// c\n/// d\nfn e() {} // f\n// g\n//// h\n/* i\n * j */ x";
        assert_eq!(
            seen(text),
            [
                one(Kind::Doc, 1, "a|b"),
                one(Kind::Doc, 4, "c|d"),
                one(Kind::Name, 6, "e"),
                one(Kind::Comment, 6, "f|g|// h"),
                one(Kind::Comment, 9, "i|j"),
            ]
        );
    }

    #[test]
    fn strings_end_where_the_compiler_ends_them() {
        let text = concat!(
            r#"f("a // b", "c \" d", b"e\\", '"', 'g', '\'', "h \"#,
            "\n   i\"); fn j_k<'l>(m: &'l str) {}\n",
            r###"let n = (r"o\", r#"p " q"#, r##"s "# t"##, r"", r#type, "u");"###,
        );
        assert_eq!(
            seen(text),
            [
                one(Kind::Text, 1, "a // b"),
                one(Kind::Text, 1, "c   d"),
                one(Kind::Text, 1, "e"),
                one(Kind::Text, 1, "h|i"),
                one(Kind::Name, 2, "j k"),
                one(Kind::Text, 3, r"o\"),
                one(Kind::Text, 3, "p \" q"),
                one(Kind::Text, 3, "s \"# t"),
                one(Kind::Text, 3, ""),
                one(Kind::Text, 3, "u"),
            ]
        );
    }

    #[test]
    fn a_source_that_ends_early_is_scanned_to_its_end() {
        for text in [
            "// a", "/* a", "/*", "\"a", "\"a\\", "r#\"a", "'", "'\\", "'\\x", "fn", "é",
        ] {
            passages(text);
        }
    }
}
