use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use super::super::history::CAPACITY;
use super::super::{BACKLOG, Pumped, Receiver};
use super::*;
use crate::event_loop::Ready;

/// A serial port that accepts a limited number of bytes.
#[derive(Default)]
struct Port {
    seen: std::cell::RefCell<Vec<u8>>,
    room: std::cell::Cell<usize>,
}

impl Receiver for Port {
    fn receive(&self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.room.get());
        self.room.set(self.room.get() - count);
        self.seen.borrow_mut().extend(&bytes[..count]);
        count
    }
}

/// A console with all parts that a machine uses.
struct Rig {
    screen: SocketOutput,
    input: InputPump,
    port: Port,
    events: EventLoop,
    always: vmm_sys_util::eventfd::EventFd,
    guest: Box<dyn io::Write + Send>,
    directory: PathBuf,
}

impl Rig {
    fn new(name: &str, limit: u64) -> Self {
        let directory = std::env::temp_dir().join(format!("console-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let (path, log) = (directory.join("socket"), directory.join("log"));
        let socket = ConsoleSocket::with_limit(&path, Some(&log), limit).unwrap();
        let events = EventLoop::new().unwrap();
        let always = vdpa::eventfd::new().unwrap();
        always.write(1).unwrap();
        events.add(always.as_raw_fd(), Token::Stop).unwrap();
        Self {
            guest: socket.writer(),
            screen: SocketOutput::new(socket, &events).unwrap(),
            input: InputPump::idle(),
            port: Port {
                room: usize::MAX.into(),
                ..Port::default()
            },
            events,
            always,
            directory,
        }
    }

    /// Runs the vmm thread's loop until nothing more happens.
    #[track_caller]
    fn turn(&mut self) {
        for _ in 0..10_000 {
            let mut ready = Ready::default();
            self.events.wait(&mut ready).unwrap();
            let mut busy = false;
            for token in ready.tokens().filter(|token| *token != Token::Stop) {
                busy = true;
                let (screen, input, events) = (&mut self.screen, &mut self.input, &self.events);
                match token {
                    Token::ConsoleConnection => screen.connection(input, events),
                    Token::ConsoleOutput => screen.output(input, events),
                    Token::ConsoleWritable => screen.writable(input, events),
                    Token::ConsoleInput => {
                        assert_eq!(input.readable(&self.port, events), Pumped::Stay);
                        screen.input_read(input, events);
                    }
                    _ => unreachable!("{token:?}"),
                }
            }
            if !busy {
                return;
            }
        }
        panic!("the loop spins");
    }

    fn say(&mut self, text: &[u8]) {
        self.guest.write_all(text).unwrap();
        self.turn();
    }

    fn connect(&mut self) -> UnixStream {
        let stream = UnixStream::connect(self.directory.join("socket")).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        self.turn();
        stream
    }

    fn logged(&self) -> Vec<u8> {
        fs::read(self.directory.join("log")).unwrap()
    }

    fn has_client(&self) -> bool {
        self.screen.client.is_some()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.always.read();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn read(stream: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn read_all(stream: &mut UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn both_directions_pass_and_all_is_logged() {
    let mut rig = Rig::new("both", 1 << 20);
    let mode = |name: &str| fs::metadata(rig.directory.join(name)).unwrap().mode() & 0o7777;
    assert_eq!((mode("socket"), mode("log")), (0o600, 0o600));
    rig.say(b"before\r\n");
    let mut client = rig.connect();
    assert_eq!(read(&mut client, 8), b"before\r\n");
    rig.say(b"login: ");
    assert_eq!(read(&mut client, 7), b"login: ");
    // No byte has a meaning for the console itself.
    client.write_all(b"root\x01x\x00\xff\r").unwrap();
    rig.turn();
    assert_eq!(*rig.port.seen.borrow(), b"root\x01x\x00\xff\r");
    assert_eq!(rig.logged(), b"before\r\nlogin: ");
    assert_eq!(rig.screen.loss(), ConsoleLoss::default());
}

#[test]
fn a_second_client_receives_a_notice_and_a_later_one_is_served() {
    let mut rig = Rig::new("second", 1 << 20);
    rig.say(b"x");
    let mut first = rig.connect();
    let mut second = rig.connect();
    let told = read_all(&mut second);
    let own = format!("process {} uses this console", std::process::id());
    assert!(told.contains(&own), "{told}");
    assert_eq!(read(&mut first, 1), b"x");
    drop(first);
    rig.turn();
    assert!(!rig.has_client() && rig.input.is_closed());
    let mut third = rig.connect();
    assert_eq!(read(&mut third, 1), b"x");
    // Both at once: one that leaves and one that connects.
    drop(third);
    let mut fourth = rig.connect();
    assert_eq!(read(&mut fourth, 1), b"x");
}

#[test]
fn a_new_client_gets_the_last_64_kib() {
    let mut rig = Rig::new("replay", 1 << 20);
    rig.say(&[b'a'; 100_000]);
    rig.say(&[b'b'; 60_000]);
    let client = rig.connect();
    let reader = std::thread::spawn(move || {
        let mut client = client;
        read(&mut client, 65_536)
    });
    while !reader.is_finished() {
        rig.turn();
    }
    let replayed = reader.join().unwrap();
    let (old, new) = replayed.split_at(5536);
    assert!(old.iter().all(|byte| *byte == b'a') && new.iter().all(|byte| *byte == b'b'));
}

#[test]
fn a_client_that_never_reads_stalls_neither_guest_nor_vmm() {
    let mut rig = Rig::new("deaf", 64 << 20);
    let mut client = rig.connect();
    for _ in 0..100 {
        rig.say(&[b'z'; 20_000]);
    }
    assert_eq!(rig.logged().len(), 2_000_000);
    assert!(rig.has_client());
    // It returns, and learns how much it missed.
    client.set_nonblocking(true).unwrap();
    let mut seen = Vec::new();
    loop {
        let mut bytes = [0; 65_536];
        match client.read(&mut bytes) {
            Ok(count) => seen.extend(&bytes[..count]),
            Err(_) => {
                let before = seen.len();
                rig.turn();
                match client.read(&mut bytes) {
                    Ok(count) => seen.extend(&bytes[..count]),
                    Err(_) if seen.len() == before => break,
                    Err(_) => {}
                }
            }
        }
    }
    let lost = rig.screen.loss().clients;
    let note = format!("\r\n[bellhop: {lost} bytes of output are missing here]\r\n");
    assert!(lost > 1_000_000, "{lost}");
    assert_eq!(seen.len() as u64, 2_000_000 - lost + note.len() as u64);
    assert!(String::from_utf8_lossy(&seen).contains(&note));
    rig.say(b"still here");
    let mut bytes = [0; 10];
    client.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"still here");
    assert_eq!(rig.screen.loss().log, 0);
}

#[test]
fn a_flood_of_input_waits_for_a_hung_guest() {
    let mut rig = Rig::new("flood", 1 << 20);
    rig.port.room.set(100);
    let client = rig.connect();
    client.set_nonblocking(true).unwrap();
    let text: Vec<u8> = (0..50_000u32).map(|i| b'A' + (i % 26) as u8).collect();
    let mut sent = 0;
    while let Ok(count) = (&client).write(&text[sent..]) {
        sent += count;
        rig.turn();
        if sent == text.len() {
            break;
        }
    }
    assert_eq!(rig.input.backlog.len(), BACKLOG);
    // The client leaves while the guest hangs: nothing spins, and its input is kept until another
    // client connects.
    drop(client);
    rig.turn();
    while rig.port.seen.borrow().len() < sent {
        rig.port.room.set(1000);
        assert_eq!(rig.input.room(&rig.port, &rig.events), Pumped::Stay);
        rig.turn();
    }
    assert_eq!(*rig.port.seen.borrow(), text[..sent]);
    assert!(!rig.has_client());
}

#[test]
fn a_hung_guest_does_not_keep_others_from_its_console() {
    let mut rig = Rig::new("hung", 1 << 20);
    rig.port.room.set(0);
    rig.say(b"oops");
    let mut dead = rig.connect();
    dead.write_all(&[b'x'; 20_000]).unwrap();
    rig.turn();
    drop(dead);
    rig.turn();
    let mut client = rig.connect();
    assert_eq!(read(&mut client, 4), b"oops");
    client.write_all(b"new").unwrap();
    rig.turn();
    assert_eq!(rig.input.backlog.len(), BACKLOG);
    // A reset starts a new guest: it does not get input that the old one did not read.
    rig.input.reset(&rig.events);
    rig.port.room.set(usize::MAX);
    rig.turn();
    assert_eq!(*rig.port.seen.borrow(), b"new");
}

#[test]
fn a_client_that_only_stopped_writing_still_reads() {
    let mut rig = Rig::new("half", 1 << 20);
    let mut client = rig.connect();
    client.write_all(b"reboot\r").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    rig.turn();
    assert_eq!(*rig.port.seen.borrow(), b"reboot\r");
    rig.say(b"bye");
    assert_eq!(read(&mut client, 3), b"bye");
    assert!(rig.has_client());
    // The first output after it has left detects this.
    drop(client);
    rig.say(b"anybody?");
    assert!(!rig.has_client());
    // Another client detects it earlier.
    let client = rig.connect();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    rig.turn();
    drop(client);
    let mut next = rig.connect();
    assert_eq!(read(&mut next, 3), b"bye");
}

#[test]
fn descriptors_and_clients_are_added_and_removed() {
    let mut rig = Rig::new("leak", 1 << 20);
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    rig.say(b"x");
    let before = open();
    for _ in 0..100 {
        let mut client = rig.connect();
        let refused = rig.connect();
        client.write_all(b"y").unwrap();
        drop((client, refused));
        rig.turn();
        assert!(!rig.has_client());
    }
    // Other tests of this process open files as well.
    assert!(open() < before + 50);
    assert_eq!(rig.port.seen.borrow().len(), 100);
}

#[test]
fn the_end_reaches_log_and_client_without_a_wait() {
    let mut rig = Rig::new("end", 1 << 20);
    let mut client = rig.connect();
    // The vmm thread has not seen this output when the machine ends.
    rig.guest.write_all(&[b'e'; CAPACITY - 1]).unwrap();
    rig.guest.write_all(b".").unwrap();
    let start = Instant::now();
    let limit = Duration::from_millis(200);
    rig.screen.finish(&mut rig.input, &rig.events, limit);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(rig.logged().len(), CAPACITY);
    assert_eq!(rig.logged().last(), Some(&b'.'));
    assert_eq!(read(&mut client, 1), b"e");
    let path = rig.directory.join("socket");
    assert!(path.exists());
    let Rig { screen, guest, .. } = &mut rig;
    *guest = Box::new(io::sink());
    let unused = ConsoleSocket::new(&path.with_extension("other"), None).unwrap();
    *screen = SocketOutput::new(unused, &EventLoop::new().unwrap()).unwrap();
    assert!(!path.exists());
    // The client sees its end.
    client
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    client.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn paths_that_cannot_be_are_left_alone() {
    let rig = Rig::new("paths", 1 << 20);
    let at = |name: &str| rig.directory.join(name);
    let refused = ConsoleSocket::new(&at("socket"), None).unwrap_err();
    assert!(refused.to_string().contains("serves"), "{refused}");
    fs::write(at("file"), "mine").unwrap();
    assert!(ConsoleSocket::new(&at("file"), None).is_err());
    assert_eq!(fs::read(at("file")).unwrap(), b"mine");
    // An unusable log leaves no socket behind.
    let refused = ConsoleSocket::new(&at("new"), Some(std::path::Path::new("/dev/null")));
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("console's log"), "{error}");
    assert!(!at("new").exists());
    // The socket is no log.
    assert!(ConsoleSocket::new(&at("new"), Some(&at("socket"))).is_err());
}
