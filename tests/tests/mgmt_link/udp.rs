//! Sends numbered datagrams with a checksum between two network namespaces: each must return whole.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const PORT: u16 = 5010;
const SIZE: usize = 1200;

/// How often the first datagram is sent: bridges must learn, and a link may just have come up.
const FIRST_ATTEMPTS: usize = 10;

/// How long an attempt with the first datagram waits, and how long the peer waits between checks
/// for the end.
const FIRST_WAIT: Duration = Duration::from_millis(300);

/// How long any other datagram may take: on a busy host a late one is not lost.
const WAIT: Duration = Duration::from_secs(20);

/// A socket in a namespace; the calling thread moves there.
fn socket(namespace: &str, address: &str) -> UdpSocket {
    let file = File::open(Path::new("/run/netns").join(namespace)).unwrap();
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    let address: SocketAddr = format!("{address}:{PORT}").parse().unwrap();
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(FIRST_WAIT)).unwrap();
    socket
}

/// A datagram: its number, a pattern that depends on it, and a checksum of both.
fn datagram(number: u32) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    let mut word = number ^ 0x9e37_79b9;
    while bytes.len() < SIZE - 4 {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bytes.push(word.to_be_bytes()[0]);
    }
    let sum = bytes.iter().fold(0_u32, |sum, &byte| {
        sum.rotate_left(5).wrapping_add(u32::from(byte))
    });
    bytes.extend(sum.to_be_bytes());
    bytes
}

/// Sends `count` datagrams from one namespace to another, each after the previous one came back.
/// Returns how many did. A changed datagram fails the test.
pub(crate) fn echoed(from: (&str, &str), to: (&str, &str), count: u32) -> u32 {
    let ended = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            let socket = socket(to.0, to.1);
            let mut buffer = [0; 2 * SIZE];
            while !ended.load(Ordering::Relaxed) {
                if let Ok((length, sender)) = socket.recv_from(&mut buffer) {
                    // The receiver may be gone.
                    let _ = socket.send_to(&buffer[..length], sender);
                }
            }
        });
        let sender = threads.spawn(|| send(from, to.1, count));
        let echoed = sender.join();
        ended.store(true, Ordering::Relaxed);
        echoed.unwrap()
    })
}

fn send(from: (&str, &str), to: &str, count: u32) -> u32 {
    let socket = socket(from.0, from.1);
    let to = format!("{to}:{PORT}");
    let mut buffer = [0; 2 * SIZE];
    let mut echoed = 0;
    for number in 0..count {
        let sent = datagram(number);
        let attempts = if number == 0 { FIRST_ATTEMPTS } else { 1 };
        if number == 1 {
            socket.set_read_timeout(Some(WAIT)).unwrap();
        }
        let came = (0..attempts).any(|_| {
            // Without the peer's address, the kernel may refuse it.
            let _ = socket.send_to(&sent, &to);
            loop {
                match socket.recv_from(&mut buffer) {
                    // The first one again, which was late.
                    Ok((length, _)) if number > 0 && buffer[..length] == datagram(0) => {}
                    Ok((length, _)) => {
                        assert!(buffer[..length] == sent, "datagram {number} was changed");
                        return true;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                    Err(_) => return false,
                }
            }
        });
        if !came {
            break;
        }
        echoed += 1;
    }
    echoed
}
