//! Reloads: a driver takes its whole instance down and recreates it, with the parameters set in
//! configuration mode driverinit.

use super::connection::Devlink;
use super::handle::Handle;
use super::numbered::numbered;
use super::operation::Operation;
use super::uapi::*;
use crate::error::Error;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::{Message, value};

numbered! {
    /// The effect of a reload.
    ReloadAction: u8, "action" {
        /// The driver's own part is recreated.
        DriverReinit = 1 "driver_reinit",
        /// Stored firmware is activated.
        FwActivate = 2 "fw_activate",
    }
}

numbered! {
    /// The limit of a reload.
    ReloadLimit: u8, "limit" {
        /// No limit.
        Unspecified = 0 "unspecified",
        /// No reset; links stay up.
        NoReset = 1 "no_reset",
    }
}

/// The number of reloads with an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReloadStat {
    /// The action.
    pub action: ReloadAction,
    /// The limit.
    pub limit: ReloadLimit,
    /// The number.
    pub count: u32,
}

/// The counters in an attribute of DEVLINK_ATTR_DEV_STATS: for each action a list of entries.
pub(super) fn reload_stats(
    stats: &Attributes<'_>,
    kind: u16,
) -> Result<Vec<ReloadStat>, Malformed> {
    let mut found = Vec::new();
    let Some(actions) = stats.nested(kind)? else {
        return Ok(found);
    };
    for value in actions.each(DEVLINK_ATTR_RELOAD_ACTION_INFO) {
        let info = Attributes::parse(value)?;
        let action = info.needed_u8(DEVLINK_ATTR_RELOAD_ACTION)?;
        let entries = info.needed_nested(DEVLINK_ATTR_RELOAD_ACTION_STATS)?;
        for value in entries.each(DEVLINK_ATTR_RELOAD_STATS_ENTRY) {
            let entry = Attributes::parse(value)?;
            let limit = entry.needed_u8(DEVLINK_ATTR_RELOAD_STATS_LIMIT)?;
            found.push(ReloadStat {
                action: ReloadAction::from(action),
                limit: ReloadLimit::from(limit),
                count: entry.needed_u32(DEVLINK_ATTR_RELOAD_STATS_VALUE)?,
            });
        }
    }
    Ok(found)
}

/// The actions of a reload: a bit for each, in struct nla_bitfield32 (u32 value, u32 selector).
pub(super) fn performed(message: &Message) -> Result<Vec<ReloadAction>, Malformed> {
    let attributes = Attributes::parse(&message.attributes)?;
    let Some(actions) = attributes.bitfield32(DEVLINK_ATTR_RELOAD_ACTIONS_PERFORMED)? else {
        return Ok(Vec::new());
    };
    let done = actions.value & actions.selector;
    let numbers = (0_u8..32).filter(|&bit| done & 1 << bit != 0);
    Ok(numbers.map(ReloadAction::from).collect())
}

impl Devlink {
    /// Reloads an instance, and returns all actions that the driver performed.
    ///
    /// # Errors
    /// `NotSupported`, `NotPermitted`, `NotFound`, or another one. After a failure the instance may
    /// be down: [`Instance::reload_failed`](super::Instance) shows it.
    pub fn reload(
        &self,
        handle: &Handle,
        action: ReloadAction,
    ) -> Result<Vec<ReloadAction>, Error> {
        let operation = Operation::Reload(handle);
        let mut attributes = handle.attributes();
        attributes.push(value(DEVLINK_ATTR_RELOAD_ACTION, &[action.into()]));
        let commands = (DEVLINK_CMD_RELOAD, DEVLINK_CMD_RELOAD);
        self.family.get(&operation, commands, attributes, performed)
    }
}
