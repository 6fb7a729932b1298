//! What a refusal says.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// A word for programs, such as `wrong_state`.
    pub code: String,
    /// A sentence for people.
    pub message: String,
    /// Why, from the outermost cause to the innermost.
    #[serde(default)]
    #[schema(required)]
    pub causes: Vec<String>,
    /// What can be done about it, where the message does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The request's name, as in the header `x-request-id` and in the log.
    #[serde(default)]
    #[schema(required)]
    pub request_id: String,
}
