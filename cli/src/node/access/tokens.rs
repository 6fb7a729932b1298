//! Bearer tokens: who has which role.
//!
//! Owns the file's form and the comparison. Tokens themselves are in no file: it has their SHA-256, so whoever reads
//! a copy of it cannot call. It must not know what a role may do.
//!
//! ```text
//! # role  name     SHA-256 of the token, in hexadecimal: printf %s "$TOKEN" | sha256sum
//! admin   ops      9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//! read    grafana  60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752
//! ```

use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use vmm::credentials::{self, Holder, Secrecy};

use super::role::{Role, UnknownRole};

/// How many tokens there can be.
const TOKENS_MAX: usize = 1024;
/// The longest name of a token, in bytes.
const NAME_MAX: usize = 64;
/// The longest token that is looked at, in bytes.
const TOKEN_MAX: usize = 4096;
/// Bytes of a SHA-256.
const DIGEST_SIZE: usize = 32;

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TokensError {
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] vmm::Error),
    /// A line makes no sense.
    #[error("line {line} of {path} is no token")]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong there.
        #[source]
        source: LineError,
    },
    /// Nobody could call.
    #[error(
        "{0} has no token: add a line `admin NAME SHA256`, with the output of `printf %s TOKEN | sha256sum`"
    )]
    Empty(PathBuf),
    /// More than are compared with each request.
    #[error("{0} has more than {TOKENS_MAX} tokens")]
    TooMany(PathBuf),
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LineError {
    /// Not UTF-8.
    #[error("it is not text")]
    NotText,
    /// Too few or too many words.
    #[error("it does not have the three words ROLE NAME SHA256")]
    Words,
    /// No such role.
    #[error(transparent)]
    Role(#[from] UnknownRole),
    /// Not a name.
    #[error("a token's name has 1 to {NAME_MAX} letters, digits, dots, underscores or hyphens")]
    Name,
    /// A name comes twice: which token it was would not be known.
    #[error("the name {0} comes twice")]
    NameTwice(String),
    /// Not a SHA-256.
    #[error("SHA256 is not 64 digits in hexadecimal; it is not the token itself, but its digest")]
    Digest,
    /// A token comes twice.
    #[error("it has the same SHA256 as the token {0}")]
    DigestTwice(String),
}

/// A token's name and what it may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Token {
    /// What it may do.
    pub(crate) role: Role,
    /// What it is called in the audit.
    pub(crate) name: String,
    digest: [u8; DIGEST_SIZE],
}

/// All tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens(Vec<Token>);

impl Tokens {
    /// Reads a file that nobody but its owner may read.
    ///
    /// # Errors
    /// See [`TokensError`].
    pub(super) fn load(path: &Path) -> Result<Self, TokensError> {
        let bytes = credentials::read(path, Secrecy::Secret, Holder::Service)?;
        Self::parse(&bytes, path)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, TokensError> {
        let mut tokens: Vec<Token> = Vec::new();
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let token = parse_line(line, &tokens).map_err(|source| TokensError::Line {
                path: path.to_owned(),
                line: index.saturating_add(1),
                source,
            })?;
            tokens.extend(token);
            if tokens.len() > TOKENS_MAX {
                return Err(TokensError::TooMany(path.to_owned()));
            }
        }
        if tokens.is_empty() {
            Err(TokensError::Empty(path.to_owned()))
        } else {
            Ok(Self(tokens))
        }
    }

    /// Whose this token is. How long it takes tells nothing about tokens: all digests are compared, and each
    /// whole.
    pub(super) fn find(&self, token: &[u8]) -> Option<&Token> {
        if token.len() > TOKEN_MAX {
            return None;
        }
        let given = digest(&SHA256, token);
        let mut found = u64::MAX;
        for (index, one) in (0_u64..).zip(&self.0) {
            let same: Choice = one.digest.as_slice().ct_eq(given.as_ref());
            found.conditional_assign(&index, same);
        }
        self.0.get(usize::try_from(found).ok()?)
    }
}

/// A line's token; none for an empty line or a comment.
fn parse_line(line: &[u8], before: &[Token]) -> Result<Option<Token>, LineError> {
    let line = std::str::from_utf8(line).map_err(|_| LineError::NotText)?;
    if line.trim_start().starts_with('#') {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let (role, name, digest) = match (words.next(), words.next(), words.next(), words.next()) {
        (None, ..) => return Ok(None),
        (Some(role), Some(name), Some(digest), None) => (role, name, digest),
        _ => return Err(LineError::Words),
    };
    let role = role.parse()?;
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.len() > NAME_MAX || !name.bytes().all(known) {
        return Err(LineError::Name);
    }
    let digest = parse_digest(digest).ok_or(LineError::Digest)?;
    if before.iter().any(|one| one.name == name) {
        return Err(LineError::NameTwice(name.to_owned()));
    }
    if let Some(one) = before.iter().find(|one| one.digest == digest) {
        return Err(LineError::DigestTwice(one.name.clone()));
    }
    Ok(Some(Token {
        role,
        name: name.to_owned(),
        digest,
    }))
}

fn parse_digest(text: &str) -> Option<[u8; DIGEST_SIZE]> {
    let mut digest = [0; DIGEST_SIZE];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || pairs.len() != DIGEST_SIZE {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(pairs) {
        // `from_str_radix` alone would take "+1".
        if !pair.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf %s test | sha256sum`, and of `secret2`.
    const TEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    const OTHER: &str = "35224d0d3465d74e855f8d69a136e79c744ea35a675d3393360a327cbf6359a2";

    fn parse(text: &str) -> Result<Tokens, TokensError> {
        Tokens::parse(text.as_bytes(), Path::new("tokens"))
    }

    fn line_error(text: &str) -> LineError {
        match parse(text).unwrap_err() {
            TokensError::Line { source, .. } => source,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_token_is_found_by_its_digest() {
        let text = format!("# people\n\n  admin\tops  {TEST}\nread grafana {OTHER}\n");
        let tokens = parse(&text).unwrap();
        let found = tokens.find(b"test").unwrap();
        assert_eq!((found.role, found.name.as_str()), (Role::Admin, "ops"));
        for wrong in [&b""[..], b"Test", b"test ", b"tes", TEST.as_bytes()] {
            assert_eq!(tokens.find(wrong), None);
        }
        let upper = parse(&format!("read a {}", TEST.to_uppercase())).unwrap();
        assert_eq!(upper.find(b"test").unwrap().role, Role::Read);
        assert_eq!(upper.find(&[b'a'; TOKEN_MAX + 1]), None);
    }

    #[test]
    fn what_makes_no_sense_is_said_with_its_line() {
        let error = parse(&format!("read a {TEST}\nread b\n")).unwrap_err();
        assert_eq!(error.to_string(), "line 2 of tokens is no token");
        assert_eq!(line_error("read a"), LineError::Words);
        assert_eq!(line_error(&format!("read a {TEST} x")), LineError::Words);
        assert_eq!(line_error("read a test"), LineError::Digest);
        assert_eq!(line_error(&format!("read a {TEST}0")), LineError::Digest);
        assert_eq!(
            line_error(&format!("read a +{}", &TEST[1..])),
            LineError::Digest
        );
        assert_eq!(line_error(&format!("read a/b {TEST}")), LineError::Name);
        let long = "a".repeat(NAME_MAX + 1);
        assert_eq!(line_error(&format!("read {long} {TEST}")), LineError::Name);
        assert!(matches!(
            line_error(&format!("root a {TEST}")),
            LineError::Role(_)
        ));
        let twice = format!("read a {TEST}\nadmin a {OTHER}");
        assert_eq!(line_error(&twice), LineError::NameTwice("a".to_owned()));
        let twice = format!("read a {TEST}\nadmin b {TEST}");
        assert_eq!(line_error(&twice), LineError::DigestTwice("a".to_owned()));
        assert!(matches!(parse("# none\n"), Err(TokensError::Empty(_))));
        let bytes = Tokens::parse(b"\xff", Path::new("tokens"));
        assert!(matches!(
            bytes,
            Err(TokensError::Line {
                source: LineError::NotText,
                ..
            })
        ));
        let many: String = (0..=TOKENS_MAX)
            .map(|number| format!("read t{number} {number:064x}\n"))
            .collect();
        assert!(matches!(parse(&many), Err(TokensError::TooMany(_))));
    }
}
