//! Verifies the certificate of a source: only a node may send a guest.
//!
//! A node's certificate is for a client and for a server (extended key usage, RFC 5280, section
//! 4.2.1.12). One for clients only is refused, so clients of the daemon's API may have the same
//! authority. A certificate without that extension is for both.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};

/// See the module.
#[derive(Debug)]
pub(super) struct NodeVerifier {
    clients: Arc<dyn ClientCertVerifier>,
    authorities: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl NodeVerifier {
    /// A verifier for certificates of these authorities.
    ///
    /// # Errors
    /// There is no authority.
    pub(super) fn new(
        authorities: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let clients = authorities.clone();
        let clients = WebPkiClientVerifier::builder_with_provider(clients, provider.clone());
        Ok(Self {
            clients: clients.build()?,
            authorities,
            provider: provider.clone(),
        })
    }
}

impl ClientCertVerifier for NodeVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .clients
            .verify_client_cert(end_entity, intermediates, now)?;
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.authorities,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.clients
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.clients
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.clients.supported_verify_schemes()
    }
}
