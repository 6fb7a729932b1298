//! Revoked certificates, with real ones.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, DnType,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};

use super::super::caller::Peer;
use super::super::listener::TlsPeer;
use super::super::{Access, AccessFiles};
use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn authority() -> (Certificate, Issuer<'static, KeyPair>) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // Each test authority has the same name and its own key.
    let name = &mut authority.distinguished_name;
    name.push(DnType::CommonName, "authority");
    let key = KeyPair::generate().unwrap();
    let certificate = authority.self_signed(&key).unwrap();
    (certificate, Issuer::new(authority, key))
}

/// A site with an authority, a node and two clients, with the serial numbers 1 and 2.
struct Site {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    clients: [Vec<CertificateDer<'static>>; 2],
}

impl Site {
    fn new(test: &str) -> Self {
        let name = format!("node-crl-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        let (certificate, issuer) = authority();
        let sign = |serial: u64, key: &KeyPair| {
            let mut params = CertificateParams::new(vec!["node".to_owned()]).unwrap();
            params.serial_number = Some(SerialNumber::from(serial));
            params.signed_by(key, &issuer).unwrap()
        };
        let key = KeyPair::generate().unwrap();
        let node = sign(9, &key);
        let clients = [1, 2].map(|serial| vec![sign(serial, &key).der().clone()]);
        let site = Self {
            directory,
            issuer,
            clients,
        };
        site.write("ca.crt", &certificate.pem());
        site.write("node.crt", &node.pem());
        site.write("node.key", &key.serialize_pem());
        // The result of `printf %s test | sha256sum`.
        let hash = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        site.write("tokens", &format!("admin ops {hash}\n"));
        site
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// Writes a list with these serial numbers, which was issued two days ago.
    fn revoke(&self, issuer: &Issuer<'_, KeyPair>, serials: &[u64], lifetime: Duration) -> String {
        let issued = SystemTime::now() - 2 * DAY;
        let revoked = serials.iter().map(|&serial| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: issued.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: issued.into(),
            next_update: (issued + lifetime).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let pem = list.signed_by(issuer).unwrap().pem().unwrap();
        self.write("ca.crl", &pem);
        pem
    }

    fn files(&self) -> AccessFiles {
        let file = |name: &str| self.directory.join(name);
        AccessFiles {
            certificates: CertificateFiles {
                certificate: file("node.crt"),
                key: file("node.key"),
                client_ca: file("ca.crt"),
                client_crl: Some(file("ca.crl")),
            },
            tokens: file("tokens"),
        }
    }

    /// Why each client is refused; `None` if it is accepted.
    fn refusals(&self) -> [Option<String>; 2] {
        let tls = Tls::load(&self.files().certificates).unwrap();
        let clients = self.clients.each_ref();
        clients.map(|chain| {
            tls.verify_client(chain)
                .err()
                .map(|error| error.to_string())
        })
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn a_revoked_client_is_refused() {
    let site = Site::new("revoked");
    site.revoke(&site.issuer, &[], 9 * DAY);
    assert_eq!(site.refusals(), [None, None]);
    site.revoke(&site.issuer, &[1], 9 * DAY);
    let [first, second] = site.refusals();
    assert!(first.unwrap().contains("Revoked"));
    assert_eq!(second, None);
}

#[test]
fn a_list_that_proves_nothing_refuses_every_client() {
    let site = Site::new("unproven");
    // It has expired.
    site.revoke(&site.issuer, &[1], DAY);
    for refusal in site.refusals() {
        let refusal = refusal.unwrap();
        assert!(refusal.contains("evocation"), "{refusal}");
    }
    // Another authority of that name has signed it.
    site.revoke(&authority().1, &[1], 9 * DAY);
    assert!(site.refusals().iter().all(Option::is_some));
    // It is of an authority with another name.
    let mut other = CertificateParams::default();
    other.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    other.key_usages = vec![KeyUsagePurpose::CrlSign];
    let other = Issuer::new(other, KeyPair::generate().unwrap());
    site.revoke(&other, &[], 9 * DAY);
    assert!(site.refusals().iter().all(Option::is_some));
}

#[test]
fn a_damaged_list_is_an_error_with_its_name() {
    let site = Site::new("damaged");
    let pem = site.revoke(&site.issuer, &[1], 9 * DAY);
    let load = || Tls::load(&site.files().certificates).map(drop);
    load().unwrap();
    let error = || {
        let error = load().unwrap_err().to_string();
        assert!(error.contains("ca.crl"), "{error}");
        error
    };
    let certificate = fs::read_to_string(site.directory.join("ca.crt")).unwrap();
    for text in ["", "no list", certificate.as_str()] {
        site.write("ca.crl", text);
        assert!(error().contains("no list of revoked certificates in PEM"));
    }
    let lines: Vec<&str> = pem.lines().collect();
    let body = lines.len() - 2;
    for kept in 0..body {
        let mut cut = lines[..=kept].to_vec();
        cut.push(lines[lines.len() - 1]);
        site.write("ca.crl", &cut.join("\n"));
        error();
    }
    fs::remove_file(site.directory.join("ca.crl")).unwrap();
    assert!(error().contains("cannot read"));
}

#[test]
fn a_reload_counts_for_connections_that_exist() {
    let site = Site::new("reload");
    site.revoke(&site.issuer, &[], 9 * DAY);
    let access = Access::new(Some(site.files())).unwrap();
    let [first, second] = site.clients.each_ref().map(|chain| {
        Peer::Tls(TlsPeer {
            address: ([192, 0, 2, 1], 5000).into(),
            subject: "CN=client".into(),
            fingerprint: "00".into(),
            chain: chain.as_slice().into(),
            loads: access.loads(),
        })
    });
    let mut headers = HeaderMap::new();
    headers.insert(AUTHORIZATION, "Bearer test".parse().unwrap());
    let refused = |peer: &Peer| {
        let caller = access.caller(peer, &headers);
        caller.err().map(|error| error.answer().1)
    };
    assert_eq!((refused(&first), refused(&second)), (None, None));
    site.revoke(&site.issuer, &[1], 9 * DAY);
    assert_eq!(refused(&first), None);
    access.reload().unwrap();
    assert_eq!(
        (refused(&first), refused(&second)),
        (Some("unknown_caller"), None)
    );
    // A damaged list changes nothing.
    site.write("ca.crl", "damaged");
    access.reload().unwrap_err();
    assert_eq!(
        (refused(&first), refused(&second)),
        (Some("unknown_caller"), None)
    );
}
