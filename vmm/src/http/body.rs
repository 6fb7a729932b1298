//! A request's body: limited in size and time, JSON, and without unknown fields.
//!
//! [`super::request_rules`] has checked the content type.

use std::collections::BTreeSet;
use std::fmt;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_LENGTH;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::{DeserializeOwned, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_path_to_error::Segment;

use super::problem::HttpError;
use super::server::{BODY_MAX, BODY_TIME};

/// The body as a `T`.
#[derive(Debug)]
pub struct JsonBody<T>(
    /// The decoded value.
    pub T,
);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, HttpError> {
        let declared = request.headers().get(CONTENT_LENGTH);
        let declared = declared
            .and_then(|length| length.to_str().ok())
            .and_then(|length| length.parse::<usize>().ok());
        if declared.is_some_and(|length| length > BODY_MAX) {
            return Err(HttpError::TooLarge);
        }
        let bytes = tokio::time::timeout(BODY_TIME, receive(request.into_body()))
            .await
            .map_err(|_| HttpError::TooSlow)??;
        parse(&bytes).map(Self)
    }
}

async fn receive(body: Body) -> Result<Vec<u8>, HttpError> {
    match Limited::new(body, BODY_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => Err(HttpError::TooLarge),
        Err(error) => Err(HttpError::Receive(axum::Error::new(error))),
    }
}

/// Reads all of `bytes` as JSON.
///
/// # Errors
/// [`HttpError::Malformed`]; [`HttpError::Invalid`], which names the field.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, HttpError> {
    // First checks the syntax, so that a syntax error is not reported as a missing field.
    let mut whole = serde_json::Deserializer::from_slice(bytes);
    IgnoredAny::deserialize(&mut whole)
        .and_then(|_| whole.end())
        .map_err(HttpError::Malformed)?;
    // Not all types detect duplicates: one that is read through a map would use the last one.
    serde_json::from_slice::<Unique>(bytes).map_err(|error| HttpError::Invalid {
        at: String::new(),
        reason: error.to_string(),
    })?;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut json).map_err(invalid)
}

/// The error for an invalid value, with its position.
#[must_use]
pub fn invalid(error: serde_path_to_error::Error<serde_json::Error>) -> HttpError {
    let mut at = String::new();
    for segment in error.path() {
        let name = match segment {
            Segment::Seq { index } => index.to_string(),
            Segment::Map { key } => key.replace('~', "~0").replace('/', "~1"),
            Segment::Enum { variant } => variant.clone(),
            Segment::Unknown => break,
        };
        at.extend(["/", name.as_str()]);
    }
    let mut reason = error.into_inner().to_string();
    // A type with its own deserializer puts the position first: `nics[0].mac: …`.
    if let Some((place, rest)) = reason.split_once(": ")
        && place
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.[]".contains(&byte))
    {
        for name in place.split(['.', '[', ']']).filter(|name| !name.is_empty()) {
            at.extend(["/", name]);
        }
        reason = rest.to_owned();
    }
    HttpError::Invalid { at, reason }
}

/// Any JSON without duplicate fields.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if seen.contains(&name) {
                return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
            }
            seen.insert(name);
            map.next_value::<Unique>()?;
        }
        Ok(Unique)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unique, A::Error> {
        while items.next_element::<Unique>()?.is_some() {}
        Ok(Unique)
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
        Ok(Unique)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    /// The position at which `body` is not a map of lists of numbers.
    fn place(body: &str) -> String {
        match parse::<BTreeMap<String, Vec<u8>>>(body.as_bytes()) {
            Err(HttpError::Invalid { at, .. }) => at,
            other => panic!("{body}: {other:?}"),
        }
    }

    #[test]
    fn the_place_of_an_error_is_a_pointer() {
        assert_eq!(place(r#"{"a": [1, "x"]}"#), "/a/1");
        assert_eq!(place(r#"{"a/b~": 1}"#), "/a~1b~0");
        assert_eq!(place("[]"), "");
        let error = serde_path_to_error::deserialize::<_, ByHand>(Value::Null).unwrap_err();
        let HttpError::Invalid { at, reason } = invalid(error) else {
            panic!("another error");
        };
        assert_eq!((at.as_str(), reason.as_str()), ("/nics/0/mac", "no MAC: 1"));
    }

    /// A type with its own deserializer.
    #[derive(Debug)]
    struct ByHand;

    impl<'de> Deserialize<'de> for ByHand {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Err(D::Error::custom("nics[0].mac: no MAC: 1"))
        }
    }

    #[test]
    fn a_field_that_is_there_twice_is_named() {
        let taken = r#"{"a": [{"b": null}, {"b": -1.5}],
            "c": {"b": true, "d": "b", "e": 18446744073709551615}}"#;
        assert!(parse::<Value>(taken.as_bytes()).is_ok());
        for twice in [
            r#"{"b": 1, "b": 1}"#,
            r#"{"a": [{"b": {}, "c": 1, "b": {}}]}"#,
            r#"{"b": 1, "\u0062": 2}"#,
        ] {
            match parse::<Value>(twice.as_bytes()) {
                Err(HttpError::Invalid { reason, .. }) => {
                    assert!(reason.contains("duplicate field `b`"), "{reason}");
                }
                other => panic!("{twice}: {other:?}"),
            }
        }
    }
}
