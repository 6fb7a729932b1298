//! The subject of a certificate in the form of RFC 4514, for the audit log.
//!
//! Owns its maximum length, and that it stays one line. rustls has verified the certificate before.

use std::fmt::Write;

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::name::Name;

/// The longest subject that is shown, in characters.
const TEXT_MAX: usize = 256;

/// The subject of a certificate in DER, such as `CN=ops,O=Example`; none if it cannot be read, or
/// is empty.
pub(super) fn of(certificate: &[u8]) -> Option<String> {
    let certificate = Certificate::from_der(certificate).ok()?;
    text(certificate.tbs_certificate().subject())
}

fn text(name: &Name) -> Option<String> {
    let mut text = String::new();
    write!(text, "{name}").ok()?;
    // Control characters that the crate does not escape: a terminal may interpret them, too.
    let mut text = text.replace(char::is_control, "\u{fffd}");
    if let Some((end, _)) = text.char_indices().nth(TEXT_MAX) {
        text.replace_range(end.., "…");
    }
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::pki_types::CertificateDer;
    use tokio_rustls::rustls::pki_types::pem::PemObject;

    use super::*;

    #[test]
    fn a_certificate_that_is_cut_has_no_subject() {
        let pem = include_bytes!("../../../common/src/client/tls/test_client.pem");
        let whole = CertificateDer::from_pem_slice(pem).unwrap();
        assert_eq!(of(&whole).as_deref(), Some("CN=client"));
        for end in 0..whole.len() {
            assert_eq!(of(&whole[..end]), None, "{end}");
        }
    }

    #[test]
    fn a_name_cannot_claim_another_subject() {
        for (name, shown) in [
            ("CN=ops,O=Example", "CN=ops,O=Example"),
            ("CN=ops+O=Example", "CN=ops+O=Example"),
            ("CN=a\\,O\\=b", "CN=a\\,O=b"),
            ("CN=a\nb\u{9b}", "CN=a\\0ab\u{fffd}"),
        ] {
            let name: Name = name.parse().unwrap();
            assert_eq!(text(&name).as_deref(), Some(shown));
        }
        assert_eq!(text(&Name::default()), None);
        let long: Name = format!("CN={}", "x".repeat(5000)).parse().unwrap();
        assert_eq!(text(&long).unwrap().chars().count(), TEXT_MAX + 1);
    }
}
