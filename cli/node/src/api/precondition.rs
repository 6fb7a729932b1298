//! `If-Match` and `If-None-Match` of a request on a VM (RFC 9110, section 13.1), and the entity tag
//! of an answer.
//!
//! Owns the headers' form.
//!
//! ```text
//!   If-Match: "g17"        at this generation        If-None-Match: *   no VM of this name
//!   If-Match: "g3", "g17"  at one of these
//!   If-Match: *            the VM exists
//! ```

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::{ETAG, HeaderName, IF_MATCH, IF_NONE_MATCH};
use axum::http::request::Parts;
use utoipa::IntoParams;
use vmm::http::HttpError;

use crate::machines::condition::{Condition, tag};

/// The conditional headers of a request.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Header)]
pub(super) struct Precondition {
    /// The daemon carries out the request only if the virtual machine is at one of these
    /// generations, or with `*` if it exists; else 412
    #[param(
        rename = "If-Match",
        example = "\"g17\"",
        pattern = "^(\\*|(W/)?\"[!#-~]*\"( *, *(W/)?\"[!#-~]*\")*)$"
    )]
    if_match: Option<String>,
    /// `*`: the daemon carries out the request only if no virtual machine has this name; else 412
    #[param(rename = "If-None-Match", example = "*", pattern = "^\\*$")]
    if_none_match: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Precondition {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self {
            if_match: joined(&parts.headers, &IF_MATCH),
            if_none_match: joined(&parts.headers, &IF_NONE_MATCH),
        })
    }
}

/// A header's value. Several headers of the same name are joined to one list. Bytes that are not
/// UTF-8 become replacement characters, which no tag contains.
fn joined(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let values = headers.get_all(name).iter();
    let all: Vec<_> = values
        .map(|value| String::from_utf8_lossy(value.as_bytes()))
        .collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn malformed(name: &str, wanted: &str) -> HttpError {
    HttpError::Parameter(format!("the header {name} is malformed: give {wanted}"))
}

impl Precondition {
    /// The precondition of the request.
    ///
    /// # Errors
    /// A value is malformed.
    pub(super) fn condition(&self) -> Result<Condition, HttpError> {
        let absent = match self.if_none_match.as_deref() {
            None => false,
            Some("*") => true,
            Some(_) => return Err(malformed("If-None-Match", "`*`")),
        };
        Ok(match self.if_match.as_deref() {
            None if absent => Condition::Absent,
            None => Condition::None,
            Some("*") if !absent => Condition::Present,
            Some("*") => Condition::At(Vec::new()),
            Some(value) => {
                let wanted = "`*`, or entity tags such as `\"g17\"`";
                let tags = strong_tags(value).ok_or_else(|| malformed("If-Match", wanted))?;
                // Both headers together never hold, as if no tag matched.
                Condition::At(if absent { Vec::new() } else { tags })
            }
        })
    }
}

/// The strong tags of a list, without their quotes; a weak one matches nothing here. `None`: it is
/// not a list of entity tags.
fn strong_tags(list: &str) -> Option<Vec<String>> {
    let mut tags = Vec::new();
    let mut rest = list.trim();
    loop {
        let strong = rest.strip_prefix("W/").is_none();
        let quoted = rest.strip_prefix("W/").unwrap_or(rest);
        let (tag, behind) = quoted.strip_prefix('"')?.split_once('"')?;
        if !tag.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        if strong {
            tags.push(tag.to_owned());
        }
        rest = behind.trim_start();
        if rest.is_empty() {
            return Some(tags);
        }
        rest = rest.strip_prefix(',')?.trim_start();
    }
}

/// The header with a VM's generation.
pub(super) fn etag(generation: u64) -> [(HeaderName, String); 1] {
    [(ETAG, format!("\"{}\"", tag(generation)))]
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn condition(headers: &[(HeaderName, &[u8])]) -> Result<Condition, HttpError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        Precondition {
            if_match: joined(&map, &IF_MATCH),
            if_none_match: joined(&map, &IF_NONE_MATCH),
        }
        .condition()
    }

    #[test]
    fn headers_become_conditions() {
        let at = |tags: &[&str]| Condition::At(tags.iter().map(|&tag| tag.to_owned()).collect());
        for (value, expected) in [
            ("*", Condition::Present),
            ("\"g17\"", at(&["g17"])),
            ("\"g1\",\"g2\" , \"a,b\"", at(&["g1", "g2", "a,b"])),
            // A foreign tag, an empty one and a weak one: well-formed, and never a match.
            ("\"nonsense\"", at(&["nonsense"])),
            ("\"\"", at(&[""])),
            ("W/\"g17\"", at(&[])),
        ] {
            let found = condition(&[(IF_MATCH, value.as_bytes())]).unwrap();
            assert_eq!(found, expected, "{value}");
        }
        let twice: [(_, &[u8]); 2] = [(IF_MATCH, b"\"g1\""), (IF_MATCH, b"\"g2\"")];
        assert_eq!(condition(&twice).unwrap(), at(&["g1", "g2"]));
        let absent = condition(&[(IF_NONE_MATCH, b"*")]).unwrap();
        assert_eq!(absent, Condition::Absent);
        assert_eq!(condition(&[]).unwrap(), Condition::None);
        for value in [b"*".as_slice(), b"\"g17\""] {
            let both = condition(&[(IF_MATCH, value), (IF_NONE_MATCH, b"*")]).unwrap();
            assert_eq!(both, at(&[]), "never");
        }
    }

    #[test]
    fn invalid_conditions_are_refused() {
        for value in [
            "",
            "g17",
            "17",
            "\"g17",
            "g17\"",
            "\"g1\" \"g2\"",
            "\"g1\",",
            ",",
            "*, \"g1\"",
            "* *",
            "w/\"g1\"",
            "\"a b\"",
            "\"\u{e9}\"",
        ] {
            let found = condition(&[(IF_MATCH, value.as_bytes())]);
            assert!(
                matches!(found, Err(HttpError::Parameter(_))),
                "{value}: {found:?}"
            );
        }
        for value in ["", "\"g17\"", "**"] {
            let found = condition(&[(IF_NONE_MATCH, value.as_bytes())]);
            assert!(
                matches!(found, Err(HttpError::Parameter(_))),
                "{value}: {found:?}"
            );
        }
        assert!(condition(&[(IF_MATCH, b"\"\xff\"")]).is_err());
    }
}
