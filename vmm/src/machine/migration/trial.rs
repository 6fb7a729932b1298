//! Asks the destination whether a machine could move and what that would cost; changes neither
//! side.
//!
//! Owns the result. It must not know how the destination determines it.

use std::time::{Duration, Instant};

use bellhop_api::machine::{Forecast, MigrationObstacle, MigrationTrial};
use vdpa::causes::in_one_line;

use super::outgoing::{CONNECT, SWITCH};
use super::requests::Offer;
use super::{Endpoint, SendConfig, milliseconds};
use crate::machine::error::{NotMovable, RequestError};
use crate::machine::handle::Handle;
use crate::migration::endpoint::Route;
use crate::migration::protocol::Refusal;
use crate::migration::{self, MigrationError, RamImage, Timeouts};

/// How long the destination may take to open its devices and map all guest memory for them. Less
/// than the timeout of API clients (the node daemon: 90 s) and of a migration.
const ANSWER: Duration = Duration::from_secs(60);

impl Handle {
    /// Asks the waiting destination whether it would take the machine, which keeps running. The
    /// vCPUs pause for a moment, since only a parked vCPU can report its CPUID. The destination
    /// builds the machine with its devices for the test, and waits again. `rate` is the previous
    /// transfer rate to that destination, in bytes per second on the wire. `route` is the result of
    /// [`route`](super::route).
    ///
    /// Blocks: give it a thread.
    ///
    /// # Errors
    /// [`RequestError`]: the machine cannot be described, since it is being saved or sent, or has
    /// ended.
    pub fn try_migration(
        &self,
        config: &SendConfig,
        rate: Option<u64>,
        route: &Route,
    ) -> Result<MigrationTrial, RequestError> {
        let mut obstacles = Vec::new();
        let offer = match self.on_vmm_thread(|machine| machine.offer(false))? {
            Ok(offer) => Some(offer),
            Err(RequestError::NotMovable(why)) => {
                obstacles.push(here(&why));
                None
            }
            Err(error) => return Err(error),
        };
        obstacles.extend(too_short(config.downtime_ms));
        let ram = match &offer {
            Some(offer) => Some(RamImage::new(&offer.ram)),
            None => self.ram().map(|ram| RamImage::new(&ram)),
        };
        let ram = ram.ok_or(RequestError::Ended)?;
        let mut prepare = None;
        if let Some(offer) = &offer {
            match ask(config, route, offer, &ram)? {
                Ok(took) => prepare = Some(took),
                Err(there) => obstacles.extend(there),
            }
        }
        let data_bytes = ram.data_bytes();
        Ok(MigrationTrial {
            destination: config.destination.to_string(),
            movable: obstacles.is_empty(),
            obstacles,
            forecast: Some(Forecast {
                ram_bytes: ram.len(),
                data_bytes,
                bytes_per_second: rate,
                copy_ms: rate.and_then(|rate| copy_ms(data_bytes, rate)),
                prepare_ms: prepare.map(milliseconds),
                downtime_min_ms: milliseconds(SWITCH),
                downtime_max_ms: config.downtime_ms.into(),
            }),
        })
    }
}

/// Returns the time to send `bytes` at this rate; `None` at a rate of 0.
fn copy_ms(bytes: u64, rate: u64) -> Option<u64> {
    let milliseconds = (u128::from(bytes) * 1000).checked_div(rate.into())?;
    Some(u64::try_from(milliseconds).unwrap_or(u64::MAX))
}

/// Returns how long the destination took to prepare, or its objections.
fn ask(
    config: &SendConfig,
    route: &Route,
    offer: &Offer,
    ram: &RamImage,
) -> Result<Result<Duration, Vec<MigrationObstacle>>, RequestError> {
    let compat = match serde_json::to_value(&offer.document) {
        Ok(compat) => compat,
        Err(error) => return Ok(Err(vec![plain(&error)])),
    };
    let stream = match route.connect(CONNECT) {
        Ok(stream) => stream,
        Err(error) => {
            return Ok(Err(vec![MigrationObstacle {
                remedy: Some(waiting_at(&config.destination)),
                ..plain(&error)
            }]));
        }
    };
    let timeouts = Timeouts {
        accept: ANSWER,
        ..Timeouts::default()
    };
    let asked = Instant::now();
    let secret = config.secret();
    Ok(
        match migration::try_out(compat, ram, stream, secret, &timeouts) {
            Ok(()) => Ok(asked.elapsed()),
            Err(MigrationError::Refused { reasons }) => {
                Err(reasons.into_iter().map(MigrationObstacle::from).collect())
            }
            Err(error) => Err(vec![plain(&error)]),
        },
    )
}

/// Returns the command that starts a waiting process at the destination.
fn waiting_at(destination: &Endpoint) -> String {
    let more = match destination {
        Endpoint::Unix(_) => "",
        Endpoint::Tcp { .. } => " --kernel PATH --tls-cert FILE --tls-key FILE --tls-ca FILE",
    };
    format!(
        "at the destination: bellhop run --receive {destination} --vdpa \
         id=NAME,path=/dev/vhost-vdpa-N --api-socket PATH{more}"
    )
}

/// A guest whose allowed downtime is less than devices and state take is never stopped.
fn too_short(downtime_ms: u32) -> Option<MigrationObstacle> {
    let needed = SWITCH.as_millis();
    (u128::from(downtime_ms) < needed).then(|| MigrationObstacle {
        reason: format!(
            "the allowed downtime is {downtime_ms} ms, but devices and state alone need an \
             estimated {needed} ms"
        ),
        remedy: Some("allow a longer downtime: --downtime 300".to_owned()),
    })
}

fn plain(error: &dyn std::error::Error) -> MigrationObstacle {
    MigrationObstacle {
        reason: in_one_line(error),
        remedy: None,
    }
}

fn here(why: &NotMovable) -> MigrationObstacle {
    MigrationObstacle {
        remedy: Some(why.remedy()),
        ..plain(why)
    }
}

impl From<Refusal> for MigrationObstacle {
    fn from(refusal: Refusal) -> Self {
        let Refusal {
            what,
            source,
            destination,
            remedy,
        } = refusal;
        Self {
            reason: format!("{what}: {source} here, {destination} there"),
            remedy: (!remedy.is_empty()).then_some(remedy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_remedy() {
        let refusal = Refusal {
            what: "device net0".to_owned(),
            source: "as the guest sees it".to_owned(),
            destination: "incompatible (no feature MRG_RXBUF)".to_owned(),
            remedy: "bellhop dev add".to_owned(),
        };
        let obstacle = MigrationObstacle::from(refusal);
        assert_eq!(
            obstacle.reason,
            "device net0: as the guest sees it here, incompatible (no feature MRG_RXBUF) there"
        );
        assert_eq!(obstacle.remedy.as_deref(), Some("bellhop dev add"));
        assert_eq!(MigrationObstacle::from(Refusal::default()).remedy, None);

        let disk = here(&NotMovable::Disk("data".to_owned()));
        assert!(disk.reason.contains("data"), "{}", disk.reason);
        assert!(disk.remedy.unwrap().contains("/v1/vm/disks/data"));
    }

    #[test]
    fn memory_takes_the_time_of_its_rate() {
        assert_eq!(copy_ms(100 << 20, 50 << 20), Some(2000));
        assert_eq!(copy_ms(1, 0), None);
        assert_eq!(copy_ms(u64::MAX, 1), Some(u64::MAX));
    }

    #[test]
    fn a_downtime_that_nothing_fits_into_is_an_obstacle() {
        let needed = u32::try_from(SWITCH.as_millis()).unwrap();
        assert_eq!(too_short(needed), None);
        assert!(too_short(needed - 1).unwrap().remedy.is_some());
        assert!(too_short(0).is_some());
    }

    #[test]
    fn the_command_for_another_host_is_complete() {
        let remote = waiting_at(&"tcp:b:7444".parse().unwrap());
        assert!(remote.contains("--receive tcp:b:7444") && remote.contains("--kernel"));
        let local = waiting_at(&"unix:/run/move".parse().unwrap());
        assert!(!local.contains("--kernel"));
    }
}
