//! TCP of the guest's kernel: streams whose bytes both ends hash, and the addresses for it.

use crate::random::Sequence;
use lab::error::{Error, Result};
use lab::files;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of one read or write.
const PIECE: usize = 1 << 18;

/// The port of a receiver, and that of a sender without end.
const PORT: u16 = 5000;
const SOURCE_PORT: u16 = 5001;

/// Runs `ip` with these words.
pub(crate) fn ip<'a>(words: impl Iterator<Item = &'a str>) -> Result<Value> {
    let program = "/bin/busybox";
    let mut command = Command::new(program);
    let output = command.arg("ip").args(words).output();
    let output = output.map_err(|source| Error::Start {
        program: program.into(),
        source,
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::invalid("ip", text));
    }
    Ok(json!({ "text": String::from_utf8_lossy(&output.stdout) }))
}

/// Switches IPv6 on at this NIC. It does not look for other users of its addresses, so they can be
/// used at once.
pub(crate) fn ipv6_on(nic: &str) -> Result<Value> {
    for (setting, value) in [("accept_dad", "0"), ("disable_ipv6", "0")] {
        let path = format!("/proc/sys/net/ipv6/conf/{nic}/{setting}");
        files::write(Path::new(&path), value)?;
    }
    Ok(json!({ "ipv6": nic }))
}

/// Reports that it listens, and then the length and the hash of one stream.
pub(crate) fn receive() -> Result<Value> {
    let failed = || Error::system("receive by TCP");
    // It accepts connections by IPv4, too.
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).map_err(failed())?;
    crate::say("", &json!({ "listening": PORT }));
    let (mut stream, _) = listener.accept().map_err(failed())?;
    let mut piece = vec![0; PIECE];
    let mut sum = Sum::default();
    loop {
        let count = stream.read(&mut piece).map_err(failed())?;
        let Some(bytes) = piece.get(..count).filter(|bytes| !bytes.is_empty()) else {
            return Ok(sum.shown());
        };
        sum.add(bytes);
    }
}

/// Sends a stream with so many bytes to the peer, and reports its hash.
pub(crate) fn send(peer: IpAddr, length: u64) -> Result<Value> {
    let failed = || Error::system("send by TCP");
    let mut stream = TcpStream::connect((peer, PORT)).map_err(failed())?;
    let mut sequence = Sequence::new(length);
    let mut piece = vec![0; PIECE];
    let mut sum = Sum::default();
    while sum.length < length {
        sequence.fill(&mut piece);
        let left = usize::try_from(length - sum.length).unwrap_or(PIECE);
        let bytes = &piece[..left.min(PIECE)];
        stream.write_all(bytes).map_err(failed())?;
        sum.add(bytes);
    }
    stream.shutdown(Shutdown::Write).map_err(failed())?;
    // The peer closes its end when it has everything.
    let rest = stream.read(&mut piece).map_err(failed())?;
    if rest != 0 {
        return Err(Error::invalid("the peer", "it sent bytes"));
    }
    Ok(sum.shown())
}

/// Sends a stream for so long, and reports its bytes and the time.
pub(crate) fn flood(peer: IpAddr, duration: Duration) -> Result<Value> {
    let failed = || Error::system("send by TCP");
    let mut stream = TcpStream::connect((peer, PORT)).map_err(failed())?;
    let piece = vec![0; PIECE];
    let (begin, mut sent) = (Instant::now(), 0);
    while begin.elapsed() < duration {
        sent += stream.write(&piece).map_err(failed())?;
    }
    Ok(timed(sent, begin))
}

/// Receives a stream without end for so long, and reports its bytes and the time.
pub(crate) fn drain(peer: IpAddr, duration: Duration) -> Result<Value> {
    let failed = || Error::system("receive by TCP");
    let mut stream = TcpStream::connect((peer, SOURCE_PORT)).map_err(failed())?;
    let mut piece = vec![0; PIECE];
    let (begin, mut received) = (Instant::now(), 0);
    while begin.elapsed() < duration {
        received += stream.read(&mut piece).map_err(failed())?;
    }
    Ok(timed(received, begin))
}

/// The answer about a stream's bytes since `begin`.
fn timed(bytes: usize, begin: Instant) -> Value {
    let elapsed = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
    json!({ "bytes": bytes, "elapsed_us": elapsed })
}

/// Of the bytes of a stream.
#[derive(Default)]
struct Sum {
    length: u64,
    digest: Sha256,
}

impl Sum {
    fn add(&mut self, bytes: &[u8]) {
        self.digest.update(bytes);
        self.length += u64::try_from(bytes.len()).unwrap_or_default();
    }

    fn shown(self) -> Value {
        let mut text = String::new();
        for byte in self.digest.finalize() {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        json!({ "bytes": self.length, "sha256": text })
    }
}
