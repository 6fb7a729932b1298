//! Chooses the source of a NIC for a bridge: hardware if a port of the bridge has some, else
//! software.

use super::error::NicError;
use super::nics::Nics;
use super::record::MadeNic;
use super::request::NicRequest;
use super::software::SOFTWARE;
use crate::link::Links;
use vdpa::causes::in_one_line;

/// The chosen source of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// For [`NicRequest::from`].
    pub from: String,
    /// Why, as a part of a sentence.
    pub because: String,
}

impl Nics {
    /// Chooses the source for a NIC that is to be a port of a bridge. The first port of the bridge
    /// that is a NIC on which `request` is possible; without one, software. `others` are the
    /// existing NICs.
    ///
    /// # Errors
    /// The bridge does not exist, or the kernel's error.
    pub fn best_source(
        &self,
        request: &NicRequest,
        bridge: &str,
        others: &[MadeNic],
    ) -> Result<Choice, NicError> {
        let links = Links::open()?;
        let bridge = links.link(bridge)?;
        let mut refused = Vec::new();
        for port in links.links()? {
            // Taps and other virtual interfaces have no parent.
            if port.master != Some(bridge.index) || port.parent.is_none() {
                continue;
            }
            let candidate = NicRequest {
                from: port.name.clone(),
                ..request.clone()
            };
            match self.plan_steps(&candidate, others) {
                Ok(_) => {
                    return Ok(Choice {
                        because: format!("the port {} of {} has functions", port.name, bridge.name),
                        from: port.name,
                    });
                }
                Err(error) => refused.push(format!("{}: {}", port.name, in_one_line(&error))),
            }
        }
        let because = if refused.is_empty() {
            format!("no port of {} is a NIC", bridge.name)
        } else {
            refused.join("; ")
        };
        Ok(Choice {
            from: SOFTWARE.to_owned(),
            because,
        })
    }
}
