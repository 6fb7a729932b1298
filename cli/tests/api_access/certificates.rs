//! Certificates for tests: an authority, certificates that it signs, and faulty ones.
//!
//! Owns the required part of DER (ITU-T X.690, RFC 5280), so that no package is needed for it.

use std::net::IpAddr;

use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};

const BOOLEAN: u8 = 0x01;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const DNS_NAME: u8 = 0x82;
const IP_ADDRESS: u8 = 0x87;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;

const ECDSA_WITH_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const PRIME256V1: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 17];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 19];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 37];
const CLIENT_AUTH: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 2];

/// The validity period of a certificate.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Validity {
    Now,
    Past,
    Future,
}

/// A certificate and its key.
pub(crate) struct Identity {
    name: String,
    pub(crate) certificate: Vec<u8>,
    /// PKCS #8.
    pub(crate) key: Vec<u8>,
}

impl Identity {
    /// A self-signed authority.
    pub(crate) fn authority(name: &str) -> Self {
        make(name, None, Validity::Now, false)
    }

    /// A certificate signed by this authority, for a name or an IP address.
    pub(crate) fn signs(&self, name: &str, validity: Validity) -> Self {
        make(name, Some(self), validity, false)
    }

    /// The same for a client only.
    pub(crate) fn signs_client(&self, name: &str) -> Self {
        make(name, Some(self), Validity::Now, true)
    }

    pub(crate) fn certificate_pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate)
    }

    pub(crate) fn key_pem(&self) -> String {
        pem("PRIVATE KEY", &self.key)
    }
}

fn make(name: &str, issuer: Option<&Identity>, validity: Validity, is_client: bool) -> Identity {
    let random = SystemRandom::new();
    let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
    let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
    let key = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).unwrap();
    let signer = issuer.map_or(document.as_ref(), |issuer| &issuer.key);
    let signer = EcdsaKeyPair::from_pkcs8(algorithm, signer, &random).unwrap();

    let (from, to) = match validity {
        Validity::Now => ("200101000000Z", "491231235959Z"),
        Validity::Past => ("200101000000Z", "210101000000Z"),
        Validity::Future => ("480101000000Z", "491231235959Z"),
    };
    let time = |text: &str| element(UTC_TIME, &[text.as_bytes()]);
    let signature_algorithm = element(SEQUENCE, &[&identifier(ECDSA_WITH_SHA256)]);
    let public_key = [&[0], key.public_key().as_ref()].concat();
    let key_algorithm = element(
        SEQUENCE,
        &[&identifier(EC_PUBLIC_KEY), &identifier(PRIME256V1)],
    );
    let mut extensions = match issuer {
        None => {
            let authority = element(SEQUENCE, &[&element(BOOLEAN, &[&[0xff]])]);
            let critical = element(BOOLEAN, &[&[0xff]]);
            let value = element(OCTET_STRING, &[&authority]);
            element(
                SEQUENCE,
                &[&identifier(BASIC_CONSTRAINTS), &critical, &value],
            )
        }
        Some(_) => {
            let subject = match name.parse() {
                Ok(IpAddr::V4(address)) => element(IP_ADDRESS, &[&address.octets()]),
                Ok(IpAddr::V6(address)) => element(IP_ADDRESS, &[&address.octets()]),
                Err(_) => element(DNS_NAME, &[name.as_bytes()]),
            };
            let names = element(SEQUENCE, &[&subject]);
            let value = element(OCTET_STRING, &[&names]);
            element(SEQUENCE, &[&identifier(SUBJECT_ALT_NAME), &value])
        }
    };
    if is_client {
        let usages = element(SEQUENCE, &[&identifier(CLIENT_AUTH)]);
        let value = element(OCTET_STRING, &[&usages]);
        extensions.extend(element(
            SEQUENCE,
            &[&identifier(EXTENDED_KEY_USAGE), &value],
        ));
    }
    let tbs = element(
        SEQUENCE,
        &[
            &element(VERSION, &[&element(INTEGER, &[&[2]])]),
            &element(INTEGER, &[&[1]]),
            &signature_algorithm,
            &distinguished(issuer.map_or(name, |issuer| &issuer.name)),
            &element(SEQUENCE, &[&time(from), &time(to)]),
            &distinguished(name),
            &element(
                SEQUENCE,
                &[&key_algorithm, &element(BIT_STRING, &[&public_key])],
            ),
            &element(EXTENSIONS, &[&element(SEQUENCE, &[&extensions])]),
        ],
    );
    let signature = signer.sign(&random, &tbs).unwrap();
    let signature = element(BIT_STRING, &[&[0], signature.as_ref()]);
    Identity {
        name: name.to_owned(),
        certificate: element(SEQUENCE, &[&tbs, &signature_algorithm, &signature]),
        key: document.as_ref().to_vec(),
    }
}

fn distinguished(name: &str) -> Vec<u8> {
    let value = element(UTF8_STRING, &[name.as_bytes()]);
    let attribute = element(SEQUENCE, &[&identifier(COMMON_NAME), &value]);
    element(SEQUENCE, &[&element(SET, &[&attribute])])
}

fn identifier(content: &[u8]) -> Vec<u8> {
    element(OBJECT_IDENTIFIER, &[content])
}

/// Tag, length in its shortest form, content.
fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = u16::try_from(content.len()).unwrap();
    let [high, low] = length.to_be_bytes();
    let head: &[u8] = match length {
        0..=0x7f => &[tag, low],
        0x80..=0xff => &[tag, 0x81, low],
        _ => &[tag, 0x82, high, low],
    };
    [head, &content].concat()
}

/// RFC 7468.
fn pem(label: &str, bytes: &[u8]) -> String {
    let text = base64(bytes);
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .map(|line| std::str::from_utf8(line).unwrap())
        .collect();
    let body = lines.join("\n");
    format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut group = [0; 3];
        group[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        for index in 0..4_usize {
            let shift = 18 - 6 * u32::try_from(index).unwrap();
            let letter = usize::try_from(bits >> shift & 63).unwrap();
            let letter = char::from(LETTERS[letter]);
            text.push(if index <= chunk.len() { letter } else { '=' });
        }
    }
    text
}
