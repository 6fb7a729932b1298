//! Requests of programs in the lab host to the outside, such as to pull a cable.
//!
//! ```text
//!   program ──Request──▶ socket ──▶ agent ──Request(number)──▶ the lab (L1)
//!   program ◀──Answer─── the program's connection ◀──Answer(number)──┘
//! ```
//! Each request has its own connection and uses the frames of [`super::protocol`]. This module owns
//! the socket and the connections that wait for answers. It does not interpret requests.

use super::protocol::{Frame, Request};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Where the agent listens, in the lab host.
pub const SOCKET: &str = "/run/lab-agent";

/// How long a connected program may take to send its request.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// How long the outside may take to answer. It answers only while one of its commands runs.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The most requests that may wait for their answers; the agent rejects more.
const WAITING_LIMIT: usize = 64;

/// Connections by the numbers of their requests.
type Waiting = Arc<Mutex<HashMap<u32, UnixStream>>>;

/// Sends a request to the outside and waits for its answer.
///
/// # Errors
/// [`Error::Missing`] outside a lab host; [`Error::Usage`] with the outside's reason when it
/// refuses; [`Error::System`] when the agent goes away.
pub fn ask(request: &Request) -> Result<()> {
    ask_at(Path::new(SOCKET), request)
}

fn ask_at(socket: &Path, request: &Request) -> Result<()> {
    let mut stream = UnixStream::connect(socket).map_err(|error| {
        Error::missing(
            format!("no agent of a lab host is here ({error})"),
            "use it in a lab host: `cargo lab run`, `shell` or `test` with the rig that has it",
        )
    })?;
    let failed = Error::system("ask the lab host's agent");
    let outcome = stream
        .set_read_timeout(Some(ANSWER_LIMIT))
        .and_then(|()| Frame::Request(0, request.clone()).write(&mut stream))
        .and_then(|()| Frame::read(&mut stream))
        .map_err(failed)?;
    match outcome {
        Frame::Answer(_, Ok(())) => Ok(()),
        Frame::Answer(_, Err(why)) => Err(Error::Usage(why)),
        _ => Err(Error::invalid("the agent's answer", "it is another frame")),
    }
}

/// The agent's side.
#[derive(Debug)]
pub struct Requests {
    listener: UnixListener,
    waiting: Waiting,
}

impl Requests {
    /// Listens; it accepts nothing yet.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn listen(socket: &Path) -> io::Result<Self> {
        // No process answers on a socket that an earlier agent left.
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self {
            listener: UnixListener::bind(socket)?,
            waiting: Waiting::default(),
        })
    }

    /// Starts a thread that accepts requests and forwards each with its number. The thread ends
    /// with the process.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn forward(
        &self,
        outside: impl Fn(&Frame) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let waiting = Arc::clone(&self.waiting);
        std::thread::spawn(move || {
            let next = AtomicU32::new(1);
            for stream in listener.incoming().flatten() {
                let number = next.fetch_add(1, Ordering::Relaxed);
                // A broken request of one program must not affect the others.
                if let Err(error) = take(stream, number, &waiting, &outside) {
                    eprintln!("lab-host: a request: {error}");
                }
            }
        });
        Ok(())
    }

    /// Forwards an answer. The program may have stopped waiting.
    pub fn answer(&self, number: u32, outcome: std::result::Result<(), String>) {
        let stream = self
            .waiting
            .lock()
            .ok()
            .and_then(|mut waiting| waiting.remove(&number));
        if let Some(mut stream) = stream {
            // A program that has exited does not need it.
            let _ = Frame::Answer(number, outcome).write(&mut stream);
        }
    }
}

fn take(
    mut stream: UnixStream,
    number: u32,
    waiting: &Waiting,
    outside: &impl Fn(&Frame) -> io::Result<()>,
) -> io::Result<()> {
    stream.set_read_timeout(Some(ASK_LIMIT))?;
    stream.set_write_timeout(Some(ASK_LIMIT))?;
    let Frame::Request(_, request) = Frame::read(&mut stream)? else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is another frame",
        ));
    };
    let panicked = |_| io::Error::other("a thread panicked while it held the requests");
    let mut answers = waiting.lock().map_err(panicked)?;
    if answers.len() >= WAITING_LIMIT {
        drop(answers);
        let why = format!("{WAITING_LIMIT} requests wait for an answer already");
        return Frame::Answer(number, Err(why)).write(&mut stream);
    }
    // Registered before the request is forwarded: the answer may be quick.
    answers.insert(number, stream);
    drop(answers);
    outside(&Frame::Request(number, request))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::sync::mpsc;

    fn request(link: &str) -> Request {
        Request::SetLink {
            link: link.into(),
            up: true,
        }
    }

    #[test]
    fn each_program_gets_its_own_answer() {
        let socket = std::env::temp_dir().join(format!("lab-request-{}", std::process::id()));
        let requests = Requests::listen(&socket).unwrap();
        let (sender, receiver) = mpsc::channel();
        requests
            .forward(move |frame| sender.send(frame.clone()).map_err(io::Error::other))
            .unwrap();
        // Bytes that are no request affect no other connection.
        UnixStream::connect(&socket)
            .unwrap()
            .write_all(&[99; 64])
            .unwrap();
        let programs: Vec<_> = ["good", "bad"]
            .map(|link| {
                let socket = socket.clone();
                (
                    link,
                    std::thread::spawn(move || ask_at(&socket, &request(link))),
                )
            })
            .into();
        let asked: Vec<Frame> = receiver.iter().take(2).collect();
        for frame in asked.into_iter().rev() {
            let Frame::Request(number, Request::SetLink { link, .. }) = frame else {
                panic!("{frame:?}");
            };
            let outcome = if link == "good" {
                Ok(())
            } else {
                Err("no such link".to_owned())
            };
            requests.answer(number, outcome);
        }
        for (link, program) in programs {
            let outcome = program.join().unwrap();
            assert_eq!(outcome.is_ok(), link == "good", "{outcome:?}");
        }
        requests.answer(12345, Ok(()));
        std::fs::remove_file(&socket).unwrap();
        assert!(ask_at(&socket, &request("none")).is_err());
    }
}
