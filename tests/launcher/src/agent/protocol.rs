//! Frames between the lab and the agent in its host.
//!
//! The layout is little-endian: `kind: u8`, `length: u32`, then `length` bytes. A payload is raw
//! data, JSON or a fixed number of little-endian integers. There is no negotiation: both ends are
//! the same version of this crate, because the host's ramdisk is built from it.
//!
//! This module owns encoding and decoding. A length beyond [`MAXIMUM_LENGTH`], an unknown kind or a
//! payload of the wrong shape is an error, never a guess.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::time::Duration;

/// The longest payload of a frame, in bytes.
pub const MAXIMUM_LENGTH: usize = 1 << 20;

/// The largest piece of standard input or output in one frame, in bytes.
pub const CHUNK: usize = 32 * 1024;

/// How many bytes of standard input may be in flight before the command has read them. The window
/// keeps signals from queueing up behind unread input.
pub const STDIN_WINDOW: usize = 256 * 1024;

/// The first line that init prints on the console.
pub const BOOTED: &str = "lab-host: init runs";

/// How often the host reports that it runs.
pub const ALIVE: Duration = Duration::from_secs(10);

/// The agent's greeting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Release of the host's kernel.
    pub kernel: String,
    /// Processors online.
    pub processors: usize,
    /// True when `/dev/kvm` exists there.
    pub kvm: bool,
    /// Seconds since the host was switched on.
    pub uptime: f64,
    /// Setup problems, one sentence each.
    pub problems: Vec<String>,
}

/// A directory of the outside, mounted at the same path in the lab host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The 9p mount tag.
    pub tag: String,
    /// Its path, the same on both sides.
    pub path: String,
    /// True if the lab host may write to it.
    pub writable: bool,
}

/// A kernel module to load in the lab host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Module {
    /// A module of the stock kernel, by name, with its parameters. The agent also loads its
    /// dependencies.
    Stock(String, Vec<String>),
    /// A file, with its parameters.
    File(String, String),
}

/// What the lab host sets up before it greets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Directories to mount.
    pub shares: Vec<Share>,
    /// Modules to load, in order.
    pub modules: Vec<Module>,
}

/// A command to run as root in the lab host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execute {
    /// Program and arguments; not empty.
    pub arguments: Vec<String>,
    /// Variables that the agent adds to its own.
    pub environment: BTreeMap<String, String>,
    /// Working directory.
    pub directory: String,
    /// Programs that the command starts often. The agent holds them open. On a writable 9p share,
    /// the kernel drops a file that no process has open. The next start would read it from the
    /// outside again (1.5 s for Bellhop). A held program must not be replaced.
    pub held: Vec<String>,
    /// The terminal's columns and rows if the command gets a terminal of its own. Standard error
    /// then arrives as standard output.
    pub terminal: Option<(u16, u16)>,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// A signal with this number killed it.
    Signal(i32),
    /// It could not be started: the exit code that a shell would give (126 or 127), and the reason.
    NotStarted(u8, String),
}

impl Ending {
    /// The exit code as a shell would give it.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Code(code) => *code,
            Self::Signal(signal) => signal.saturating_add(128),
            Self::NotStarted(code, _) => i32::from(*code),
        };
        u8::try_from(code).unwrap_or(1)
    }
}

/// A request of a program in the lab host to the outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Pull the cable of a link of the rig, or plug it in again.
    SetLink {
        /// The link's name, such as "vf0".
        link: String,
        /// True to plug it in.
        up: bool,
    },
    /// Plug the rig's igb NIC, or unplug it.
    SetIgb {
        /// True to plug it.
        present: bool,
    },
}

/// One frame.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// To the outside: the agent is ready.
    Hello(Hello),
    /// To the host, first of all: what to set up.
    Setup(Setup),
    /// To the host: run a command.
    Execute(Execute),
    /// To the host: a piece of standard input.
    Stdin(Vec<u8>),
    /// To the host: no more standard input.
    StdinEnd,
    /// To the host: send this signal to the command's process group.
    Signal(i32),
    /// To the host: the command exceeds its time limit. The agent sends evidence to standard error.
    TimeUp,
    /// To the host: the terminal now has this many columns and rows.
    WindowSize(u16, u16),
    /// To the host: switch the machine off.
    PowerOff,
    /// To the outside: a piece of standard output.
    Stdout(Vec<u8>),
    /// To the outside: a piece of standard error.
    Stderr(Vec<u8>),
    /// To the outside: the command has taken this many bytes of input.
    StdinTaken(u32),
    /// To the outside, every [`ALIVE`]: the host still runs.
    Alive,
    /// To the outside: the command has ended.
    Exited(Ending),
    /// To the outside: a program in the host requests something. The answer carries the same
    /// number.
    Request(u32, Request),
    /// To the host: the outcome of the request with this number; an error has the reason.
    Answer(u32, Result<(), String>),
}

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => 1,
            Self::Execute(_) => 2,
            Self::Stdin(_) => 3,
            Self::StdinEnd => 4,
            Self::Signal(_) => 5,
            Self::WindowSize(..) => 6,
            Self::PowerOff => 7,
            Self::Stdout(_) => 8,
            Self::Stderr(_) => 9,
            Self::StdinTaken(_) => 10,
            Self::Exited(_) => 11,
            Self::Setup(_) => 12,
            Self::Request(..) => 13,
            Self::Answer(..) => 14,
            Self::Alive => 15,
            Self::TimeUp => 16,
        }
    }

    fn payload(&self) -> io::Result<Vec<u8>> {
        Ok(match self {
            Self::Hello(hello) => serde_json::to_vec(hello)?,
            Self::Execute(execute) => serde_json::to_vec(execute)?,
            Self::Exited(ending) => serde_json::to_vec(ending)?,
            Self::Setup(setup) => serde_json::to_vec(setup)?,
            Self::Request(number, request) => serde_json::to_vec(&(number, request))?,
            Self::Answer(number, outcome) => serde_json::to_vec(&(number, outcome))?,
            Self::Stdin(bytes) | Self::Stdout(bytes) | Self::Stderr(bytes) => bytes.clone(),
            Self::StdinEnd | Self::PowerOff | Self::Alive | Self::TimeUp => Vec::new(),
            Self::Signal(number) => number.to_le_bytes().to_vec(),
            Self::StdinTaken(count) => count.to_le_bytes().to_vec(),
            Self::WindowSize(columns, rows) => {
                let mut bytes = columns.to_le_bytes().to_vec();
                bytes.extend_from_slice(&rows.to_le_bytes());
                bytes
            }
        })
    }

    /// Writes the frame in one piece.
    ///
    /// # Errors
    /// The writer's error; `InvalidInput` for a payload that is too long.
    pub fn write(&self, writer: &mut impl Write) -> io::Result<()> {
        let payload = self.payload()?;
        let length = u32::try_from(payload.len())
            .ok()
            .filter(|_| payload.len() <= MAXIMUM_LENGTH)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "frame too long"))?;
        let mut bytes = Vec::with_capacity(payload.len() + 5);
        bytes.push(self.kind());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&payload);
        writer.write_all(&bytes)?;
        writer.flush()
    }

    /// Reads one frame, waiting for it.
    ///
    /// # Errors
    /// The reader's error; `UnexpectedEof` at the end of the stream; `InvalidData` for bytes that
    /// are not a frame.
    pub fn read(reader: &mut impl Read) -> io::Result<Self> {
        let mut header = [0; 5];
        reader.read_exact(&mut header)?;
        let [kind, length @ ..] = header;
        let length = usize::try_from(u32::from_le_bytes(length))
            .ok()
            .filter(|length| *length <= MAXIMUM_LENGTH)
            .ok_or_else(|| invalid("frame too long"))?;
        let mut payload = vec![0; length];
        reader.read_exact(&mut payload)?;
        Self::decode(kind, payload)
    }

    fn decode(kind: u8, payload: Vec<u8>) -> io::Result<Self> {
        let number = |payload: &[u8]| {
            <[u8; 4]>::try_from(payload).map_err(|_| invalid("payload is not four bytes"))
        };
        let empty = |frame: Self| {
            if payload.is_empty() {
                Ok(frame)
            } else {
                Err(invalid("payload where there must be none"))
            }
        };
        Ok(match kind {
            1 => Self::Hello(serde_json::from_slice(&payload)?),
            2 => Self::Execute(serde_json::from_slice(&payload)?),
            3 => Self::Stdin(payload),
            4 => empty(Self::StdinEnd)?,
            5 => Self::Signal(i32::from_le_bytes(number(&payload)?)),
            6 => {
                let [a, b, c, d] = number(&payload)?;
                Self::WindowSize(u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
            }
            7 => empty(Self::PowerOff)?,
            8 => Self::Stdout(payload),
            9 => Self::Stderr(payload),
            10 => Self::StdinTaken(u32::from_le_bytes(number(&payload)?)),
            11 => Self::Exited(serde_json::from_slice(&payload)?),
            12 => Self::Setup(serde_json::from_slice(&payload)?),
            13 => {
                let (number, request) = serde_json::from_slice(&payload)?;
                Self::Request(number, request)
            }
            14 => {
                let (number, outcome) = serde_json::from_slice(&payload)?;
                Self::Answer(number, outcome)
            }
            15 => empty(Self::Alive)?,
            16 => empty(Self::TimeUp)?,
            _ => return Err(invalid("unknown kind of frame")),
        })
    }
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let frames = [
            Frame::Hello(Hello {
                kernel: "6".into(),
                processors: 2,
                kvm: true,
                uptime: 1.5,
                problems: vec!["p".into()],
            }),
            Frame::Execute(Execute {
                arguments: vec!["true".into()],
                environment: BTreeMap::from([("A".into(), "b".into())]),
                directory: "/".into(),
                held: vec!["/p".into()],
                terminal: Some((80, 24)),
            }),
            Frame::Setup(Setup {
                shares: vec![Share {
                    tag: "t".into(),
                    path: "/p".into(),
                    writable: true,
                }],
                modules: vec![
                    Module::Stock("m".into(), vec!["a=1".into()]),
                    Module::File("/f".into(), "a=1".into()),
                ],
            }),
            Frame::Stdin(vec![0, 255]),
            Frame::StdinEnd,
            Frame::Signal(2),
            Frame::TimeUp,
            Frame::WindowSize(1, 2),
            Frame::PowerOff,
            Frame::Alive,
            Frame::Stdout(vec![1]),
            Frame::Stderr(Vec::new()),
            Frame::StdinTaken(7),
            Frame::Exited(Ending::NotStarted(127, "why".into())),
            Frame::Request(
                1,
                Request::SetLink {
                    link: "vf0".into(),
                    up: false,
                },
            ),
            Frame::Request(2, Request::SetIgb { present: true }),
            Frame::Answer(u32::MAX, Ok(())),
            Frame::Answer(0, Err("why".into())),
        ];
        let mut wire = Vec::new();
        for frame in &frames {
            frame.write(&mut wire).unwrap();
        }
        let mut reader = wire.as_slice();
        for frame in &frames {
            assert_eq!(&Frame::read(&mut reader).unwrap(), frame);
        }
        assert!(Frame::read(&mut reader).is_err());
    }

    #[test]
    fn invalid_frames_are_refused() {
        for wire in [
            &[0_u8, 0, 0, 0, 0][..],
            &[99, 0, 0, 0, 0],
            &[4, 1, 0, 0, 0, 1],
            &[5, 2, 0, 0, 0, 1, 2],
            &[2, 2, 0, 0, 0, b'{', b'}'],
            &[3, 255, 255, 255, 255],
            &[3, 4, 0, 0, 0, 1],
            &[13, 2, 0, 0, 0, b'[', b']'],
            &[14, 3, 0, 0, 0, b'[', b'1', b']'],
        ] {
            let mut reader = wire;
            assert!(Frame::read(&mut reader).is_err(), "{wire:?}");
        }
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(Ending::Code(3).exit_code(), 3);
        assert_eq!(Ending::Signal(9).exit_code(), 137);
        assert_eq!(Ending::NotStarted(127, String::new()).exit_code(), 127);
        assert_eq!(Ending::Code(-1).exit_code(), 1);
        assert_eq!(Ending::Signal(i32::MAX).exit_code(), 1);
    }
}
