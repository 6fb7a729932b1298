//! Who calls, and why not.
//!
//! Owns how a request is told from whom it is. It must not know which role an endpoint needs.

use std::fmt;

use axum::extract::Request;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use vmm::http::Problem;
use vmm::http::server::UnixPeer;

use super::Access;
use super::listener::TlsPeer;
use super::role::Role;

/// Who is at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process of this host.
    Unix(UnixPeer),
    /// Somebody with a certificate.
    Tls(TlsPeer),
    /// It is not known who: nobody comes in that way.
    Unknown,
}

impl Peer {
    /// As the server says.
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

/// For the audit: `uid 0 pid 1234`, `CN=ops (0123456789abcdef) from 192.0.2.1:5000`.
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
                } = peer;
                write!(f, "{subject} ({fingerprint}) from {address}")
            }
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// What a caller may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) role: Role,
    /// The name of its token, if it needs one.
    pub(super) token: Option<String>,
}

/// Why a request goes no further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// No token, or several.
    #[error("one header `Authorization: Bearer TOKEN` is needed")]
    NoToken,
    /// Basic, Digest, ….
    #[error("the header `Authorization` has another scheme than Bearer")]
    Scheme,
    /// Not one of ours.
    #[error("this token is not known here")]
    UnknownToken,
    /// Not enough.
    #[error("this needs the role {needed}, and the token {name} has {has}")]
    Role {
        /// The token's name.
        name: String,
        /// Its role.
        has: Role,
        /// What the endpoint needs.
        needed: Role,
    },
    /// The server does not say who calls.
    #[error("it is not known who calls")]
    UnknownPeer,
}

impl Problem for Refused {
    fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoToken => (StatusCode::UNAUTHORIZED, "no_token"),
            Self::Scheme => (StatusCode::UNAUTHORIZED, "wrong_scheme"),
            Self::UnknownToken => (StatusCode::UNAUTHORIZED, "unknown_token"),
            Self::Role { .. } => (StatusCode::FORBIDDEN, "role_too_low"),
            Self::UnknownPeer => (StatusCode::FORBIDDEN, "unknown_caller"),
        }
    }

    fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnknownToken => Some(
                "the file given with --tokens has its SHA-256 (`printf %s TOKEN | sha256sum`); after a \
                 change of it the daemon needs SIGHUP",
            ),
            Self::Role { .. } => Some(
                "use another token, or give this one another role in the file given with --tokens",
            ),
            _ => None,
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let mut response = self.to_response();
        if response.status() == StatusCode::UNAUTHORIZED {
            // RFC 6750, section 3: without a token no error is named.
            let challenge = match self {
                Self::UnknownToken => "Bearer realm=\"bellhop\", error=\"invalid_token\"",
                _ => "Bearer realm=\"bellhop\"",
            };
            let challenge = HeaderValue::from_static(challenge);
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

impl Access {
    /// What the one who sent this may do.
    pub(super) fn caller(&self, peer: &Peer, headers: &HeaderMap) -> Result<Caller, Refused> {
        match peer {
            Peer::Unix(_) => Ok(Caller {
                role: Role::Admin,
                token: None,
            }),
            Peer::Tls(_) => {
                let tokens = self.tokens().ok_or(Refused::UnknownPeer)?;
                let token = tokens.find(bearer(headers)?).ok_or(Refused::UnknownToken)?;
                Ok(Caller {
                    role: token.role,
                    token: Some(token.name.clone()),
                })
            }
            Peer::Unknown => Err(Refused::UnknownPeer),
        }
    }
}

impl Caller {
    /// Whether this role is enough.
    pub(super) fn may(&self, needed: Role) -> Result<(), Refused> {
        if self.role >= needed {
            Ok(())
        } else {
            Err(Refused::Role {
                name: self.token.clone().unwrap_or_default(),
                has: self.role,
                needed,
            })
        }
    }
}

/// The token of a request (RFC 6750, section 2.1; the scheme in upper or lower case as in RFC 9110,
/// section 11.1).
fn bearer(headers: &HeaderMap) -> Result<&[u8], Refused> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (given.next(), given.next()) else {
        return Err(Refused::NoToken);
    };
    let value = value.as_bytes().trim_ascii();
    let end = value.iter().position(|&byte| byte == b' ');
    let (scheme, token) = value.split_at(end.unwrap_or(value.len()));
    if !scheme.eq_ignore_ascii_case(b"Bearer") {
        return Err(Refused::Scheme);
    }
    match token.trim_ascii_start() {
        [] => Err(Refused::NoToken),
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
            bearer(&headers).map(<[u8]>::to_vec)
        };
        assert_eq!(of(&["Bearer abc"]), Ok(b"abc".to_vec()));
        assert_eq!(of(&["bEARER   abc "]), Ok(b"abc".to_vec()));
        assert_eq!(of(&["Bearer a b"]), Ok(b"a b".to_vec()));
        assert_eq!(of(&[]), Err(Refused::NoToken));
        assert_eq!(of(&["Bearer"]), Err(Refused::NoToken));
        assert_eq!(of(&["Bearer "]), Err(Refused::NoToken));
        assert_eq!(of(&["Bearer a", "Bearer b"]), Err(Refused::NoToken));
        for other in [
            "Basic abc",
            "abc",
            "",
            "Bearerabc",
            "Token abc",
            "Bearer\tabc",
        ] {
            assert_eq!(of(&[other]), Err(Refused::Scheme), "{other:?}");
        }
    }

    #[test]
    fn a_caller_of_whom_nothing_is_known_may_nothing() {
        let access = Access::new(None).unwrap();
        let none = HeaderMap::new();
        let refused = access.caller(&Peer::Unknown, &none);
        assert_eq!(refused, Err(Refused::UnknownPeer));
        let peer = Peer::Tls(TlsPeer {
            address: ([192, 0, 2, 1], 5000).into(),
            subject: "CN=ops".into(),
            fingerprint: "00".into(),
        });
        assert_eq!(peer.to_string(), "CN=ops (00) from 192.0.2.1:5000");
        // Without tokens there is no TCP, so nobody can come by it.
        assert_eq!(access.caller(&peer, &none), Err(Refused::UnknownPeer));
        let here = Peer::Unix(UnixPeer {
            uid: 7,
            pid: Some(9),
        });
        assert_eq!(here.to_string(), "uid 7 pid 9");
        assert_eq!(access.caller(&here, &none).unwrap().role, Role::Admin);
    }

    #[test]
    fn a_token_may_do_what_its_role_includes_and_no_more() {
        use Role::{Admin, Operate, Read};
        for (method, path, least) in [
            (Method::GET, "/v1/vms/a", Read),
            (Method::PATCH, "/v1/vms/a", Operate),
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
                };
                let refused = Refused::Role {
                    name: "ops".to_owned(),
                    has: role,
                    needed,
                };
                let expected = if role >= least { Ok(()) } else { Err(refused) };
                assert_eq!(caller.may(needed), expected, "{role}: {method} {path}");
            }
        }
    }
}
