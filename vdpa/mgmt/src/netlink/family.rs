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
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
/// In each group of the list.
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;
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
    let number = description(answer, name)?.u16(CTRL_ATTR_FAMILY_ID)?;
    number.ok_or_else(|| Malformed::attribute(CTRL_ATTR_FAMILY_ID, "it is missing"))
}

/// The number of one of the family's multicast groups in the answer.
pub(crate) fn group(answer: &[Message], name: &str, group: &str) -> Result<u32, Malformed> {
    let groups = description(answer, name)?.needed_nested(CTRL_ATTR_MCAST_GROUPS)?;
    // Each is in an attribute whose type is its position.
    for (_, value) in groups.iter() {
        let found = Attributes::parse(value)?;
        if found.string(CTRL_ATTR_MCAST_GRP_NAME).as_deref() == Some(group) {
            return found.needed_u32(CTRL_ATTR_MCAST_GRP_ID);
        }
    }
    Err(Malformed::new("answer", "it does not have the group"))
}

/// The attributes of the family called `name`.
fn description<'a>(answer: &'a [Message], name: &str) -> Result<Attributes<'a>, Malformed> {
    for message in answer {
        if message.message_type != GENL_ID_CTRL || message.command() != CTRL_CMD_NEWFAMILY {
            continue;
        }
        let attributes = Attributes::parse(&message.attributes)?;
        if attributes.string(CTRL_ATTR_FAMILY_NAME).as_deref() == Some(name) {
            return Ok(attributes);
        }
    }
    Err(Malformed::new("answer", "it does not have the family"))
}
