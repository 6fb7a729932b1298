//! `bellhop pki`: an authority and certificates for the nodes and clients of a small site.
//!
//! Owns the content of the certificates. All files are in one directory: `ca.key`, `ca.crt`,
//! `ca.crl`, and `NAME.key` and `NAME.crt` of each node or client.

use std::fs::{self, DirBuilder};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bellhop_common::client::Remotes;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::private_file;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber,
};
use serde_json::json;
use vmm::credentials::{self, Holder, Secrecy};
use x509_cert::crl::CertificateList;
use x509_cert::der::Decode as _;

use crate::units::seconds;

/// The name of the authority's files.
const AUTHORITY: &str = "ca";

/// The authority in its certificate. Other sites have the same name and another key.
const SUBJECT: &str = "Bellhop site authority";

/// The maximum difference between the clocks of hosts.
const SKEW: Duration = Duration::from_secs(86_400);

/// Create an authority and certificates for a small site, and revoke them
///
/// A node's certificate works for its API, for its requests to other nodes and for migrations. A
/// client's certificate only identifies the client. A larger site has its own authority.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop pki init site
  bellhop pki issue site node1 --san 192.0.2.1
  bellhop pki issue site node2 --san 192.0.2.2
  bellhop pki issue --client site alice
  bellhop pki revoke site alice

Copy ca.crt, node1.crt and node1.key to node1 and name them in /etc/bellhop/bellhop.toml. ca.key
signs certificates and stays here.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Init(Init),
    Issue(Issue),
    Revoke(Revoke),
}

/// Create an authority: ca.key and ca.crt
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop pki init site")]
struct Init {
    /// The directory for its files, which is created if it does not exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// How long the authority is valid
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "3650d",
        value_parser = seconds(1..=u32::MAX)
    )]
    expires: u32,
}

/// Issue a certificate: NAME.key and NAME.crt
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop pki issue site node1
  bellhop pki issue site node1 --san node1.example.com --san 192.0.2.1 --expires 90d
  bellhop pki issue --client site alice")]
struct Issue {
    /// The directory of the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// The node's host name or IP address, as in https://NAME:PORT; or the name of a client
    #[arg(value_name = "NAME", value_parser = name)]
    name: String,

    /// Another host name or IP address of the node (may be repeated)
    #[arg(long, value_name = "NAME", value_parser = name)]
    san: Vec<String>,

    /// The certificate is for a client: it can neither serve as a node nor send VMs to one
    #[arg(long, conflicts_with = "san")]
    client: bool,

    /// How long the certificate is valid
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "825d",
        value_parser = seconds(1..=u32::MAX)
    )]
    expires: u32,
}

/// Revoke certificates: ca.crl
///
/// Adds certificates of `bellhop pki issue` to the list of revoked ones. Copy the list to each node
/// as the file of --tls-crl, and reload the daemon there: it refuses their holders from the next
/// request on.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop pki revoke site alice
  bellhop pki revoke site alice node2 --expires 90d
  bellhop pki revoke site")]
struct Revoke {
    /// The directory of the authority
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// The names of the certificates; without one only the list's validity changes
    #[arg(value_name = "NAME", value_parser = name)]
    names: Vec<String>,

    /// How long the list is valid: afterwards daemons refuse all clients, until they have a new one
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "3650d",
        value_parser = seconds(1..=u32::MAX)
    )]
    expires: u32,
}

/// Checks a name, which is also that of a file.
fn name(text: &str) -> Result<String, String> {
    if Remotes::is_name(text) || text.parse::<IpAddr>().is_ok() {
        Ok(text.to_owned())
    } else {
        Err("neither a host name nor an IP address".to_owned())
    }
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let (directory, name) = match &arguments.command {
        Command::Init(init) => {
            create_authority(init)?;
            (&init.directory, AUTHORITY)
        }
        Command::Issue(issue) => {
            issue_certificate(issue)?;
            (&issue.directory, issue.name.as_str())
        }
        Command::Revoke(revoke) => {
            let (list, count) = revoke_certificates(revoke)?;
            let written = json!({ "crl": list, "revoked": count });
            return format.print(&written, || format!("{}\n", list.display()));
        }
    };
    let (certificate, key) = files(directory, name);
    let written = json!({ "name": name, "certificate": certificate, "key": key });
    let text = || format!("{}\n{}\n", certificate.display(), key.display());
    format.print(&written, text)
}

fn create_authority(init: &Init) -> Result<(), Error> {
    let mut directory = DirBuilder::new();
    let created = directory
        .recursive(true)
        .mode(0o700)
        .create(&init.directory);
    let shown = init.directory.display();
    created.map_err(Error::context(format!("cannot create {shown}")))?;
    let mut authority = authority();
    limit(&mut authority, init.expires);
    let key = KeyPair::generate().map_err(unmade)?;
    let certificate = authority.self_signed(&key).map_err(unmade)?;
    write(&init.directory, AUTHORITY, &certificate, &key)
}

fn issue_certificate(issue: &Issue) -> Result<(), Error> {
    let issuer = issuer(&issue.directory)?;
    let names = std::iter::once(&issue.name).chain(&issue.san).cloned();
    let mut certificate = CertificateParams::new(names.collect::<Vec<_>>()).map_err(unmade)?;
    let subject = &mut certificate.distinguished_name;
    subject.push(DnType::CommonName, issue.name.as_str());
    certificate.use_authority_key_identifier_extension = true;
    certificate.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    certificate.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if !issue.client {
        let usages = &mut certificate.extended_key_usages;
        usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    limit(&mut certificate, issue.expires);
    let key = KeyPair::generate().map_err(unmade)?;
    let certificate = certificate.signed_by(&key, &issuer).map_err(unmade)?;
    write(&issue.directory, &issue.name, &certificate, &key)
}

/// The authority in this directory.
fn issuer(directory: &Path) -> Result<Issuer<'static, KeyPair>, Error> {
    let (_, path) = files(directory, AUTHORITY);
    if !path.exists() {
        let shown = directory.display();
        let message = format!("{shown} has no authority: `bellhop pki init {shown}` creates one");
        return Err(Error::not_there(message));
    }
    let pem = credentials::read(&path, Secrecy::Secret, Holder::Caller)?;
    let shown = path.display();
    let bad = || format!("cannot read {shown}: it is not a private key of `bellhop pki init`");
    let pem = String::from_utf8(pem).map_err(Error::context(bad()))?;
    let signer = KeyPair::from_pem(&pem).map_err(Error::context(bad()))?;
    Ok(Issuer::new(authority(), signer))
}

/// Writes the list with the revoked certificates so far and these. Returns its path, and the number
/// of certificates in it.
fn revoke_certificates(revoke: &Revoke) -> Result<(PathBuf, usize), Error> {
    let issuer = issuer(&revoke.directory)?;
    let path = revoke.directory.join(format!("{AUTHORITY}.crl"));
    let shown = path.display();
    let unwritten = || Error::context(format!("cannot write {shown}"));
    let _lock = private_file::lock(&path).map_err(unwritten())?;
    let mut revoked = if path.exists() {
        revoked_in(&path)?
    } else {
        Vec::new()
    };
    let now = SystemTime::now();
    for name in &revoke.names {
        let serial_number = serial_of(&revoke.directory, name)?;
        if revoked.iter().all(|one| one.serial_number != serial_number) {
            revoked.push(revoked_since(serial_number, now));
        }
    }
    let count = revoked.len();
    let lifetime = Duration::from_secs(revoke.expires.into());
    let number = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let list = CertificateRevocationListParams {
        this_update: now.checked_sub(SKEW).unwrap_or(now).into(),
        next_update: now.checked_add(lifetime).unwrap_or(now).into(),
        // It must grow.
        crl_number: SerialNumber::from(number.as_secs()),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let unmade = || Error::context("cannot create the list of revoked certificates");
    let list = list.signed_by(&issuer).map_err(unmade())?;
    let pem = list.pem().map_err(unmade())?;
    private_file::replace(&path, pem.as_bytes()).map_err(unwritten())?;
    Ok((path, count))
}

fn revoked_since(serial_number: SerialNumber, time: SystemTime) -> RevokedCertParams {
    RevokedCertParams {
        serial_number,
        revocation_time: time.into(),
        reason_code: None,
        invalidity_date: None,
    }
}

/// The certificates in a list that this command wrote.
fn revoked_in(path: &Path) -> Result<Vec<RevokedCertParams>, Error> {
    let mut revoked = Vec::new();
    for list in credentials::revocations(path, Holder::Caller)? {
        let shown = path.display();
        let bad = Error::context(format!("{shown} is not a list of revoked certificates"));
        let list: CertificateList = CertificateList::from_der(&list).map_err(bad)?;
        for one in list
            .tbs_cert_list
            .revoked_certificates
            .into_iter()
            .flatten()
        {
            let serial_number = SerialNumber::from_slice(one.serial_number.as_bytes());
            let time = one.revocation_date.to_system_time();
            revoked.push(revoked_since(serial_number, time));
        }
    }
    Ok(revoked)
}

/// The serial number of an issued certificate.
fn serial_of(directory: &Path, name: &str) -> Result<SerialNumber, Error> {
    let (path, _) = files(directory, name);
    let shown = path.display();
    if !path.exists() {
        let message = format!("cannot revoke {name}: {shown} does not exist");
        return Err(Error::not_there(message).hint(
            "copy the certificate there; or revoke the client's token, which it also needs",
        ));
    }
    let chain = credentials::certificates(&path, Holder::Caller)?;
    let bad = || format!("{shown} is not a certificate");
    let own = chain.first().ok_or_else(|| Error::failed(bad()))?;
    let own = x509_cert::Certificate::from_der(own).map_err(Error::context(bad()))?;
    let serial = own.tbs_certificate().serial_number();
    Ok(SerialNumber::from_slice(serial.as_bytes()))
}

/// The authority's certificate, without its validity.
fn authority() -> CertificateParams {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let subject = &mut authority.distinguished_name;
    subject.push(DnType::CommonName, SUBJECT);
    authority
}

/// Sets the validity: from now on, for so many seconds.
fn limit(certificate: &mut CertificateParams, expires: u32) {
    let now = SystemTime::now();
    let lifetime = Duration::from_secs(expires.into());
    certificate.not_before = now.checked_sub(SKEW).unwrap_or(now).into();
    certificate.not_after = now.checked_add(lifetime).unwrap_or(now).into();
}

fn unmade(source: rcgen::Error) -> Error {
    Error::failed("cannot create the certificate").because(source)
}

/// The paths of a certificate and its key.
fn files(directory: &Path, name: &str) -> (PathBuf, PathBuf) {
    (
        directory.join(format!("{name}.crt")),
        directory.join(format!("{name}.key")),
    )
}

/// Writes a key and its certificate to new files.
fn write(
    directory: &Path,
    name: &str,
    certificate: &Certificate,
    key: &KeyPair,
) -> Result<(), Error> {
    let create = |path: &Path, pem: String, mode| {
        let created = private_file::create(path, pem.as_bytes(), mode);
        created.map_err(|source| {
            let shown = path.display();
            if source.kind() == io::ErrorKind::AlreadyExists {
                Error::conflict(format!("{shown} exists already"))
                    .hint("delete the certificate and the key first if neither is used")
            } else {
                Error::failed(format!("cannot write {shown}")).because(source)
            }
        })
    };
    let (public, private) = files(directory, name);
    create(&private, key.serialize_pem(), 0o600)?;
    create(&public, certificate.pem(), 0o644).inspect_err(|_| {
        // A key without its certificate is useless.
        let _ = fs::remove_file(&private);
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    use clap::Parser;
    use tokio_rustls::rustls::client::WebPkiServerVerifier;
    use tokio_rustls::rustls::client::danger::ServerCertVerifier as _;
    use tokio_rustls::rustls::crypto::ring::default_provider;
    use tokio_rustls::rustls::pki_types::{ServerName, UnixTime};
    use tokio_rustls::rustls::server::WebPkiClientVerifier;
    use tokio_rustls::rustls::{ServerConfig, version};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.arguments)
    }

    fn run(line: &str) -> Result<Code, Error> {
        execute(&parse(line).unwrap(), Format::default())
    }

    #[test]
    fn a_node_is_trusted_as_server_and_client_by_its_site_only() {
        let root = std::env::temp_dir().join(format!("bellhop-pki-{}", std::process::id()));
        let (site, other) = (root.join("site"), root.join("other"));
        let at = site.display();
        assert_eq!(
            run(&format!("pki issue {at} node1")).unwrap_err().code(),
            Code::NotThere
        );
        run(&format!("pki init {at}")).unwrap();
        run(&format!("pki init {}", other.display())).unwrap();
        run(&format!(
            "pki issue {at} node1 --san 192.0.2.1 --san node1.example.com"
        ))
        .unwrap();
        for again in ["init", "issue"] {
            let name = if again == "issue" { " node1" } else { "" };
            let error = run(&format!("pki {again} {at}{name}")).unwrap_err();
            assert_eq!(error.code(), Code::Conflict);
        }
        let mode = |name: &str| {
            let metadata = fs::metadata(site.join(name)).unwrap();
            metadata.permissions().mode() & 0o7777
        };
        assert_eq!((mode("ca.key"), mode("node1.key")), (0o600, 0o600));

        let chain = credentials::certificates(&site.join("node1.crt"), Holder::Service).unwrap();
        let key = credentials::private_key(&site.join("node1.key"), Holder::Service).unwrap();
        let provider = Arc::new(default_provider());
        for (site, trusted) in [(&site, true), (&other, false)] {
            let roots = credentials::authorities(&site.join("ca.crt"), Holder::Service).unwrap();
            let roots = Arc::new(roots);
            let server =
                WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone());
            let server = server.build().unwrap();
            for (name, valid) in [
                ("node1", true),
                ("192.0.2.1", true),
                ("node1.example.com", true),
                ("node2", false),
            ] {
                let name = ServerName::try_from(name).unwrap();
                let verified =
                    server.verify_server_cert(&chain[0], &[], &name, &[], UnixTime::now());
                assert_eq!(verified.is_ok(), trusted && valid, "{name:?}: {verified:?}");
            }
            let client = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
            let client = client.build().unwrap();
            let verified = client.verify_client_cert(&chain[0], &[], UnixTime::now());
            assert_eq!(verified.is_ok(), trusted, "{verified:?}");
        }
        // The key is that of the certificate.
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .unwrap();
        config
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_clients_certificate_identifies_no_node() {
        let name = format!("bellhop-pki-client-{}", std::process::id());
        let site = std::env::temp_dir().join(name);
        let at = site.display();
        run(&format!("pki init {at}")).unwrap();
        // The name does not make it a node's.
        run(&format!("pki issue --client {at} node1")).unwrap();
        let chain = credentials::certificates(&site.join("node1.crt"), Holder::Service).unwrap();
        let roots = credentials::authorities(&site.join("ca.crt"), Holder::Service).unwrap();
        let (roots, provider) = (Arc::new(roots), Arc::new(default_provider()));
        let client = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let client = client.build().unwrap();
        client
            .verify_client_cert(&chain[0], &[], UnixTime::now())
            .unwrap();
        let server = WebPkiServerVerifier::builder_with_provider(roots, provider);
        let server = server.build().unwrap();
        let name = ServerName::try_from("node1").unwrap();
        let refused = server.verify_server_cert(&chain[0], &[], &name, &[], UnixTime::now());
        let refused = format!("{:?}", refused.unwrap_err());
        assert!(refused.contains("InvalidPurpose"), "{refused}");
        parse("pki issue --client site alice --san 192.0.2.1").unwrap_err();
        fs::remove_dir_all(site).unwrap();
    }

    #[test]
    fn revoked_certificates_stay_revoked() {
        let name = format!("bellhop-pki-revoke-{}", std::process::id());
        let site = std::env::temp_dir().join(name);
        let at = site.display();
        let run = |line: &str| run(&format!("pki {line}").replace("site", &at.to_string()));
        assert_eq!(run("revoke site").unwrap_err().code(), Code::NotThere);
        run("init site").unwrap();
        for client in ["alice", "bob", "carol"] {
            run(&format!("issue --client site {client}")).unwrap();
        }
        let accepted = || {
            let roots = credentials::authorities(&site.join("ca.crt"), Holder::Service).unwrap();
            let lists = credentials::revocations(&site.join("ca.crl"), Holder::Service).unwrap();
            let provider = Arc::new(default_provider());
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = verifier.with_crls(lists).enforce_revocation_expiration();
            let verifier = verifier.build().unwrap();
            ["alice", "bob", "carol"].map(|client| {
                let path = site.join(format!("{client}.crt"));
                let chain = credentials::certificates(&path, Holder::Service).unwrap();
                let verified = verifier.verify_client_cert(&chain[0], &[], UnixTime::now());
                verified.is_ok()
            })
        };
        run("revoke site").unwrap();
        assert_eq!(accepted(), [true, true, true]);
        run("revoke site alice").unwrap();
        assert_eq!(accepted(), [false, true, true]);
        // Once more changes nothing, and an unknown one leaves the list alone.
        run("revoke site bob alice --expires 1d").unwrap();
        let error = run("revoke site carol dave").unwrap_err();
        assert_eq!(error.code(), Code::NotThere);
        assert_eq!(accepted(), [false, false, true]);
        assert_eq!(revoked_in(&site.join("ca.crl")).unwrap().len(), 2);
        fs::write(site.join("ca.crl"), "damaged").unwrap();
        run("revoke site carol").unwrap_err();
        fs::remove_dir_all(site).unwrap();
    }

    #[test]
    fn names_are_those_of_hosts_and_leave_the_directory_alone() {
        for good in ["node1", "a.example.com", "192.0.2.1", "2001:db8::1"] {
            parse(&format!("pki issue site {good}")).unwrap();
        }
        for bad in ["../node1", "a/b", "", "*.example.com", "a\nb", "ä"] {
            parse(&format!("pki issue site {bad}")).unwrap_err();
            parse(&format!("pki issue site node1 --san {bad}")).unwrap_err();
        }
    }
}
