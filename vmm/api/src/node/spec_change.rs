//! The response to a change of a VM's spec.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::Vm;

described! {
    /// When a change of a member takes effect.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Applied {
        /// Now: the change has taken effect.
        Now,
        /// At the next start of the virtual machine's process. A reset of the guest is not such a
        /// start.
        NextStart,
    }
}

/// A member of a virtual machine that was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpecChange {
    /// The member, as a JSON pointer (RFC 6901): `/spec/memory/size`.
    #[schema(format = "json-pointer")]
    pub field: String,
    /// Its former value; null if it had none.
    #[schema(required)]
    pub from: Value,
    /// Its new value; null if it has none.
    #[schema(required)]
    pub to: Value,
    /// When the change takes effect.
    pub applied: Applied,
}

/// The result of a merge patch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmChanges {
    /// The virtual machine after the request.
    pub vm: Vm,
    /// The members that were changed, or with `dry_run` would be.
    pub changes: Vec<SpecChange>,
}
