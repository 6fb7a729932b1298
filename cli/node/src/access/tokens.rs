//! Bearer tokens: each has a role.
//!
//! Owns the file's form and the comparison. The file contains only the SHA-256 of each token, so a
//! copy of it does not grant access. It must not know the rights of a role.
//!
//! ```text
//! # role  name     SHA-256 of the token, in hexadecimal: printf %s "$TOKEN" | sha256sum
//! admin   ops      9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//! read    grafana  60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752
//! ```

use std::path::Path;

use ring::digest::{SHA256, digest};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use vmm::credentials::{self, Holder, Secrecy};

use super::role::Role;
use crate::error::Error;

/// The maximum number of tokens.
const TOKENS_MAX: usize = 1024;
/// The longest name of a token, in bytes.
const NAME_MAX: usize = 64;
/// The longest accepted token, in bytes.
const TOKEN_MAX: usize = 4096;
/// The size of a SHA-256, in bytes.
const DIGEST_SIZE: usize = 32;

/// A token's name and role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Token {
    /// The role that it grants.
    pub(crate) role: Role,
    /// Its name in the audit log.
    pub(crate) name: String,
    digest: [u8; DIGEST_SIZE],
}

/// All tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens(Vec<Token>);

impl Tokens {
    /// Reads a file that only its owner may read.
    ///
    /// # Errors
    /// The file cannot be used.
    pub(super) fn load(path: &Path) -> Result<Self, Error> {
        let bytes = credentials::read(path, Secrecy::Secret, Holder::Service)?;
        Self::parse(&bytes, path)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let mut tokens: Vec<Token> = Vec::new();
        for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let number = index.saturating_add(1);
            let bad = Error::context(format!("line {number} of {} is no token", path.display()));
            let token = parse_line(line, &tokens).map_err(bad)?;
            tokens.extend(token);
            if tokens.len() > TOKENS_MAX {
                let shown = path.display();
                let message = format!("{shown} has more than {TOKENS_MAX} tokens");
                return Err(Error::failed(message));
            }
        }
        if tokens.is_empty() {
            Err(Error::failed(format!(
                "{} has no token: add a line `admin NAME SHA256`, with the output of \
                 `printf %s TOKEN | sha256sum`",
                path.display()
            )))
        } else {
            Ok(Self(tokens))
        }
    }

    /// The entry of this token. The duration reveals nothing about tokens: all digests are
    /// compared, and each in full.
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
fn parse_line(line: &[u8], before: &[Token]) -> Result<Option<Token>, Error> {
    let line = std::str::from_utf8(line).map_err(|_| Error::failed("it is not text"))?;
    if line.trim_start().starts_with('#') {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let (role, name, digest) = match (words.next(), words.next(), words.next(), words.next()) {
        (None, ..) => return Ok(None),
        (Some(role), Some(name), Some(digest), None) => (role, name, digest),
        _ => {
            let message = "it does not have the three words ROLE NAME SHA256";
            return Err(Error::failed(message));
        }
    };
    let role = role.parse()?;
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.len() > NAME_MAX || !name.bytes().all(known) {
        return Err(Error::failed(format!(
            "a token's name has 1 to {NAME_MAX} letters, digits, dots, underscores or hyphens"
        )));
    }
    let digest = parse_digest(digest).ok_or_else(|| {
        Error::failed(
            "SHA256 is not 64 digits in hexadecimal; it is not the token itself, but its digest",
        )
    })?;
    if before.iter().any(|one| one.name == name) {
        return Err(Error::failed(format!("the name {name} comes twice")));
    }
    if let Some(one) = before.iter().find(|one| one.digest == digest) {
        let message = format!("it has the same SHA256 as the token {}", one.name);
        return Err(Error::failed(message));
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
        // `from_str_radix` alone would accept "+1".
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

    /// The result of `printf %s test | sha256sum`, and the same for `secret2`.
    const TEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    const OTHER: &str = "35224d0d3465d74e855f8d69a136e79c744ea35a675d3393360a327cbf6359a2";

    fn parse(text: &str) -> Result<Tokens, Error> {
        Tokens::parse(text.as_bytes(), Path::new("tokens"))
    }

    fn line_error(text: &str) -> String {
        let error = parse(text).unwrap_err();
        std::error::Error::source(&error).unwrap().to_string()
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
        for (text, words) in [
            ("read a".to_owned(), "three words"),
            (format!("read a {TEST} x"), "three words"),
            ("read a test".to_owned(), "not 64 digits"),
            (format!("read a {TEST}0"), "not 64 digits"),
            (format!("read a +{}", &TEST[1..]), "not 64 digits"),
            (format!("read a/b {TEST}"), "a token's name"),
            (
                format!("read {} {TEST}", "a".repeat(NAME_MAX + 1)),
                "a token's name",
            ),
            (format!("root a {TEST}"), "is no role"),
            (
                format!("read a {TEST}\nadmin a {OTHER}"),
                "the name a comes twice",
            ),
            (
                format!("read a {TEST}\nadmin b {TEST}"),
                "SHA256 as the token a",
            ),
        ] {
            let error = line_error(&text);
            assert!(error.contains(words), "{text}: {error}");
        }
        let error = parse("# none\n").unwrap_err().to_string();
        assert!(error.contains("has no token"), "{error}");
        let bytes = Tokens::parse(b"\xff", Path::new("tokens")).unwrap_err();
        let source = std::error::Error::source(&bytes).unwrap();
        assert_eq!(source.to_string(), "it is not text");
        let many: String = (0..=TOKENS_MAX)
            .map(|number| format!("read t{number} {number:064x}\n"))
            .collect();
        let error = parse(&many).unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
    }
}
