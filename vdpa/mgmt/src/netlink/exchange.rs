//! Assembles datagrams into a complete answer, without I/O.
//!
//! ```text
//!             a message                       an acknowledgement (NLMSG_ERROR 0)
//!   Do    waiting ──────> waiting ...        ────────────────────────────────> complete
//!   Dump  waiting ──────> waiting ...        ─────────── NLMSG_DONE ─────────> complete
//!         any: NLMSG_ERROR or NLMSG_DONE with an errno ──────────────────────> refused
//!         any: NLM_F_DUMP_INTR on a message, then NLMSG_DONE ────────────────> interrupted
//! ```
//!
//! Messages with another sequence number belong to an abandoned exchange, and are skipped. A
//! message shorter than its declared length is an error: half an answer would look like fewer
//! devices.

use netlink_packet_core::{
    NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP_INTR, NetlinkBuffer, NetlinkMessage, NetlinkPayload,
    NlasIterator,
};

use super::attributes::text;
use super::error::{CallError, Malformed, Refusal};
use super::message::{Incoming, Message, Mode, Protocol};

/// Size of `struct nlmsghdr`.
const NLMSG_HDRLEN: usize = 16;

/// `NLMSGERR_ATTR_MSG` (include/uapi/linux/netlink.h): the kernel's explanation.
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Maximum length of a stored explanation, in characters. The kernel's own limit for formatted ones
/// is 80.
const EXPLANATION_MAX: usize = 512;

/// Maximum messages of one answer: more devices than a machine can have.
const MESSAGES_MAX: usize = 1 << 16;

/// The kernel's range of errno values (MAX_ERRNO).
const ERRNO_MAX: i32 = 4095;

/// The state after a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More datagrams will follow.
    Waiting,
    /// The answer is complete; take it with [`Exchange::answer`].
    Complete,
    /// The answer is complete and inconsistent: the listed objects changed meanwhile.
    Interrupted,
}

/// A complete answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Its messages in the kernel's order.
    pub(crate) messages: Vec<Message>,
    /// The kernel's warning with a reported success.
    pub(crate) warning: Option<String>,
}

/// One request's answer, as far as it has arrived.
#[derive(Debug)]
pub(crate) struct Exchange {
    sequence: u32,
    mode: Mode,
    protocol: Protocol,
    interrupted: bool,
    answer: Answer,
}

impl Exchange {
    pub(crate) fn new(sequence: u32, mode: Mode, protocol: Protocol) -> Self {
        Self {
            sequence,
            mode,
            protocol,
            interrupted: false,
            answer: Answer::default(),
        }
    }

    /// Takes a datagram of the kernel.
    pub(crate) fn feed(&mut self, datagram: &[u8]) -> Result<Progress, CallError> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let (header, message) = split(&mut rest)?;
            if header.sequence_number() != self.sequence {
                continue;
            }
            if let Some(progress) = self.message(message)? {
                return Ok(progress);
            }
        }
        Ok(Progress::Waiting)
    }

    /// The messages that have arrived.
    pub(crate) fn answer(self) -> Answer {
        self.answer
    }

    fn message(&mut self, bytes: &[u8]) -> Result<Option<Progress>, CallError> {
        let message = NetlinkMessage::<Incoming>::deserialize(bytes)
            .map_err(|error| Malformed::new("message", error.to_string()))?;
        let flags = message.header.flags;
        self.interrupted |= flags & NLM_F_DUMP_INTR != 0;
        match message.payload {
            NetlinkPayload::InnerMessage(message) => {
                if self.answer.messages.len() == MESSAGES_MAX {
                    return Err(Malformed::new("answer", "it has too many messages").into());
                }
                self.answer.messages.push(message.message(self.protocol)?);
                Ok(None)
            }
            NetlinkPayload::Error(error) => {
                let code = error.raw_code();
                self.answer.warning = check(code, flags, after_request(&error.header, flags))?;
                match self.mode {
                    Mode::Do => Ok(Some(self.end())),
                    Mode::Dump => Err(Malformed::new("dump", "an acknowledgement ends it").into()),
                }
            }
            NetlinkPayload::Done(done) => {
                self.answer.warning = check(done.code, flags, &done.extended_ack)?;
                match self.mode {
                    Mode::Dump => Ok(Some(self.end())),
                    Mode::Do => Err(Malformed::new("answer", "NLMSG_DONE without a dump").into()),
                }
            }
            NetlinkPayload::Noop => Ok(None),
            NetlinkPayload::Overrun(_) => Err(Malformed::new("answer", "data was lost").into()),
            other => Err(Malformed::new("message", format!("unexpected {other:?}")).into()),
        }
    }

    fn end(&self) -> Progress {
        if self.interrupted {
            Progress::Interrupted
        } else {
            Progress::Complete
        }
    }
}

/// Takes the first message from a datagram.
fn split<'a>(rest: &mut &'a [u8]) -> Result<(NetlinkBuffer<&'a [u8]>, &'a [u8]), Malformed> {
    let header = NetlinkBuffer::new_checked(*rest)
        .map_err(|error| Malformed::new("message", error.to_string()))?;
    let length = usize::try_from(header.length()).unwrap_or(usize::MAX);
    let (message, _) = rest
        .split_at_checked(length)
        .ok_or_else(|| Malformed::new("message", "it is cut off"))?;
    // The last message of a datagram may lack its padding.
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Ok((header, message))
}

/// The messages of a multicast group's datagram, which is no answer. Messages that belong to no
/// family are left out.
pub(crate) fn notifications(
    datagram: &[u8],
    protocol: Protocol,
) -> Result<Vec<Message>, Malformed> {
    let mut messages = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let (_, message) = split(&mut rest)?;
        let message = NetlinkMessage::<Incoming>::deserialize(message)
            .map_err(|error| Malformed::new("message", error.to_string()))?;
        if let NetlinkPayload::InnerMessage(message) = message.payload {
            messages.push(message.message(protocol)?);
        }
    }
    Ok(messages)
}

/// The part after the request that an NLMSG_ERROR repeats: only its header if capped.
fn after_request(repeated: &[u8], flags: u16) -> &[u8] {
    let length = match NetlinkBuffer::new(repeated) {
        _ if flags & NLM_F_CAPPED != 0 || repeated.len() < NLMSG_HDRLEN => NLMSG_HDRLEN,
        header => usize::try_from(header.length()).unwrap_or(usize::MAX),
    };
    let aligned = length.checked_next_multiple_of(4).unwrap_or(usize::MAX);
    repeated.get(aligned..).unwrap_or_default()
}

/// Zero is success, perhaps with a warning; a negative errno is a refusal.
fn check(code: i32, flags: u16, attributes: &[u8]) -> Result<Option<String>, CallError> {
    let explanation = match flags & NLM_F_ACK_TLVS {
        0 => None,
        _ => explanation(attributes),
    };
    if code == 0 {
        return Ok(explanation);
    }
    let errno = code
        .checked_neg()
        .filter(|errno| (1..=ERRNO_MAX).contains(errno))
        .ok_or_else(|| Malformed::new("error", format!("{code} is not a kernel errno")))?;
    Err(Refusal { errno, explanation }.into())
}

/// The text among an error's attributes. A malformed list has none: the error matters more than its
/// explanation.
fn explanation(attributes: &[u8]) -> Option<String> {
    let found = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|one| one.kind() == NLMSGERR_ATTR_MSG)?;
    let clean: String = text(found.value())
        .trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(EXPLANATION_MAX)
        .collect();
    (!clean.is_empty()).then_some(clean)
}

#[cfg(test)]
mod tests;
