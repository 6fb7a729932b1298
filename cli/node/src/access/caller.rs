//! Identifies the caller of a request, and the reason of a refusal.
//!
//! Owns the identification of callers. `role.rs` has the role that an endpoint needs.

use std::fmt;

use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bellhop_api::node::Role;
use vmm::http::server::UnixPeer;

use super::Access;
use super::listener::TlsPeer;
use super::tokens::Tokens;
use crate::error::Error;

/// The other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process of this host.
    Unix(UnixPeer),
    /// A client with a certificate.
    Tls(TlsPeer),
    /// Unknown: such a caller is refused.
    Unknown,
}

impl Peer {
    /// The peer that the server recorded in the request.
    pub(super) fn of(request: &Request) -> Self {
        let extensions = request.extensions();
        if let Some(peer) = extensions.get::<TlsPeer>() {
            Self::Tls(peer.clone())
        } else if let Some(peer) = extensions.get::<UnixPeer>() {
            Self::Unix(*peer)
        } else {
            Self::Unknown
        }
    }
}

/// The form for the audit log: `uid 0 pid 1234`, `CN=ops (0123456789abcdef) from 192.0.2.1:5000`.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(peer) => match peer.pid {
                Some(pid) => write!(f, "uid {} pid {pid}", peer.uid),
                None => write!(f, "uid {}", peer.uid),
            },
            Self::Tls(peer) => {
                let TlsPeer {
                    address,
                    subject,
                    fingerprint,
                    ..
                } = peer;
                write!(f, "{subject} ({fingerprint}) from {address}")
            }
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// The rights of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) role: Role,
    /// The name of its token, if it needs one.
    pub(super) token: Option<String>,
    /// The time from which its token grants nothing.
    pub(super) expires: Option<String>,
}

/// The code of a token that is not in the file.
const UNKNOWN_TOKEN: &str = "unknown_token";
/// The code of a caller that cannot be identified.
const UNKNOWN_CALLER: &str = "unknown_caller";
/// The code of a token that has expired.
const EXPIRED_TOKEN: &str = "expired_token";

fn unauthorized(code: &'static str, message: &str) -> Error {
    Error::answered(StatusCode::UNAUTHORIZED, code, message)
}

fn unknown_caller() -> Error {
    let message = "cannot identify the caller";
    Error::answered(StatusCode::FORBIDDEN, UNKNOWN_CALLER, message)
}

/// The answer to a request that is not allowed.
pub(super) fn refusal(error: Error) -> Response {
    let (status, code) = error.answer();
    let mut response = error.into_response();
    if status == StatusCode::UNAUTHORIZED {
        // RFC 6750, section 3: without a token the challenge names no error.
        let challenge = if [UNKNOWN_TOKEN, EXPIRED_TOKEN].contains(&code) {
            "Bearer realm=\"bellhop\", error=\"invalid_token\""
        } else {
            "Bearer realm=\"bellhop\""
        };
        let challenge = HeaderValue::from_static(challenge);
        response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
    }
    response
}

impl Access {
    /// The rights of the sender of a request.
    pub(super) fn caller(&self, peer: &Peer, headers: &HeaderMap) -> Result<Caller, Error> {
        match peer {
            Peer::Unix(_) => Ok(Caller {
                role: Role::Admin,
                token: None,
                expires: None,
            }),
            Peer::Tls(peer) => {
                self.verify_again(peer)?;
                let tokens = self.tokens().ok_or_else(unknown_caller)?;
                Caller::of_token(&tokens, bearer(headers)?)
            }
            Peer::Unknown => Err(unknown_caller()),
        }
    }

    /// Checks the certificate of a connection from before the last reload.
    fn verify_again(&self, peer: &TlsPeer) -> Result<(), Error> {
        if peer.loads == self.loads() {
            return Ok(());
        }
        let tls = self.tls().ok_or_else(unknown_caller)?;
        tls.verify_client(&peer.chain).map_err(|error| {
            let message = format!("the certificate of {} is no longer accepted", peer.subject);
            let error =
                Error::answered(StatusCode::FORBIDDEN, UNKNOWN_CALLER, message).because(error);
            error.hint("connect again with another certificate")
        })
    }
}

impl Caller {
    /// The rights of this token.
    fn of_token(tokens: &Tokens, token: &[u8]) -> Result<Self, Error> {
        let token = tokens.find(token).ok_or_else(|| {
            unauthorized(UNKNOWN_TOKEN, "unknown token").hint(
                "the file of --tokens needs its SHA-256 (`printf %s TOKEN | sha256sum`); after a \
                 change send SIGHUP to the daemon",
            )
        })?;
        if let Some(time) = token.expires.as_ref().filter(|_| token.has_expired()) {
            let message = format!("the token {} expired at {time}", token.name);
            return Err(unauthorized(EXPIRED_TOKEN, &message)
                .hint("`bellhop token create` on the daemon's host creates another one"));
        }
        Ok(Self {
            role: token.role,
            token: Some(token.name.clone()),
            expires: token.expires.clone(),
        })
    }

    /// Checks whether the caller's role is sufficient.
    pub(super) fn may(&self, needed: Role) -> Result<(), Error> {
        if self.role >= needed {
            Ok(())
        } else {
            let (name, has) = (self.token.as_deref().unwrap_or_default(), self.role);
            let message =
                format!("the request needs the role {needed}, but the token {name} has {has}");
            Err(
                Error::answered(StatusCode::FORBIDDEN, "role_too_low", message).hint(
                    "use another token, or change the role of this one in the file of --tokens",
                ),
            )
        }
    }
}

/// The token of a request (RFC 6750, section 2.1). The scheme is case-insensitive, as in RFC 9110,
/// section 11.1.
fn bearer(headers: &HeaderMap) -> Result<&[u8], Error> {
    let none = || {
        let message = "the request needs one header `Authorization: Bearer TOKEN`";
        unauthorized("no_token", message)
    };
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (given.next(), given.next()) else {
        return Err(none());
    };
    let value = value.as_bytes().trim_ascii();
    let end = value.iter().position(|&byte| byte == b' ');
    let (scheme, token) = value.split_at(end.unwrap_or(value.len()));
    if !scheme.eq_ignore_ascii_case(b"Bearer") {
        let message = "the header `Authorization` must have the scheme Bearer";
        return Err(unauthorized("wrong_scheme", message));
    }
    match token.trim_ascii_start() {
        [] => Err(none()),
        token => Ok(token),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Method;

    use super::super::role;
    use super::*;

    #[test]
    fn a_token_is_taken_from_its_header_only() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_static(value));
            }
            let token = bearer(&headers).map(<[u8]>::to_vec);
            token.map_err(|error| error.answer().1)
        };
        assert_eq!(of(&["Bearer abc"]), Ok(b"abc".to_vec()));
        assert_eq!(of(&["bEARER   abc "]), Ok(b"abc".to_vec()));
        assert_eq!(of(&["Bearer a b"]), Ok(b"a b".to_vec()));
        assert_eq!(of(&[]), Err("no_token"));
        assert_eq!(of(&["Bearer"]), Err("no_token"));
        assert_eq!(of(&["Bearer "]), Err("no_token"));
        assert_eq!(of(&["Bearer a", "Bearer b"]), Err("no_token"));
        for other in [
            "Basic abc",
            "abc",
            "",
            "Bearerabc",
            "Token abc",
            "Bearer\tabc",
        ] {
            assert_eq!(of(&[other]), Err("wrong_scheme"), "{other:?}");
        }
    }

    #[test]
    fn an_unknown_caller_has_no_rights() {
        let access = Access::new(None).unwrap();
        let none = HeaderMap::new();
        let refused = access.caller(&Peer::Unknown, &none).unwrap_err();
        assert_eq!(refused.answer().1, "unknown_caller");
        let peer = Peer::Tls(TlsPeer {
            address: ([192, 0, 2, 1], 5000).into(),
            subject: "CN=ops".into(),
            fingerprint: "00".into(),
            chain: [].into(),
            loads: 0,
        });
        assert_eq!(peer.to_string(), "CN=ops (00) from 192.0.2.1:5000");
        // Without tokens there is no TCP listener, so no client can use it.
        let refused = access.caller(&peer, &none).unwrap_err();
        assert_eq!(refused.answer().1, "unknown_caller");
        let here = Peer::Unix(UnixPeer {
            uid: 7,
            pid: Some(9),
        });
        assert_eq!(here.to_string(), "uid 7 pid 9");
        assert_eq!(access.caller(&here, &none).unwrap().role, Role::Admin);
    }

    #[test]
    fn an_expired_token_is_refused_with_the_reason() {
        // The result of `printf %s test | sha256sum`.
        let hash = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let of = |expiry: &str, token: &[u8]| {
            let text = format!("admin ops {hash} {expiry}");
            let tokens = Tokens::parse(text.as_bytes(), "tokens".as_ref()).unwrap();
            Caller::of_token(&tokens, token)
        };
        assert_eq!(
            of("9999-01-01T00:00:00Z", b"test").unwrap().role,
            Role::Admin
        );
        let refused = of("2026-01-01T00:00:00Z", b"test").unwrap_err();
        let text = refused.to_string();
        assert_eq!(text, "the token ops expired at 2026-01-01T00:00:00Z");
        assert_eq!(refused.answer(), (StatusCode::UNAUTHORIZED, EXPIRED_TOKEN));
        let challenge = refusal(refused).headers()[WWW_AUTHENTICATE].clone();
        assert!(challenge.to_str().unwrap().contains("invalid_token"));
        let unknown = of("2026-01-01T00:00:00Z", b"other").unwrap_err();
        assert_eq!(unknown.answer().1, UNKNOWN_TOKEN);
    }

    #[test]
    fn a_token_has_exactly_the_rights_of_its_role() {
        use Role::{Admin, Operate, Read};
        for (method, path, least) in [
            (Method::GET, "/v1/vms/a", Read),
            (Method::PATCH, "/v1/vms/a", Admin),
            (Method::PUT, "/v1/vms/a/state", Operate),
            (Method::POST, "/v1/vms/a/reset", Operate),
            (Method::PUT, "/v1/vms/a", Admin),
            (Method::DELETE, "/v1/vms/a", Admin),
            (Method::PUT, "/v1/vms/a/nics/b", Admin),
            (Method::PATCH, "/v1/vms/a/nics/b", Admin),
            (Method::DELETE, "/v1/vms/a/nics/b", Admin),
            (Method::PUT, "/v1/vms/a/migration", Admin),
            (Method::POST, "/v1/vms/a/migration", Admin),
            (Method::PATCH, "/v1/vms/a/migration", Admin),
            (Method::DELETE, "/v1/vms/a/migration", Admin),
            (Method::PATCH, "/v1/functions/a", Admin),
            (Method::PUT, "/v1/vdpa-devices/a", Admin),
            (Method::PATCH, "/v1/vdpa-devices/a", Admin),
            (Method::DELETE, "/v1/vdpa-devices/a", Admin),
            (Method::POST, "/v1/unknown", Admin),
        ] {
            let needed = role::needed(&method, path);
            for role in [Read, Operate, Admin] {
                let caller = Caller {
                    role,
                    token: Some("ops".to_owned()),
                    expires: None,
                };
                let refused = caller.may(needed).map_err(|error| error.answer().1);
                let expected = if role >= least {
                    Ok(())
                } else {
                    Err("role_too_low")
                };
                assert_eq!(refused, expected, "{role}: {method} {path}");
            }
        }
    }
}
