//! Bearer tokens: each has a role.
//!
//! Owns the file's form, its changes and the comparison. The file contains only the SHA-256 of each
//! token, so a copy of it does not grant access. It must not know the rights of a role.
//!
//! ```text
//! # role  name     SHA-256 of the token, in hexadecimal: printf %s "$TOKEN" | sha256sum
//! admin   ops      9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//! # A token may expire.
//! read    grafana  60303ae2…11c752 2027-02-21T21:45:00Z
//! ```

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bellhop_api::node::{BadRole, Role};
use bellhop_common::private_file;
use bellhop_common::text::utc;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use vmm::credentials::{self, Holder, Secrecy};
use x509_cert::der::DateTime;

use crate::error::Error;

/// The maximum number of tokens.
const TOKENS_MAX: usize = 1024;
/// The longest name of a token, in bytes.
const NAME_MAX: usize = 64;
/// The longest accepted token, in bytes.
const TOKEN_MAX: usize = 4096;
/// The size of a SHA-256, in bytes.
const DIGEST_SIZE: usize = 32;
/// The random bytes of a new token.
const RANDOM_SIZE: usize = 32;
/// The beginning of a new token, by which scanners for secrets find it.
const PREFIX: &str = "bellhop_";
/// The beginning of a new file.
const HEADING: &str = "# ROLE NAME SHA256 [EXPIRY], see `bellhop token --help`\n";

/// A token's name, role and expiry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// The role that it grants.
    pub role: Role,
    /// Its name in the audit log.
    pub name: String,
    /// The time from which it grants nothing, in the form of [`utc`].
    pub expires: Option<String>,
    digest: [u8; DIGEST_SIZE],
}

impl Token {
    /// Whether it has expired.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        self.expires.as_deref().is_some_and(has_passed)
    }
}

/// Whether it is this time, in the form of [`utc`], or later.
pub(super) fn has_passed(time: &str) -> bool {
    // Times of this form are in the order of their texts.
    *time <= *utc(since_1970().as_secs())
}

fn since_1970() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// All tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// Reads a file that only its owner may read.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = credentials::read(path, Secrecy::Secret, Holder::Service)?;
        Self::parse(&bytes, path)
    }

    /// The tokens in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Token> {
        self.0.iter()
    }

    /// Adds a token to a file, and creates the file if it does not exist. Returns the token
    /// itself, which is in no file, and its entry. Its name may be derived from its digest.
    ///
    /// # Errors
    /// The file cannot be used, or the name is invalid or taken; then nothing changes.
    pub fn create(
        path: &Path,
        role: Role,
        name: Option<&str>,
        lifetime: Option<Duration>,
    ) -> Result<(String, Token), Error> {
        let _lock = lock(path)?;
        let mut bytes = if path.exists() {
            credentials::read(path, Secrecy::Secret, Holder::Service)?
        } else {
            HEADING.into()
        };
        let mut random = [0; RANDOM_SIZE];
        let filled = SystemRandom::new().fill(&mut random);
        filled.map_err(|_| Error::failed("the kernel returns no random numbers"))?;
        let token = format!("{PREFIX}{}", hexadecimal(&random));
        let hash = hexadecimal(digest(&SHA256, token.as_bytes()).as_ref());
        let derived = format!("{role}-{}", hash.get(..8).unwrap_or_default());
        let mut line = format!("{role} {} {hash}", name.unwrap_or(&derived));
        if let Some(lifetime) = lifetime {
            line.push(' ');
            line.push_str(&utc(since_1970().saturating_add(lifetime).as_secs()));
        }
        let entry = parse_line(line.as_bytes(), &entries(&bytes, path)?);
        let entry = entry.map_err(Error::context("cannot create the token"))?;
        let entry = entry.ok_or_else(|| Error::failed("the token has no name"))?;
        if bytes.last().is_some_and(|byte| *byte != b'\n') {
            bytes.push(b'\n');
        }
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        entries(&bytes, path)?;
        write(path, &bytes)?;
        Ok((token, entry))
    }

    /// Removes a token from a file; false if it has none of this name.
    ///
    /// # Errors
    /// The file cannot be used, or would have no token; then nothing changes.
    pub fn revoke(path: &Path, name: &str) -> Result<bool, Error> {
        let read = || credentials::read(path, Secrecy::Secret, Holder::Service);
        // A missing file is an error before the lock creates a file beside it.
        read()?;
        let _lock = lock(path)?;
        let bytes = read()?;
        let tokens = entries(&bytes, path)?;
        if tokens.iter().all(|token| token.name != name) {
            return Ok(false);
        }
        if tokens.len() == 1 {
            return Err(Error::failed(format!(
                "{name} is the only token, and the daemon keeps its tokens if the file has none: \
                 create another one first"
            )));
        }
        let stays = |line: &&[u8]| {
            let token = parse_line(line, &[]).ok().flatten();
            token.is_none_or(|token| token.name != name)
        };
        let lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').filter(stays).collect();
        write(path, &lines.join(&b'\n'))?;
        Ok(true)
    }

    pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let tokens = entries(bytes, path)?;
        if tokens.is_empty() {
            Err(Error::failed(format!(
                "{} has no token: create one with `bellhop token create`, or add a line `admin \
                 NAME SHA256`, with the output of `printf %s TOKEN | sha256sum`",
                path.display()
            )))
        } else {
            Ok(Self(tokens))
        }
    }

    /// The time until the next token expires; none if no token will.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        let now = since_1970();
        let left = self.0.iter().filter_map(|token| {
            let time: DateTime = token.expires.as_ref()?.parse().ok()?;
            time.unix_duration().checked_sub(now)
        });
        left.filter(|left| !left.is_zero()).min()
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

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Simultaneous changes of a file, also of other processes, come one after the other.
fn lock(path: &Path) -> Result<std::fs::File, Error> {
    let failed = Error::context(format!("cannot write {}", path.display()));
    private_file::lock(path).map_err(failed)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let failed = Error::context(format!("cannot write {}", path.display()));
    private_file::replace(path, bytes).map_err(failed)
}

/// The tokens in a file's content.
fn entries(bytes: &[u8], path: &Path) -> Result<Vec<Token>, Error> {
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
    Ok(tokens)
}

/// A line's token; none for an empty line or a comment.
fn parse_line(line: &[u8], before: &[Token]) -> Result<Option<Token>, Error> {
    let line = std::str::from_utf8(line).map_err(|_| Error::failed("it is not text"))?;
    if line.trim_start().starts_with('#') {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let (role, name, digest) = match (words.next(), words.next(), words.next()) {
        (None, ..) => return Ok(None),
        (Some(role), Some(name), Some(digest)) => (role, name, digest),
        _ => {
            let message = "it does not have the three words ROLE NAME SHA256";
            return Err(Error::failed(message));
        }
    };
    let expires = words.next().map(str::to_owned);
    if words.next().is_some()
        || expires
            .as_deref()
            .is_some_and(|time| time.parse::<DateTime>().is_err())
    {
        return Err(Error::failed(
            "the only word after SHA256 is the time at which the token expires, in UTC, such as \
             2027-02-21T21:45:00Z",
        ));
    }
    let role = role
        .parse()
        .map_err(|error: BadRole| Error::failed(error.to_string()))?;
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
        expires,
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
    fn invalid_lines_are_reported_with_their_number() {
        let error = parse(&format!("read a {TEST}\nread b\n")).unwrap_err();
        assert_eq!(error.to_string(), "line 2 of tokens is no token");
        for (text, words) in [
            ("read a".to_owned(), "three words"),
            (format!("read a {TEST} x"), "the time at which"),
            (format!("read a {TEST} 2027-02-21"), "the time at which"),
            (
                format!("read a {TEST} 2027-02-21T21:45:00+"),
                "the time at which",
            ),
            (
                format!("read a {TEST} 2027-02-30T21:45:00Z"),
                "the time at which",
            ),
            (
                format!("read a {TEST} 2027-02-21T21:45:00Z x"),
                "the time at which",
            ),
            ("read a test".to_owned(), "not 64 digits"),
            (format!("read a {TEST}0"), "not 64 digits"),
            (format!("read a +{}", &TEST[1..]), "not 64 digits"),
            (format!("read a/b {TEST}"), "a token's name"),
            (
                format!("read {} {TEST}", "a".repeat(NAME_MAX + 1)),
                "a token's name",
            ),
            (format!("root a {TEST}"), "is not a role"),
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

    #[test]
    fn a_token_expires() {
        let text =
            format!("read a {TEST} 2026-01-01T00:00:00Z\nread b {OTHER} 9999-01-01T00:00:00Z");
        let tokens = parse(&text).unwrap();
        let expired = |token: &[u8]| tokens.find(token).unwrap().has_expired();
        assert!(expired(b"test"));
        assert!(!expired(b"secret2"));
        let left = tokens.next_expiry().unwrap();
        assert!(left > Duration::from_secs(7_000 * 365 * 86_400), "{left:?}");
        let tokens = parse(&format!("read a {TEST}")).unwrap();
        assert!(!tokens.0[0].has_expired());
        assert_eq!(tokens.next_expiry(), None);
    }

    /// A file in a directory of its own, which is removed when this is dropped.
    struct File(std::path::PathBuf);

    impl File {
        fn new(test: &str) -> Self {
            let name = format!("bellhop-tokens-{test}-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            std::fs::create_dir(&directory).unwrap();
            Self(directory.join("tokens"))
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
        }
    }

    #[test]
    fn simultaneous_changes_lose_nothing() {
        let file = File::new("changes");
        let path = &file.0;
        let create = |name: &str| {
            Tokens::create(path, Role::Read, Some(name), None).unwrap();
        };
        create("first");
        create("second");
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope
                    .spawn(move || (0..4).for_each(|number| create(&format!("{thread}-{number}"))));
            }
            scope.spawn(|| assert!(Tokens::revoke(path, "first").unwrap()));
        });
        let tokens = Tokens::load(path).unwrap();
        assert!(tokens.iter().all(|token| token.name != "first"));
        assert_eq!(tokens.iter().count(), 33);
    }

    #[test]
    fn tokens_are_created_and_revoked_in_a_file() {
        let file = File::new("life");
        let path = &file.0;
        let (token, entry) = Tokens::create(path, Role::Read, None, None).unwrap();
        assert!(entry.name.starts_with("read-"), "{entry:?}");
        let day = Duration::from_secs(86_400);
        let (other, _) = Tokens::create(path, Role::Admin, Some("ops"), Some(day)).unwrap();
        let tokens = Tokens::load(path).unwrap();
        assert_eq!(tokens.find(token.as_bytes()), Some(&entry));
        let ops = tokens.find(other.as_bytes()).unwrap();
        assert_eq!((ops.role, ops.name.as_str()), (Role::Admin, "ops"));
        assert!(ops.expires.is_some() && !ops.has_expired());
        let content = std::fs::read_to_string(path).unwrap();
        assert!(!content.contains(&token) && content.starts_with(HEADING));

        let hash = "a".repeat(64);
        for bad in [
            "ops",
            "",
            "a b",
            "a\nb",
            "a/b",
            &format!("a {hash}"),
            &format!("a\nread b {hash}"),
        ] {
            for lifetime in [None, Some(day)] {
                Tokens::create(path, Role::Read, Some(bad), lifetime).unwrap_err();
            }
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), content);

        assert!(!Tokens::revoke(path, "nosuch").unwrap());
        assert!(Tokens::revoke(path, &entry.name).unwrap());
        assert_eq!(Tokens::load(path).unwrap().0, std::slice::from_ref(ops));
        let error = Tokens::revoke(path, "ops").unwrap_err().to_string();
        assert!(error.contains("the only token"), "{error}");
        assert!(std::fs::read_to_string(path).unwrap().starts_with(HEADING));
    }
}
