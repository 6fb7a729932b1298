//! The saved state of the power controls: the guest's request that the machine has not served yet.
//! The request registers themselves hold nothing.

use serde::{Deserialize, Serialize};

use super::{PowerRequest, PowerSignal};

/// A saved power signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerState {
    /// The pending request.
    pub request: Option<PowerRequest>,
}

impl PowerSignal {
    /// Returns the request, which stays pending.
    #[must_use]
    pub fn save(&self) -> PowerState {
        PowerState {
            request: *self.request.lock(),
        }
    }

    /// Repeats the saved request. Any saved value is valid. A request that is already pending
    /// stays.
    pub fn restore(&self, state: &PowerState) {
        if let Some(request) = state.request {
            self.request(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::through_a_file;

    #[test]
    fn a_request_is_not_lost_on_the_way() {
        for request in [None, Some(PowerRequest::Off), Some(PowerRequest::Reset)] {
            let source = PowerSignal::new().unwrap();
            if let Some(request) = request {
                source.request(request);
            }
            let state = through_a_file(&source.save());
            assert_eq!(source.take(), request, "saving must not take it");
            let destination = PowerSignal::new().unwrap();
            destination.restore(&state);
            assert_eq!(destination.eventfd().read().is_ok(), request.is_some());
            assert_eq!(destination.take(), request);
        }
    }
}
