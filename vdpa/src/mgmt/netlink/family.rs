//! The controller of generic netlink: from a family's name to its number, which changes
//! each time its module is loaded (include/uapi/linux/genetlink.h).

use super::attributes::Attributes;
use super::exchange::Malformed;
use super::message::{Message, Mode, Request, string};

/// The controller's own number.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_NEWFAMILY: u8 = 1;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_VERSION: u8 = 1;

/// Asks for the number of the family called `name`.
pub(crate) fn request(name: &str) -> Request {
    let attributes = vec![string(CTRL_ATTR_FAMILY_NAME, name)];
    Request::generic(
        GENL_ID_CTRL,
        CTRL_CMD_GETFAMILY,
        CTRL_VERSION,
        Mode::Do,
        attributes,
    )
}

/// The number in the answer.
pub(crate) fn number(answer: &[Message], name: &str) -> Result<u16, Malformed> {
    for message in answer {
        if message.message_type != GENL_ID_CTRL || message.command() != CTRL_CMD_NEWFAMILY {
            continue;
        }
        let attributes = Attributes::parse(&message.attributes)?;
        if attributes.string(CTRL_ATTR_FAMILY_NAME).as_deref() != Some(name) {
            continue;
        }
        if let Some(number) = attributes.u16(CTRL_ATTR_FAMILY_ID)? {
            return Ok(number);
        }
    }
    Err(Malformed::new("answer", "it does not have the family"))
}
