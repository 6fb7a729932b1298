//! Notifies systemd of the service's state: ready, reloading, stopping, alive.
//!
//! Owns the protocol of sd_notify(3): datagrams of `KEY=VALUE` lines to the Unix socket that
//! `$NOTIFY_SOCKET` names. Without that variable nothing is sent.
//!
//! ```text
//!   start ──> READY=1 ──> (SIGHUP) RELOADING=1, MONOTONIC_USEC=… ──> READY=1 ──> … ──> STOPPING=1
//!               └─ WATCHDOG=1, twice in each $WATCHDOG_USEC
//! ```

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::{ClockId, clock_gettime};

/// The connection to systemd, if it listens.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    socket: Option<(OwnedFd, SocketAddrUnix)>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Configures itself from the environment. A socket that cannot be used is logged: the service
    /// works without it.
    pub(crate) fn from_environment() -> Self {
        let Some(name) = env::var_os("NOTIFY_SOCKET") else {
            return Self::default();
        };
        let watchdog = watchdog(
            env::var("WATCHDOG_USEC").ok().as_deref(),
            env::var("WATCHDOG_PID").ok().as_deref(),
            std::process::id(),
        );
        match open(&name) {
            Ok(socket) => Self {
                socket: Some(socket),
                watchdog,
            },
            Err(error) => {
                tracing::warn!(%error, "cannot use $NOTIFY_SOCKET");
                Self::default()
            }
        }
    }

    /// The interval of [`Self::alive`], if required: half of the watchdog timeout of systemd.
    pub(crate) fn interval(&self) -> Option<Duration> {
        self.watchdog.map(|limit| limit / 2)
    }

    /// Reports that clients can connect.
    pub(crate) fn ready(&self) {
        self.send(&format!(
            "READY=1\nSTATUS=serving, process {}",
            std::process::id()
        ));
    }

    /// Reports a reload; [`Self::ready`] follows.
    pub(crate) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let now = (i128::from(now.tv_sec) * 1_000_000) + i128::from(now.tv_nsec) / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={now}"));
    }

    /// Reports the begin of the shutdown.
    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=shutting down; VMs keep running");
    }

    /// Reports that the service is alive.
    pub(crate) fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    fn send(&self, message: &str) {
        let Some((socket, address)) = &self.socket else {
            return;
        };
        // Non-blocking: systemd may be busy, and the next message follows.
        let sent = rustix::net::sendto(
            socket,
            message.as_bytes(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            address,
        );
        if let Err(error) = sent {
            tracing::debug!(%error, "cannot notify systemd");
        }
    }
}

/// A socket to send from, and its destination: a path, or with `@` an abstract name.
fn open(name: &OsStr) -> io::Result<(OwnedFd, SocketAddrUnix)> {
    let address = match name.as_bytes() {
        [b'/', ..] => SocketAddrUnix::new(name)?,
        [b'@', name @ ..] if !name.is_empty() => SocketAddrUnix::new_abstract_name(name)?,
        _ => {
            return Err(io::Error::other("neither a path nor an abstract name"));
        }
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    Ok((socket, address))
}

/// The timeout in `$WATCHDOG_USEC`, if it is for this process (sd_watchdog_enabled(3)).
fn watchdog(microseconds: Option<&str>, pid: Option<&str>, own: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
        return None;
    }
    let microseconds: u64 = microseconds?.parse().ok()?;
    (microseconds > 0).then(|| Duration::from_micros(microseconds))
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    fn systemd_messages(listener: &UnixDatagram, notifier: &Notifier) -> Vec<String> {
        notifier.ready();
        notifier.reloading();
        notifier.stopping();
        notifier.alive();
        let mut buffer = [0; 256];
        let mut next = || {
            let length = listener.recv(&mut buffer).unwrap();
            String::from_utf8(buffer[..length].to_vec()).unwrap()
        };
        (0..4).map(|_| next()).collect()
    }

    fn of(name: &str) -> Notifier {
        Notifier {
            socket: Some(open(OsStr::new(name)).unwrap()),
            watchdog: None,
        }
    }

    fn check(systemd_messages: &[String]) {
        assert!(
            systemd_messages[0].starts_with("READY=1\n"),
            "{systemd_messages:?}"
        );
        let time = systemd_messages[1]
            .strip_prefix("RELOADING=1\nMONOTONIC_USEC=")
            .unwrap();
        assert!(time.parse::<u64>().unwrap() > 0);
        assert!(
            systemd_messages[2].starts_with("STOPPING=1"),
            "{systemd_messages:?}"
        );
        assert_eq!(systemd_messages[3], "WATCHDOG=1");
    }

    #[test]
    fn systemd_is_notified_by_path() {
        let path = env::temp_dir().join(format!("bellhop-notify-{}", std::process::id()));
        let listener = UnixDatagram::bind(&path).unwrap();
        check(&systemd_messages(&listener, &of(path.to_str().unwrap())));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn systemd_is_notified_by_abstract_name() {
        let name = format!("bellhop-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        check(&systemd_messages(&listener, &of(&format!("@{name}"))));
    }

    #[test]
    fn without_systemd_nothing_happens() {
        let nobody = Notifier::default();
        nobody.ready();
        nobody.alive();
        assert_eq!(nobody.interval(), None);
        for bad in ["", "@", "relative", "vsock:2:1"] {
            assert!(open(OsStr::new(bad)).is_err(), "{bad:?}");
        }
        let long = format!("/{}", "x".repeat(200));
        assert!(open(OsStr::new(&long)).is_err());
        // A socket without a listener.
        of("/nonexistent/notify").ready();
    }

    #[test]
    fn the_watchdog_is_for_one_process() {
        let of = |microseconds, pid| watchdog(microseconds, pid, 7);
        let second = Some(Duration::from_secs(1));
        assert_eq!(of(Some("1000000"), None), second);
        assert_eq!(of(Some("1000000"), Some("7")), second);
        assert_eq!(of(Some("1000000"), Some("8")), None);
        assert_eq!(of(Some("1000000"), Some("")), None);
        assert_eq!(of(None, Some("7")), None);
        for bad in ["", "0", "-1", "1s", "99999999999999999999"] {
            assert_eq!(of(Some(bad), None), None, "{bad}");
        }
    }
}
