//! Messages and their payloads.

use serde_json::Value;

use super::bytes::{Bytes, cut};
use super::frame::{FRAME_HEADER_LEN, FrameError, Kind, seal};
use super::{
    COMPAT_MAX, CONNECTIONS_MAX, FAILED_MAX, Hello, MAGIC, MigrationSecret, RANGES_MAX,
    REFUSAL_TEXT_MAX, REFUSALS_MAX, RUN_PAGES_MAX, RamRange, Refusal, Session, VERSION,
};
use crate::migration::dirty::{PAGE_SIZE, PageRun};

/// The content of a frame. The table is in the parent module's documentation.
#[derive(Debug, Clone, PartialEq)]
pub enum Message<'a> {
    /// A machine wants to move.
    Hello(Hello),
    /// The destination accepts it.
    Accept {
        /// The session that the other connections send.
        session: Session,
        /// Number of connections, 1 to [`CONNECTIONS_MAX`].
        connections: u16,
    },
    /// The destination rejects it.
    Refuse(Vec<Refusal>),
    /// This connection belongs to the session and has this number from the next frame on.
    Join {
        /// From the ACCEPT.
        session: Session,
        /// 1 to 15.
        connection: u16,
    },
    /// Consecutive pages.
    Pages {
        /// Offset of the first in the file behind guest RAM, page-aligned.
        offset: u64,
        /// Their content: 1 to [`RUN_PAGES_MAX`] whole pages.
        data: &'a [u8],
    },
    /// Zero pages, in runs whose ends don't wrap.
    Zeros(Vec<PageRun>),
    /// The connection has sent all its pages of this round.
    RoundEnd {
        /// The round, from 1.
        round: u32,
        /// No round follows: the guest is stopped.
        last: bool,
    },
    /// A piece of the machine's state.
    State(&'a [u8]),
    /// The state is complete.
    StateEnd {
        /// Bytes of all pieces.
        len: u64,
    },
    /// The destination could run.
    Ready,
    /// The destination shall run the guest, and the source never again.
    Go(Session),
    /// The guest runs at the destination.
    Done,
    /// The source's user has cancelled.
    Cancel,
    /// The sender gave up.
    Failed(String),
    /// The sender is busy elsewhere.
    Alive,
    /// Asks whether this machine may move. It does not, yet.
    Try(Hello),
    /// A piece of a device's state, while the guest runs.
    Early(&'a [u8]),
}

impl Message<'_> {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Accept { .. } => Kind::Accept,
            Self::Refuse(_) => Kind::Refuse,
            Self::Join { .. } => Kind::Join,
            Self::Pages { .. } => Kind::Pages,
            Self::Zeros(_) => Kind::Zeros,
            Self::RoundEnd { .. } => Kind::RoundEnd,
            Self::State(_) => Kind::State,
            Self::StateEnd { .. } => Kind::StateEnd,
            Self::Ready => Kind::Ready,
            Self::Go(_) => Kind::Go,
            Self::Done => Kind::Done,
            Self::Cancel => Kind::Cancel,
            Self::Failed(_) => Kind::Failed,
            Self::Alive => Kind::Alive,
            Self::Try(_) => Kind::Try,
            Self::Early(_) => Kind::Early,
        }
    }

    /// Its name in the protocol's table.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }
}

/// Writes the whole frame of `message` into `frame`, whose old content is discarded.
///
/// Truncates texts that are too long, and a list with too many reasons.
///
/// # Errors
/// [`FrameError::TooLong`]: the message exceeds the limit of its kind.
pub fn encode_message(
    message: &Message<'_>,
    connection: u16,
    sequence: u32,
    frame: &mut Vec<u8>,
) -> Result<(), FrameError> {
    frame.clear();
    frame.resize(FRAME_HEADER_LEN, 0);
    match message {
        Message::Hello(hello) | Message::Try(hello) => encode_hello(hello, frame)?,
        Message::Accept {
            session,
            connections,
        } => {
            frame.extend(session.0);
            frame.extend(connections.to_le_bytes());
        }
        Message::Join {
            session,
            connection,
        } => {
            frame.extend(session.0);
            frame.extend(connection.to_le_bytes());
        }
        Message::Refuse(reasons) => encode_reasons(reasons, frame),
        Message::Go(session) => frame.extend(session.0),
        Message::Pages { offset, data } => {
            frame.extend(offset.to_le_bytes());
            frame.extend_from_slice(data);
        }
        Message::Zeros(runs) => {
            for run in runs {
                frame.extend(run.offset().to_le_bytes());
                frame.extend(u32::try_from(run.count).unwrap_or(u32::MAX).to_le_bytes());
            }
        }
        Message::RoundEnd { round, last } => {
            frame.extend(round.to_le_bytes());
            frame.push(u8::from(*last));
        }
        Message::State(data) | Message::Early(data) => frame.extend_from_slice(data),
        Message::StateEnd { len } => frame.extend(len.to_le_bytes()),
        Message::Failed(text) => frame.extend_from_slice(cut(text, FAILED_MAX).as_bytes()),
        Message::Ready | Message::Done | Message::Cancel | Message::Alive => {}
    }
    let payload = frame.get(FRAME_HEADER_LEN..).unwrap_or(&[]);
    let header = seal(message.kind(), connection, sequence, &[payload])?;
    if let Some(room) = frame.first_chunk_mut() {
        *room = header;
    }
    Ok(())
}

fn encode_hello(hello: &Hello, frame: &mut Vec<u8>) -> Result<(), FrameError> {
    let too_long = |problem| FrameError::Payload {
        name: Kind::Hello.name(),
        problem,
    };
    let ranges = u16::try_from(hello.ram.len())
        .ok()
        .filter(|_| hello.ram.len() <= RANGES_MAX)
        .ok_or(too_long("has too many ranges of memory"))?;
    let compat = hello.compat.to_string();
    if compat.len() > COMPAT_MAX {
        return Err(too_long("has a compatibility document of more than 64 KiB"));
    }
    frame.extend(MAGIC);
    frame.extend(VERSION.to_le_bytes());
    frame.extend(hello.secret.0);
    frame.extend(u32::try_from(PAGE_SIZE).unwrap_or(u32::MAX).to_le_bytes());
    frame.extend(hello.connections.to_le_bytes());
    frame.extend(ranges.to_le_bytes());
    for range in &hello.ram {
        for number in [range.guest_address, range.len, range.file_offset] {
            frame.extend(number.to_le_bytes());
        }
    }
    frame.extend_from_slice(compat.as_bytes());
    Ok(())
}

fn encode_reasons(reasons: &[Refusal], frame: &mut Vec<u8>) {
    let count = reasons.len().min(REFUSALS_MAX);
    frame.extend(u16::try_from(count).unwrap_or(0).to_le_bytes());
    for reason in reasons.iter().take(count) {
        for text in [
            &reason.what,
            &reason.source,
            &reason.destination,
            &reason.remedy,
        ] {
            let text = cut(text, REFUSAL_TEXT_MAX);
            frame.extend(u16::try_from(text.len()).unwrap_or(0).to_le_bytes());
            frame.extend_from_slice(text.as_bytes());
        }
    }
}

/// Reads the payload of a frame whose header and CRC have been checked.
///
/// # Errors
/// [`FrameError::Payload`], [`FrameError::Magic`] or [`FrameError::Version`].
pub fn decode_message<'a>(
    header: &super::Header,
    payload: &'a [u8],
) -> Result<Message<'a>, FrameError> {
    let mut bytes = Bytes::of(header.kind().name(), payload);
    let message = match header.kind() {
        Kind::Hello => Message::Hello(decode_hello(&mut bytes)?),
        Kind::Accept => Message::Accept {
            session: Session(bytes.array()?),
            connections: connections(&mut bytes)?,
        },
        Kind::Refuse => Message::Refuse(decode_reasons(&mut bytes)?),
        Kind::Join => Message::Join {
            session: Session(bytes.array()?),
            connection: match bytes.u16()? {
                connection @ 1..CONNECTIONS_MAX => connection,
                _ => return Err(bytes.bad("is for an impossible connection")),
            },
        },
        Kind::Go => Message::Go(Session(bytes.array()?)),
        Kind::Pages => decode_pages(&mut bytes)?,
        Kind::Zeros => decode_zeros(&mut bytes)?,
        Kind::RoundEnd => Message::RoundEnd {
            round: bytes.u32()?,
            last: match bytes.u8()? {
                0 => false,
                1 => true,
                _ => return Err(bytes.bad("has an invalid flag for the last round")),
            },
        },
        Kind::State => match bytes.rest() {
            [] => return Err(bytes.bad("is empty")),
            data => Message::State(data),
        },
        Kind::Early => match bytes.rest() {
            [] => return Err(bytes.bad("is empty")),
            data => Message::Early(data),
        },
        Kind::StateEnd => Message::StateEnd { len: bytes.u64()? },
        Kind::Ready => Message::Ready,
        Kind::Done => Message::Done,
        Kind::Cancel => Message::Cancel,
        Kind::Failed => Message::Failed(bytes.rest_as_text(FAILED_MAX)?),
        Kind::Alive => Message::Alive,
        Kind::Try => Message::Try(decode_hello(&mut bytes)?),
    };
    bytes.end()?;
    Ok(message)
}

fn connections(bytes: &mut Bytes<'_>) -> Result<u16, FrameError> {
    let count = bytes.u16()?;
    if (1..=CONNECTIONS_MAX).contains(&count) {
        Ok(count)
    } else {
        Err(bytes.bad("names no or too many connections"))
    }
}

fn decode_hello(bytes: &mut Bytes<'_>) -> Result<Hello, FrameError> {
    if bytes.array()? != MAGIC {
        return Err(FrameError::Magic);
    }
    let found = bytes.u32()?;
    if found != VERSION {
        return Err(FrameError::Version {
            found,
            ours: VERSION,
        });
    }
    let secret = MigrationSecret(bytes.array()?);
    if u64::from(bytes.u32()?) != PAGE_SIZE {
        return Err(bytes.bad("has another page size"));
    }
    let connections = connections(bytes)?;
    let ranges = usize::from(bytes.u16()?);
    if ranges > RANGES_MAX {
        return Err(bytes.bad("has too many ranges of memory"));
    }
    let mut ram = Vec::with_capacity(ranges);
    for _ in 0..ranges {
        ram.push(RamRange {
            guest_address: bytes.u64()?,
            len: bytes.u64()?,
            file_offset: bytes.u64()?,
        });
    }
    let compat = bytes.rest();
    if compat.len() > COMPAT_MAX {
        return Err(bytes.bad("has a compatibility document of more than 64 KiB"));
    }
    let compat: Value = serde_json::from_slice(compat)
        .map_err(|_| bytes.bad("has a compatibility document that is not JSON"))?;
    if !compat.is_object() {
        return Err(bytes.bad("has a compatibility document that is not an object"));
    }
    Ok(Hello {
        secret,
        connections,
        ram,
        compat,
    })
}

fn decode_reasons(bytes: &mut Bytes<'_>) -> Result<Vec<Refusal>, FrameError> {
    let count = usize::from(bytes.u16()?);
    if count == 0 || count > REFUSALS_MAX {
        return Err(bytes.bad("has no or too many reasons"));
    }
    (0..count)
        .map(|_| {
            Ok(Refusal {
                what: bytes.text(REFUSAL_TEXT_MAX)?,
                source: bytes.text(REFUSAL_TEXT_MAX)?,
                destination: bytes.text(REFUSAL_TEXT_MAX)?,
                remedy: bytes.text(REFUSAL_TEXT_MAX)?,
            })
        })
        .collect()
}

fn decode_pages<'a>(bytes: &mut Bytes<'a>) -> Result<Message<'a>, FrameError> {
    let offset = bytes.u64()?;
    let data = bytes.rest();
    let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
    if len == 0 || !len.is_multiple_of(PAGE_SIZE) || !offset.is_multiple_of(PAGE_SIZE) {
        return Err(bytes.bad("has a part of a page"));
    }
    if offset.checked_add(len).is_none() {
        return Err(bytes.bad("wraps"));
    }
    Ok(Message::Pages { offset, data })
}

fn decode_zeros<'a>(bytes: &mut Bytes<'a>) -> Result<Message<'a>, FrameError> {
    let payload = bytes.rest();
    if payload.is_empty() {
        return Err(bytes.bad("is empty"));
    }
    let mut entries = payload.chunks_exact(12);
    let mut runs = Vec::with_capacity(entries.len());
    for entry in &mut entries {
        let mut entry = Bytes::of(Kind::Zeros.name(), entry);
        let (offset, count) = (entry.u64()?, u64::from(entry.u32()?));
        if !offset.is_multiple_of(PAGE_SIZE) || !(1..=RUN_PAGES_MAX).contains(&count) {
            return Err(entry.bad("has a part of a page, no page or too many"));
        }
        if offset.checked_add(count * PAGE_SIZE).is_none() {
            return Err(entry.bad("wraps"));
        }
        runs.push(PageRun {
            first: offset / PAGE_SIZE,
            count,
        });
    }
    if entries.remainder().is_empty() {
        Ok(Message::Zeros(runs))
    } else {
        Err(bytes.bad("is cut short"))
    }
}
