//! Lists in responses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A list, in an object so that a later version can add members beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Items<T> {
    /// All of them, in order.
    pub items: Vec<T>,
}

impl<T> FromIterator<T> for Items<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let items = items.into_iter().collect();
        Self { items }
    }
}
