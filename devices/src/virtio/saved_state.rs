//! Encodes a backend's state into a [`SavedState`], and checks it when decoding.
//!
//! Owns the envelope (name, version, postcard payload). It must not know a backend's payload. A
//! saved state comes from a file or from another host and is not trusted.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::backend::SavedState;
use crate::Error;

/// Wraps `payload` as version `version` of the state of backend `name`.
///
/// # Errors
/// The state cannot be encoded.
pub fn encode<T: Serialize>(
    name: &'static str,
    version: u32,
    payload: &T,
) -> Result<SavedState, Error> {
    let payload = postcard::to_stdvec(payload).map_err(|source| {
        Error::other(format!("cannot encode the state of {name}")).because(source)
    })?;
    Ok(SavedState {
        name: name.to_owned(),
        version,
        payload,
    })
}

/// Unwraps the payload of a state of backend `name`, version `version`.
///
/// # Errors
/// Another name or version; a payload that is truncated, malformed or too long.
pub fn decode<T: DeserializeOwned>(
    state: &SavedState,
    name: &'static str,
    version: u32,
) -> Result<T, Error> {
    if state.name != name {
        // A hostile name must not flood the log.
        let found: String = state.name.chars().take(64).collect();
        return Err(Error::other(format!(
            "this is the state of {found:?}, not of {name}"
        )));
    }
    if state.version != version {
        return Err(Error::other(format!(
            "the state of {name} has version {}; this program reads version {version}",
            state.version
        )));
    }
    let (payload, rest) = postcard::take_from_bytes(&state.payload).map_err(|source| {
        Error::other(format!("the state of {name} is malformed")).because(source)
    })?;
    match rest.len() {
        0 => Ok(payload),
        extra => Err(Error::other(format!(
            "the state of {name} has {extra} bytes too many"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_states_of_other_backends() {
        let good = encode("thing", 3, &(7u16, 300u32)).unwrap();
        assert_eq!(decode::<(u16, u32)>(&good, "thing", 3).unwrap(), (7, 300));

        let mut other = good.clone();
        other.name = "x".repeat(1 << 20);
        let error = decode::<(u16, u32)>(&other, "thing", 3).unwrap_err();
        assert!(error.to_string().len() < 200);

        let refused = |state: &SavedState, version| {
            let error = decode::<(u16, u32)>(state, "thing", version).unwrap_err();
            error.to_string()
        };
        assert!(refused(&good, 4).contains("has version 3"));
        let mut short = good.clone();
        short.payload.pop();
        assert!(refused(&short, 3).contains("malformed"));
        let mut long = good;
        long.payload.push(0);
        assert!(refused(&long, 3).contains("1 bytes too many"));
    }
}
