//! The steps of a request that changes nothing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The steps that a request would take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// In order, each for people.
    pub steps: Vec<String>,
}
