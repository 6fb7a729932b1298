//! Encoding of a backend's state into a [`SavedState`], and the checks on the
//! way back.
//!
//! It owns the envelope (name, version, postcard payload) and must not know
//! what any backend puts inside. A saved state comes from a file or from
//! another host, so nothing in it is trusted.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::backend::SavedState;

/// Why a state could not be encoded or was refused.
#[derive(Debug, thiserror::Error)]
pub enum SavedStateError {
    /// The state could not be encoded.
    #[error("the state of {name} cannot be encoded")]
    Encode {
        /// The backend's name.
        name: &'static str,
        /// What the encoder says.
        #[source]
        source: postcard::Error,
    },
    /// The state was written by another kind of device.
    #[error("this is the state of {found:?}, not of {expected}")]
    Name {
        /// The backend that reads it.
        expected: &'static str,
        /// The name found.
        found: String,
    },
    /// The state was written by a version with another layout.
    #[error("the state of {name} has version {found}; this program reads version {expected}")]
    Version {
        /// The backend's name.
        name: &'static str,
        /// The version that is understood.
        expected: u32,
        /// The version found.
        found: u32,
    },
    /// The payload is truncated or no such structure.
    #[error("the state of {name} is malformed")]
    Decode {
        /// The backend's name.
        name: &'static str,
        /// What the decoder says.
        #[source]
        source: postcard::Error,
    },
    /// The payload goes on after the end of the structure.
    #[error("the state of {name} has {extra} bytes too many")]
    TrailingBytes {
        /// The backend's name.
        name: &'static str,
        /// How many bytes were left over.
        extra: usize,
    },
}

/// Wraps `payload` as version `version` of the state of backend `name`.
///
/// # Errors
/// [`SavedStateError::Encode`].
pub fn encode<T: Serialize>(
    name: &'static str,
    version: u32,
    payload: &T,
) -> Result<SavedState, SavedStateError> {
    Ok(SavedState {
        name: name.to_owned(),
        version,
        payload: postcard::to_stdvec(payload)
            .map_err(|source| SavedStateError::Encode { name, source })?,
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
) -> Result<T, SavedStateError> {
    if state.name != name {
        return Err(SavedStateError::Name {
            expected: name,
            // A hostile name must not flood the log.
            found: state.name.chars().take(64).collect(),
        });
    }
    if state.version != version {
        return Err(SavedStateError::Version {
            name,
            expected: version,
            found: state.version,
        });
    }
    let (payload, rest) = postcard::take_from_bytes(&state.payload)
        .map_err(|source| SavedStateError::Decode { name, source })?;
    if rest.is_empty() {
        Ok(payload)
    } else {
        Err(SavedStateError::TrailingBytes {
            name,
            extra: rest.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_it_did_not_write() {
        let good = encode("thing", 3, &(7u16, 300u32)).unwrap();
        assert_eq!(decode::<(u16, u32)>(&good, "thing", 3).unwrap(), (7, 300));

        let mut other = good.clone();
        other.name = "x".repeat(1 << 20);
        let error = decode::<(u16, u32)>(&other, "thing", 3).unwrap_err();
        assert!(error.to_string().len() < 200);

        assert!(matches!(
            decode::<(u16, u32)>(&good, "thing", 4),
            Err(SavedStateError::Version { found: 3, .. })
        ));
        let mut short = good.clone();
        short.payload.pop();
        assert!(matches!(
            decode::<(u16, u32)>(&short, "thing", 3),
            Err(SavedStateError::Decode { .. })
        ));
        let mut long = good;
        long.payload.push(0);
        assert!(matches!(
            decode::<(u16, u32)>(&long, "thing", 3),
            Err(SavedStateError::TrailingBytes { extra: 1, .. })
        ));
    }
}
