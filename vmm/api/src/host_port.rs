//! `HOST:PORT`, as addresses of several kinds end with it.
//!
//! Must not know which kinds those are.

use std::net::Ipv6Addr;

/// The host, a name or an IP address without brackets, and the port, not 0, of a text like `node1:7443` or
/// `[::1]:7443`. `None`: it is no such text.
#[must_use]
pub fn parse(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let bracketed = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = match bracketed {
        Some(host) if host.parse::<Ipv6Addr>().is_ok() => host,
        None if is_name(host) => host,
        _ => return None,
    };
    // `+1` is a number for Rust.
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port
        .parse()
        .ok()
        .filter(|&port: &u16| digits && port != 0)?;
    Some((host.to_owned(), port))
}

fn is_name(host: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !host.is_empty() && host.bytes().all(known)
}
