//! Regular expressions of descriptions: generates a matching text, and checks whether a text
//! matches.
//!
//! It understands literals, classes with ranges, groups, alternatives, `?`, `*`, `+`, `{m}`, `{m,}`
//! and `{m,n}`, between `^` and `$`; `\d` and escaped punctuation. Everything else is an error, so
//! that no pattern is misread.

use super::random::Random;
use crate::error::{Error, Result};

/// The most repetitions generated where a pattern has no limit.
const REPEAT_MAX: usize = 8;

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct Pattern(Node);

#[derive(Debug, Clone, PartialEq)]
enum Node {
    /// One character of these ranges, or one outside them.
    Set {
        ranges: Vec<(char, char)>,
        not: bool,
    },
    Sequence(Vec<Node>),
    Either(Vec<Node>),
    Repeat {
        node: Box<Node>,
        least: usize,
        most: Option<usize>,
    },
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the part that it does not understand.
    pub fn new(text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::invalid(format!("the pattern {text:?}"), why);
        let inner = text
            .strip_prefix('^')
            .and_then(|text| text.strip_suffix('$'))
            .ok_or_else(|| wrong("it is not for a whole text: ^…$"))?;
        let mut rest: Vec<char> = inner.chars().rev().collect();
        let node = either(&mut rest).map_err(wrong)?;
        if rest.is_empty() {
            Ok(Self(node))
        } else {
            Err(wrong("a parenthesis too many"))
        }
    }

    /// A text that matches.
    pub fn sample(&self, random: &mut Random) -> String {
        let mut text = String::new();
        sample(&self.0, random, &mut text);
        text
    }

    /// True if the whole text matches.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let mut end = |at: usize| at == text.len();
        step(&self.0, &text, 0, &mut end)
    }
}

fn either(rest: &mut Vec<char>) -> std::result::Result<Node, &'static str> {
    let mut all = vec![sequence(rest)?];
    while rest.last() == Some(&'|') {
        rest.pop();
        all.push(sequence(rest)?);
    }
    Ok(match (all.len(), all.pop()) {
        (1, Some(only)) => only,
        (_, Some(last)) => {
            all.push(last);
            Node::Either(all)
        }
        (_, None) => Node::Sequence(Vec::new()),
    })
}

fn sequence(rest: &mut Vec<char>) -> std::result::Result<Node, &'static str> {
    let mut all = Vec::new();
    while rest.last().is_some_and(|next| !"|)".contains(*next)) {
        let node = atom(rest)?;
        all.push(repeated(node, rest)?);
    }
    Ok(Node::Sequence(all))
}

fn single(letter: char) -> Node {
    Node::Set {
        ranges: vec![(letter, letter)],
        not: false,
    }
}

fn atom(rest: &mut Vec<char>) -> std::result::Result<Node, &'static str> {
    match rest.pop() {
        Some('(') => {
            if rest.ends_with(&[':', '?']) {
                rest.truncate(rest.len() - 2);
            } else if rest.last() == Some(&'?') {
                return Err("a group of a special kind");
            }
            let node = either(rest)?;
            match rest.pop() {
                Some(')') => Ok(node),
                _ => Err("a parenthesis without an end"),
            }
        }
        Some('[') => class(rest),
        Some('\\') => escape(rest.pop()),
        Some('.') => Ok(Node::Set {
            ranges: vec![('\n', '\n')],
            not: true,
        }),
        Some('*' | '+' | '?' | '{' | '}' | ']' | '^' | '$') => Err("an operator in a wrong place"),
        Some(letter) => Ok(single(letter)),
        None => Err("an early end"),
    }
}

fn escape(letter: Option<char>) -> std::result::Result<Node, &'static str> {
    match letter {
        Some('d') => Ok(Node::Set {
            ranges: vec![('0', '9')],
            not: false,
        }),
        Some(letter) if letter.is_ascii_punctuation() => Ok(single(letter)),
        _ => Err("an escape of a special kind"),
    }
}

fn class(rest: &mut Vec<char>) -> std::result::Result<Node, &'static str> {
    let not = rest.last() == Some(&'^');
    if not {
        rest.pop();
    }
    let mut ranges = Vec::new();
    loop {
        let first = match rest.pop() {
            None => return Err("a class without an end"),
            Some(']') => return Ok(Node::Set { ranges, not }),
            Some('\\') => match escape(rest.pop())? {
                Node::Set {
                    ranges: escaped, ..
                } if escaped.iter().any(|(first, last)| first != last) => {
                    ranges.extend(escaped);
                    continue;
                }
                Node::Set {
                    ranges: escaped, ..
                } => escaped.first().ok_or("an early end")?.0,
                _ => return Err("an escape of a special kind"),
            },
            Some(letter) => letter,
        };
        // A hyphen before the end is literal.
        let is_range = rest.last() == Some(&'-')
            && rest.len().checked_sub(2).and_then(|at| rest.get(at)) != Some(&']');
        let last = if is_range {
            rest.pop();
            rest.pop().ok_or("an early end")?
        } else {
            first
        };
        ranges.push((first, last));
    }
}

fn repeated(node: Node, rest: &mut Vec<char>) -> std::result::Result<Node, &'static str> {
    let (least, most) = match rest.last() {
        Some('?') => (0, Some(1)),
        Some('*') => (0, None),
        Some('+') => (1, None),
        Some('{') => {
            let mut text = String::new();
            rest.pop();
            while let Some(letter) = rest.last().copied().filter(|letter| *letter != '}') {
                text.push(letter);
                rest.pop();
            }
            let number = |text: &str| text.parse().map_err(|_| "a repetition without a number");
            match text.split_once(',') {
                None => (number(&text)?, Some(number(&text)?)),
                Some((least, "")) => (number(least)?, None),
                Some((least, most)) => (number(least)?, Some(number(most)?)),
            }
        }
        _ => return Ok(node),
    };
    rest.pop();
    Ok(Node::Repeat {
        node: Box::new(node),
        least,
        most,
    })
}

fn sample(node: &Node, random: &mut Random, text: &mut String) {
    match node {
        Node::Set { ranges, not: false } => {
            if let Some(&(first, last)) = random.one_of(ranges) {
                let letters: Vec<char> = (first..=last).collect();
                text.extend(random.one_of(&letters));
            }
        }
        Node::Set { not: true, .. } => {
            let letters: Vec<char> = ('!'..='~').filter(|&one| in_set(node, one)).collect();
            text.extend(random.one_of(&letters));
        }
        Node::Sequence(all) => all.iter().for_each(|one| sample(one, random, text)),
        Node::Either(all) => {
            if let Some(one) = random.one_of(all) {
                sample(one, random, text);
            }
        }
        Node::Repeat { node, least, most } => {
            let most = most.unwrap_or(least + REPEAT_MAX).min(least + REPEAT_MAX);
            for _ in 0..least + random.below(most - least + 1) {
                sample(node, random, text);
            }
        }
    }
}

fn in_set(node: &Node, letter: char) -> bool {
    match node {
        Node::Set { ranges, not } => {
            let within = ranges
                .iter()
                .any(|&(first, last)| (first..=last).contains(&letter));
            within != *not
        }
        _ => false,
    }
}

/// True if `node` matches at `at` and `then` accepts the position after it.
fn step(node: &Node, text: &[char], at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    match node {
        Node::Set { .. } => {
            text.get(at).is_some_and(|&letter| in_set(node, letter)) && then(at + 1)
        }
        Node::Sequence(all) => follow(all, text, at, then),
        Node::Either(all) => all.iter().any(|one| step(one, text, at, then)),
        Node::Repeat { node, least, most } => repeat(node, (*least, *most), text, at, then),
    }
}

fn follow(all: &[Node], text: &[char], at: usize, then: &mut dyn FnMut(usize) -> bool) -> bool {
    match all.split_first() {
        None => then(at),
        Some((first, rest)) => step(first, text, at, &mut |at| follow(rest, text, at, then)),
    }
}

fn repeat(
    node: &Node,
    (least, most): (usize, Option<usize>),
    text: &[char],
    at: usize,
    then: &mut dyn FnMut(usize) -> bool,
) -> bool {
    let more = most != Some(0)
        && step(node, text, at, &mut |next| {
            // An empty match may repeat any number of times.
            let rest = (least.saturating_sub(1), most.map(|most| most - 1));
            next > at && repeat(node, rest, text, next, then)
        });
    more || (least == 0 && then(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_descriptions_are_understood() {
        let mut random = Random::new(1);
        for (pattern, good, bad) in [
            (
                "^[0-9]+[KkMmGgTt](iB|B)?$",
                ["1K", "512MiB"],
                ["512", "1KiBs"],
            ),
            (
                "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$",
                ["52:54:00:12:34:56", "aa:bb:cc:dd:ee:ff"],
                ["52:54:00:12:34", "52:54:00:12:34:5g"],
            ),
            ("^(auto|on|off)$", ["auto", "off"], ["", "auto "]),
            ("^[a-z0-9][a-z0-9-]{0,62}$", ["a", "0-"], ["-a", "A"]),
            ("^[^/\\d.-]*$", ["", "ab"], ["a/b", "1"]),
            ("^a{2,}(?:b|)\\.$", ["aa.", "aaab."], ["a.", "aabx"]),
        ] {
            let understood = Pattern::new(pattern).unwrap();
            for good in good {
                assert!(understood.matches(good), "{pattern} {good}");
            }
            for bad in bad {
                assert!(!understood.matches(bad), "{pattern} {bad}");
            }
            for _ in 0..100 {
                let sample = understood.sample(&mut random);
                assert!(understood.matches(&sample), "{pattern} {sample}");
            }
        }
    }

    #[test]
    fn others_are_refused() {
        for bad in [
            "a", "^a", "^(a$", "^a)$", "^[a$", "^*$", "^(?=a)$", "^\\w$", "^a{x}$",
        ] {
            assert!(Pattern::new(bad).is_err(), "{bad}");
        }
    }
}
