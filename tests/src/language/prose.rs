//! Words and sentences of Markdown, of documentation and of comments.

/// A line with its number.
pub(super) type Line = (usize, String);

/// A word, or a piece of code or a link that counts as one.
#[derive(Debug, PartialEq)]
pub(super) struct Word {
    pub(super) line: usize,
    pub(super) text: String,
    /// A sentence ends with it.
    pub(super) ends: bool,
}

/// Stands for code in a word's text.
const CODE: char = '\u{1}';

/// Paragraphs, items, headings, and the parts of cells between semicolons. Blocks of code are left
/// out.
pub(super) fn blocks(lines: &[Line]) -> Vec<Vec<Line>> {
    let mut blocks: Vec<Vec<Line>> = vec![Vec::new()];
    let mut fenced = false;
    for (number, line) in lines {
        let text = line.trim().trim_start_matches("> ");
        let fence = is_fence(text);
        fenced ^= fence;
        if fence || fenced || text.is_empty() {
            blocks.push(Vec::new());
        } else if text.starts_with('|') {
            let text = text.replace("\\|", "/");
            let parts = text.split(['|', ';']);
            blocks.extend(parts.map(|part| vec![(*number, part.to_owned())]));
            blocks.push(Vec::new());
        } else {
            let heading = text.starts_with('#');
            if heading || is_item(text) {
                blocks.push(Vec::new());
            }
            let last = blocks.last_mut();
            last.unwrap().push((*number, text.to_owned()));
            if heading {
                blocks.push(Vec::new());
            }
        }
    }
    blocks
}

/// True for the first and the last line of a block of code.
pub(super) fn is_fence(text: &str) -> bool {
    text.starts_with("```") || text.starts_with("~~~")
}

fn is_item(text: &str) -> bool {
    let number = text.trim_start_matches(|char: char| char.is_ascii_digit());
    ["- ", "* ", "+ "].iter().any(|mark| text.starts_with(mark))
        || (number.len() < text.len() && number.starts_with(". "))
}

/// The words of a block. Code is one word; the target of a link is none.
pub(super) fn words(block: &[Line]) -> Vec<Word> {
    let mut words = Vec::new();
    let (mut text, mut code, mut target) = (String::new(), false, false);
    for (line, content) in block {
        for char in content.chars().chain(['\n']) {
            match char {
                '`' => {
                    code = !code;
                    if code {
                        text.push(CODE);
                    }
                }
                _ if code => {}
                ')' if target => target = false,
                _ if target => {}
                '(' if text.ends_with(']') => target = true,
                char if char.is_whitespace() => words.extend(word(*line, &mut text)),
                char => text.push(char),
            }
        }
    }
    // A code or a link that has no end.
    let last = block.last().map_or(0, |(line, _)| *line);
    words.extend(word(last, &mut text));
    words
}

/// Takes the collected text, if it has a letter, a digit or code.
fn word(line: usize, text: &mut String) -> Option<Word> {
    let text = std::mem::take(text);
    let closed = text.trim_end_matches(['"', '\'', ')', ']', '*', '_', '”']);
    let short = ["e.g.", "i.e.", "vs."].contains(&closed);
    let ends = closed.ends_with(['.', '!', '?']) && !short;
    let counts = text.contains(|char: char| char.is_alphanumeric() || char == CODE);
    counts.then_some(Word { line, text, ends })
}

/// The sentences of a block.
pub(super) fn sentences(words: &[Word]) -> impl Iterator<Item = &[Word]> {
    words.split_inclusive(|word| word.ends)
}

/// The lines on which a phrase begins, in any case.
pub(super) fn occurrences(words: &[Word], phrase: &str) -> Vec<usize> {
    let parts = words.iter().flat_map(|word| {
        let parts = word.text.split(|char: char| !char.is_alphanumeric());
        let parts = parts.filter(|part| !part.is_empty());
        parts.map(move |part| (word.line, part.to_lowercase()))
    });
    let parts: Vec<_> = parts.collect();
    let phrase: Vec<_> = phrase.split(' ').collect();
    let places = parts.windows(phrase.len());
    let places = places.filter(|place| place.iter().map(|(_, part)| part).eq(&phrase));
    places
        .filter_map(|place| place.first().map(|(line, _)| *line))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Line, blocks, occurrences, sentences, words};

    fn lines(text: &str) -> Vec<Line> {
        (1..).zip(text.lines().map(str::to_owned)).collect()
    }

    /// The texts of the blocks that are not empty.
    fn seen(text: &str) -> Vec<String> {
        let blocks = blocks(&lines(text)).into_iter();
        let texts = blocks.map(|block| {
            let lines: Vec<_> = block.iter().map(|(_, line)| line.trim()).collect();
            lines.join(" ")
        });
        texts.filter(|text| !text.is_empty()).collect()
    }

    #[test]
    fn blocks_are_paragraphs_items_headings_and_cells() {
        let text =
            "# a\nb\nc\n\n* d\n  e\n1. f\n```sh\ng\n```\nh\n| i; m | j \\| k |\n|---|---|\n> l";
        let blocks = [
            "# a", "b c", "* d e", "1. f", "h", "i", "m", "j / k", "---", "---", "l",
        ];
        assert_eq!(seen(text), blocks);
    }

    #[test]
    fn code_is_one_word_and_a_target_is_none() {
        let block = lines("A `b c\nd` [e f](g h) — i, e.g. *j.*\n(K `l`.) M");
        let words = words(&block);
        let counts = sentences(&words).map(<[_]>::len);
        assert_eq!(counts.collect::<Vec<_>>(), [7, 2, 1]);
        assert_eq!(words.last().unwrap().line, 3);
    }

    #[test]
    fn a_phrase_is_found_across_lines_and_in_no_longer_word() {
        let words = words(&lines("one two\nthree, TWO_three `two three` twothree"));
        assert_eq!(occurrences(&words, "two three"), [1, 2]);
        assert_eq!(occurrences(&words, "thre"), [0; 0]);
    }
}
