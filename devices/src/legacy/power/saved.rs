//! The saved state of the power controls: what the guest has asked for and the machine
//! has not done yet. The registers that it asks with hold nothing.

use serde::{Deserialize, Serialize};

use super::{PowerRequest, PowerSignal};

/// A saved power signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerState {
    /// What the guest waits for.
    pub request: Option<PowerRequest>,
}

impl PowerSignal {
    /// The request, which stays to be taken.
    #[must_use]
    pub fn save(&self) -> PowerState {
        PowerState {
            request: *self.request.lock(),
        }
    }

    /// Asks again for what was asked for. Any saved value is a possible one. A request that is here already stays.
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
