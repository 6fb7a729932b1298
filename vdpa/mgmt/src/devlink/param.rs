//! Parameters of instances: `enable_vnet`, `max_macs`, …, each with its own type and with values in
//! one or more configuration modes.

use std::fmt;

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::handle::Handle;
use super::numbered::numbered;
use super::operation::{Operation, invalid};
use super::uapi::*;
use crate::error::{Error, ErrorKind};
use crate::netlink::attributes::{Attributes, needed};
use crate::netlink::error::Malformed;
use crate::netlink::message::{Message, string, value};

numbered! {
    /// The time at which a value takes effect.
    Cmode: u8, "mode" {
        /// At once.
        Runtime = 0 "runtime",
        /// At the next reload.
        Driverinit = 1 "driverinit",
        /// After the next start of the NIC, which stores it in its own memory.
        Permanent = 2 "permanent",
    }
}

/// A parameter's value, with its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParamValue {
    /// 8 bits.
    U8(u8),
    /// 16 bits.
    U16(u16),
    /// 32 bits.
    U32(u32),
    /// 64 bits.
    U64(u64),
    /// Text of at most 31 bytes.
    String(String),
    /// On or off.
    Flag(bool),
    /// A type of a newer kernel.
    Other {
        /// The type's number.
        kind: u8,
        /// The raw value.
        value: Vec<u8>,
    },
}

impl ParamValue {
    fn of(kind: u8, attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        let data = DEVLINK_ATTR_PARAM_VALUE_DATA;
        Ok(match kind {
            NLA_U8 => Self::U8(attributes.needed_u8(data)?),
            NLA_U16 => Self::U16(attributes.needed_u16(data)?),
            NLA_U32 => Self::U32(attributes.needed_u32(data)?),
            NLA_U64 => Self::U64(needed(data, attributes.u64(data)?)?),
            NLA_STRING => Self::String(needed(data, attributes.string(data))?),
            NLA_FLAG => Self::Flag(attributes.has(data)),
            kind => Self::Other {
                kind,
                value: attributes.bytes(data).unwrap_or_default().to_vec(),
            },
        })
    }

    fn kind(&self) -> u8 {
        match self {
            Self::U8(_) => NLA_U8,
            Self::U16(_) => NLA_U16,
            Self::U32(_) => NLA_U32,
            Self::U64(_) => NLA_U64,
            Self::String(_) => NLA_STRING,
            Self::Flag(_) => NLA_FLAG,
            Self::Other { kind, .. } => *kind,
        }
    }

    /// DEVLINK_ATTR_PARAM_VALUE_DATA. A flag that is off has none.
    fn attribute(&self) -> Result<Option<DefaultNla>, Error> {
        let data = DEVLINK_ATTR_PARAM_VALUE_DATA;
        Ok(Some(match self {
            Self::U8(number) => value(data, &[*number]),
            Self::U16(number) => value(data, &number.to_ne_bytes()),
            Self::U32(number) => value(data, &number.to_ne_bytes()),
            Self::U64(number) => value(data, &number.to_ne_bytes()),
            Self::String(text) => {
                if text.len() >= DEVLINK_PARAM_MAX_STRING_VALUE || text.contains('\0') {
                    return Err(long_text());
                }
                string(data, text)
            }
            Self::Flag(true) => value(data, &[]),
            Self::Flag(false) => return Ok(None),
            Self::Other { value: bytes, .. } => {
                if bytes.len() > DEVLINK_PARAM_MAX_STRING_VALUE {
                    return Err(long_text());
                }
                value(data, bytes)
            }
        }))
    }
}

fn long_text() -> Error {
    invalid("a parameter's text has at most 31 bytes, without NUL")
}

impl fmt::Display for ParamValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(number) => write!(f, "{number}"),
            Self::U16(number) => write!(f, "{number}"),
            Self::U32(number) => write!(f, "{number}"),
            Self::U64(number) => write!(f, "{number}"),
            Self::String(text) => write!(f, "{text:?}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Other { kind, .. } => write!(f, "a value of type {kind}"),
        }
    }
}

/// The values of a type, as part of a sentence.
fn name_of_type(kind: u8) -> &'static str {
    match kind {
        NLA_U8 => "a u8",
        NLA_U16 => "a u16",
        NLA_U32 => "a u32",
        NLA_U64 => "a u64",
        NLA_STRING => "a string",
        NLA_FLAG => "a flag",
        _ => "of an unknown type",
    }
}

/// A parameter (`DEVLINK_CMD_PARAM_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// The instance that has it.
    pub handle: Handle,
    /// Its name.
    pub name: String,
    /// Whether all drivers use this name.
    pub generic: bool,
    /// The number of its type (`NLA_U8`, …).
    kind: u8,
    /// Its values, by configuration mode.
    pub values: Vec<(Cmode, ParamValue)>,
}

impl Param {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let param = attributes.needed_nested(DEVLINK_ATTR_PARAM)?;
        let kind = param.needed_u8(DEVLINK_ATTR_PARAM_TYPE)?;
        let mut values = Vec::new();
        let list = param.needed_nested(DEVLINK_ATTR_PARAM_VALUES_LIST)?;
        for value in list.each(DEVLINK_ATTR_PARAM_VALUE) {
            let value = Attributes::parse(value)?;
            let cmode = value.needed_u8(DEVLINK_ATTR_PARAM_VALUE_CMODE)?;
            values.push((Cmode::from(cmode), ParamValue::of(kind, &value)?));
        }
        Ok(Self {
            handle: Handle::of(&attributes)?,
            name: param.needed_string(DEVLINK_ATTR_PARAM_NAME)?,
            generic: param.has(DEVLINK_ATTR_PARAM_GENERIC),
            kind,
            values,
        })
    }

    /// Its value of this configuration mode.
    #[must_use]
    pub fn value(&self, cmode: Cmode) -> Option<&ParamValue> {
        let mut values = self.values.iter();
        values.find(|one| one.0 == cmode).map(|one| &one.1)
    }

    /// Fails if the parameter cannot have this value.
    pub(super) fn check(&self, cmode: Cmode, value: &ParamValue) -> Result<(), Error> {
        let Self { handle, name, .. } = self;
        let problem = if value.kind() != self.kind {
            let (expected, given) = (name_of_type(self.kind), name_of_type(value.kind()));
            format!("is {expected}, not {given}")
        } else if self.value(cmode).is_none() {
            format!("cannot be set as {cmode}")
        } else {
            return Ok(());
        };
        let message = format!("the parameter {name} of {handle} {problem}");
        Err(Error::new(ErrorKind::Unusable, message))
    }
}

/// The command of a request, and that of its answers.
const GET: (u8, u8) = (DEVLINK_CMD_PARAM_GET, DEVLINK_CMD_PARAM_GET);

impl Devlink {
    /// All parameters of all instances, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn params(&self) -> Result<Vec<Param>, Error> {
        let operation = Operation::List("parameters");
        self.family.dump(&operation, GET, Vec::new(), Param::of)
    }

    /// One parameter.
    ///
    /// # Errors
    /// `NoParam` if the driver has no such parameter, `NotFound`, or another one.
    pub fn param(&self, handle: &Handle, name: &str) -> Result<Param, Error> {
        let operation = Operation::ShowParam { handle, name };
        self.family
            .get(&operation, GET, named(handle, name)?, Param::of)
    }

    /// Sets a parameter. Reads its type first: the kernel would reject a number of another size
    /// without an explanation.
    ///
    /// # Errors
    /// `Unusable`, `Invalid` before it is sent; `NoParam`, `NotPermitted`, `NotFound`, or another
    /// one.
    pub fn set_param(
        &self,
        handle: &Handle,
        name: &str,
        cmode: Cmode,
        value: &ParamValue,
    ) -> Result<(), Error> {
        self.param(handle, name)?.check(cmode, value)?;
        let operation = Operation::SetParam { handle, name };
        let mut attributes = named(handle, name)?;
        attributes.extend(setting(cmode, value)?);
        self.family
            .change(&operation, DEVLINK_CMD_PARAM_SET, attributes)
    }
}

/// The attributes that name a parameter.
fn named(handle: &Handle, name: &str) -> Result<Vec<DefaultNla>, Error> {
    if !crate::name::is_name(name) {
        return Err(invalid(format!("{name:?} does not name a parameter")));
    }
    let mut attributes = handle.attributes();
    attributes.push(string(DEVLINK_ATTR_PARAM_NAME, name));
    Ok(attributes)
}

/// The attributes that set it.
pub(super) fn setting(
    cmode: Cmode,
    new: &ParamValue,
) -> Result<impl Iterator<Item = DefaultNla>, Error> {
    let cmode = value(DEVLINK_ATTR_PARAM_VALUE_CMODE, &[cmode.into()]);
    let kind = value(DEVLINK_ATTR_PARAM_TYPE, &[new.kind()]);
    Ok([cmode, kind].into_iter().chain(new.attribute()?))
}
