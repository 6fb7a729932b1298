//! Whom a certificate names: its subject as RFC 4514 writes it, for the audit.
//!
//! Owns the little of DER (ITU-T X.690) that this takes. It must not know whether a certificate is to
//! be trusted: rustls has decided that before. Lengths are checked all the same, and the text cannot
//! pretend to be more than one line or other attributes than there are.
//!
//! ```text
//! Certificate ::= SEQUENCE {
//!   tbsCertificate SEQUENCE {
//!     version [0] (absent in v1), serialNumber INTEGER, signature SEQUENCE, issuer SEQUENCE,
//!     validity SEQUENCE, subject SEQUENCE OF SET OF SEQUENCE { type OID, value string }, … }, … }
//! ```

use std::fmt::Write as _;

const OBJECT_IDENTIFIER: u8 = 0x06;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const VERSION: u8 = 0xa0;

/// How much of a subject is shown, in characters.
const TEXT_MAX: usize = 256;

/// Attributes with short names (RFC 4514, section 3): the last parts of 2.5.4.*.
const NAMES: [(&[u8], &str); 6] = [
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
];

/// The subject of a certificate in DER, such as `CN=ops,O=Example`; none if it cannot be read, or is empty.
pub(super) fn of(certificate: &[u8]) -> Option<String> {
    let mut tbs = Der(Der(Der(certificate).expect(SEQUENCE)?).expect(SEQUENCE)?);
    if tbs.0.first() == Some(&VERSION) {
        tbs.next()?;
    }
    // serialNumber, signature, issuer, validity
    for _ in 0..4 {
        tbs.next()?;
    }
    let mut sets = Der(tbs.expect(SEQUENCE)?);
    let mut names = Vec::new();
    while !sets.0.is_empty() {
        let mut attributes = Der(sets.expect(SET)?);
        let mut together = Vec::new();
        while !attributes.0.is_empty() {
            together.push(attribute(attributes.expect(SEQUENCE)?)?);
        }
        names.push(together.join("+"));
    }
    // RFC 4514 begins with the last one.
    names.reverse();
    let text = names.join(",");
    if text.is_empty() {
        return None;
    }
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => Some(format!("{}…", text.get(..end)?)),
        None => Some(text),
    }
}

fn attribute(content: &[u8]) -> Option<String> {
    let mut content = Der(content);
    let identifier = content.expect(OBJECT_IDENTIFIER)?;
    let (_, value) = content.next()?;
    let known = NAMES.iter().find(|(of, _)| *of == identifier);
    Some(match known {
        Some((_, name)) => format!("{name}={}", escaped(&String::from_utf8_lossy(value))),
        // RFC 4514: the identifier in place of a name, the value as its bytes. The identifier
        // is given as its bytes as well: nobody needs more of what has no name.
        None => format!("#{}=#{}", hexadecimal(identifier), hexadecimal(value)),
    })
}

/// With a backslash before what has a meaning in RFC 4514, and before what a terminal or a log would take for an end of
/// line.
fn escaped(value: &str) -> String {
    let mut text = String::new();
    let last = value.chars().count().saturating_sub(1);
    for (index, c) in value.chars().enumerate() {
        let at_edge = (index == 0 && matches!(c, ' ' | '#')) || (index == last && c == ' ');
        if c.is_control() {
            for byte in c.to_string().bytes() {
                // Writing to a String does not fail.
                let _ = write!(text, "\\{byte:02x}");
            }
            continue;
        }
        if at_edge || matches!(c, '"' | '+' | ',' | ';' | '<' | '>' | '\\' | '=') {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is left of a string of DER elements.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next element: its tag and its content. None at the end, and for a length that is not
    /// there, indefinite or above 64 KiB.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81 => {
                let (&length, rest) = rest.split_first()?;
                (usize::from(length), rest)
            }
            0x82 => {
                let (length, rest) = rest.split_first_chunk()?;
                (usize::from(u16::from_be_bytes(*length)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, content))
    }

    /// The content of the next element, if it has this tag.
    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next()
            .filter(|(found, _)| *found == tag)
            .map(|found| found.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        [&[tag, 0x82], &length[..], content].concat()
    }

    fn name(identifier: &[u8], value: &[u8]) -> Vec<u8> {
        let parts = [element(OBJECT_IDENTIFIER, identifier), element(0x0c, value)];
        element(SEQUENCE, &parts.concat())
    }

    fn certificate(sets: &[Vec<u8>]) -> Vec<u8> {
        let subject: Vec<u8> = sets.iter().flat_map(|set| element(SET, set)).collect();
        let tbs = [
            element(VERSION, &[2, 1, 2]),
            element(2, &[1]),
            element(SEQUENCE, &[]),
            element(SEQUENCE, &[]),
            element(SEQUENCE, &[]),
            element(SEQUENCE, &subject),
            element(SEQUENCE, b"key"),
        ];
        element(SEQUENCE, &element(SEQUENCE, &tbs.concat()))
    }

    const COMMON_NAME: &[u8] = &[0x55, 4, 3];
    const ORGANIZATION: &[u8] = &[0x55, 4, 10];

    #[test]
    fn a_subject_is_written_as_rfc_4514_has_it() {
        let found = of(&certificate(&[
            name(ORGANIZATION, b"Example"),
            name(COMMON_NAME, b"ops"),
        ]));
        assert_eq!(found.as_deref(), Some("CN=ops,O=Example"));
        let both = [name(COMMON_NAME, b"ops"), name(&[0x2a, 3], &[1, 255])].concat();
        assert_eq!(
            of(&certificate(&[both])).as_deref(),
            Some("CN=ops+#2a03=#01ff")
        );
        assert_eq!(of(&certificate(&[])), None);
    }

    #[test]
    fn a_name_cannot_pretend() {
        let of_name = |text: &[u8]| of(&certificate(&[name(COMMON_NAME, text)])).unwrap();
        assert_eq!(of_name(b"a,O=b"), "CN=a\\,O\\=b");
        assert_eq!(of_name(b"a\nb\x1b"), "CN=a\\0ab\\1b");
        assert_eq!(of_name(b" #a "), "CN=\\ #a\\ ");
        assert_eq!(of_name(b"\xff"), "CN=\u{fffd}");
        assert_eq!(of_name(&[b'x'; 5000]).chars().count(), TEXT_MAX + 1);
    }

    #[test]
    fn what_is_cut_or_changed_does_no_harm() {
        let whole = certificate(&[name(ORGANIZATION, b"Example"), name(COMMON_NAME, b"ops")]);
        for end in 0..whole.len() {
            assert_eq!(of(&whole[..end]), None, "{end}");
        }
        for at in 0..whole.len() {
            for value in [0, 1, 0x30, 0x7f, 0x80, 0x81, 0x82, 0x84, 0xff] {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = of(&changed);
            }
        }
    }
}
