//! `HOST:PORT`, the end of several kinds of addresses.
//!
//! Must not know these kinds.

use std::net::Ipv6Addr;

/// Parses a text like `node1:7443` or `[::1]:7443`: the host, a name or an IP address without
/// brackets, and the port, not 0. `None`: the text has another form.
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
    // Rust parses `+1` as a number.
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
