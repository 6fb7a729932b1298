//! The terms of one migration that two daemons agree on: a secret, and a certificate for each side.
//!
//! The destination's daemon generates the secret, each daemon its side's key. The daemons exchange
//! the rest over their own authenticated connection, and pass it to their VMs' processes over the
//! processes' API sockets. It is in no file, argument or environment.

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use utoipa::ToSchema;

/// Bytes of a secret.
const SIZE: usize = 32;

/// A secret of both ends of one migration. A comparison takes the same time for all secrets.
/// The default, all zeros, is that of a source without a secret.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MigrationSecret(pub [u8; SIZE]);

vdpa::opaque_debug!(MigrationSecret);

impl PartialEq for MigrationSecret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for MigrationSecret {}

impl From<MigrationSecret> for String {
    fn from(secret: MigrationSecret) -> Self {
        secret.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A text that is no secret. The message does not contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a secret of a migration has 64 hexadecimal digits")]
pub struct BadSecret;

impl TryFrom<String> for MigrationSecret {
    type Error = BadSecret;

    fn try_from(text: String) -> Result<Self, BadSecret> {
        let mut secret = Self::default();
        if text.len() != 2 * SIZE {
            return Err(BadSecret);
        }
        for (byte, digits) in secret.0.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| BadSecret)?;
            // The conversion alone would accept a sign.
            if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(BadSecret);
            }
            *byte = u8::from_str_radix(digits, 16).map_err(|_| BadSecret)?;
        }
        Ok(secret)
    }
}

/// The terms of a migration between the machines of two node daemons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Pairing {
    /// A destination ignores sources with another secret.
    #[schema(value_type = String, pattern = "^[0-9a-f]{64}$")]
    pub secret: MigrationSecret,
    /// The certificates of this migration, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<PairedTls>,
}

/// The certificates of one migration. Each side accepts only the other's, from no authority.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PairedTls {
    /// The certificate of this side (PEM).
    pub certificate: String,
    /// Its private key (PEM).
    pub key: String,
    /// The certificate of the other side (PEM).
    pub peer: String,
}

vdpa::opaque_debug!(PairedTls);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_64_digits_and_appears_in_no_message() {
        let text = "0123456789abcdef".repeat(4);
        let secret: MigrationSecret = serde_json::from_value(text.clone().into()).unwrap();
        assert_eq!(serde_json::to_value(secret).unwrap(), text);
        assert_eq!(format!("{secret:?}"), "MigrationSecret { .. }");
        for bad in [
            "",
            &text[1..],
            &format!("{text}0"),
            &text.replace("01", "+1"),
            &text.replace("01", "0g"),
            &text.replace("01", "ä"),
        ] {
            let error = MigrationSecret::try_from(bad.to_owned()).unwrap_err();
            assert!(bad.is_empty() || !error.to_string().contains(bad));
        }
    }

    #[test]
    fn secrets_are_equal_only_in_all_bytes() {
        let secret = MigrationSecret([7; SIZE]);
        assert_eq!(secret, MigrationSecret([7; SIZE]));
        for index in 0..SIZE {
            let mut other = secret;
            other.0[index] ^= 1;
            assert_ne!(secret, other, "{index}");
        }
    }

    #[test]
    fn a_pairing_shows_neither_secret_nor_key() {
        let pairing = Pairing {
            secret: MigrationSecret([0xab; SIZE]),
            tls: Some(PairedTls {
                certificate: "a certificate".to_owned(),
                key: "a key".to_owned(),
                peer: "another".to_owned(),
            }),
        };
        let shown = format!("{pairing:?}");
        assert!(
            !shown.contains("abab") && !shown.contains("a key"),
            "{shown}"
        );
    }
}
