//! The steps of a dry run.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The steps that a request would take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The steps in order, as texts for people.
    pub steps: Vec<String>,
}
