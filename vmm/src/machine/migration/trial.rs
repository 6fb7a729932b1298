//! Whether a machine could leave, and what that would cost: asked of the destination, and nothing changes on either side.
//!
//! Owns what is found. It must not know how the destination finds out.

use std::time::{Duration, Instant};

use bellhop_api::machine::{Forecast, MigrationObstacle, MigrationTrial};
use vdpa::causes::in_one_line;

use super::departure::{CONNECT, SWITCH};
use super::requests::Offer;
use super::{Endpoint, SendConfig, milliseconds};
use crate::machine::error::{NotMovable, RequestError};
use crate::machine::handle::Handle;
use crate::migration::endpoint::connect;
use crate::migration::protocol::Refusal;
use crate::migration::tls::Tls;
use crate::migration::{self, MigrationError, RamImage, Timeouts};

/// How long the destination may take to open its devices and map all guest memory for them: less than whoever asks over the
/// API waits (the node daemon: 90 s), and than a migration does.
const ANSWER: Duration = Duration::from_secs(60);

impl Handle {
    /// Asks whoever waits at the destination whether it would take the machine, which runs on: the vCPUs rest for a moment,
    /// since they say only then which CPU the guest was told that it has. The destination builds the machine to find out, with
    /// its devices, and waits on. `rate` is how fast memory went there the last time, in bytes per
    /// second on the wire. `tls` is what [`load_tls`](super::load_tls) gave.
    ///
    /// Blocks: give it a thread.
    ///
    /// # Errors
    /// [`RequestError`]: the machine cannot be asked what it is made of, since it is being saved or sent, or has ended.
    pub fn try_migration(
        &self,
        config: &SendConfig,
        rate: Option<u64>,
        tls: Option<&Tls>,
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
            match ask(config, tls, offer, &ram)? {
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

/// How long so many bytes take at this rate; `None` if none go over.
fn copy_ms(bytes: u64, rate: u64) -> Option<u64> {
    let milliseconds = (u128::from(bytes) * 1000).checked_div(rate.into())?;
    Some(u64::try_from(milliseconds).unwrap_or(u64::MAX))
}

/// How long the destination took to make ready for it, or what it has against it.
fn ask(
    config: &SendConfig,
    tls: Option<&Tls>,
    offer: &Offer,
    ram: &RamImage,
) -> Result<Result<Duration, Vec<MigrationObstacle>>, RequestError> {
    let compat = match serde_json::to_value(&offer.document) {
        Ok(compat) => compat,
        Err(error) => return Ok(Err(vec![plain(&error)])),
    };
    let stream = match connect(&config.destination, CONNECT, tls) {
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
    Ok(match migration::try_out(compat, ram, stream, &timeouts) {
        Ok(()) => Ok(asked.elapsed()),
        Err(MigrationError::Refused { reasons }) => {
            Err(reasons.into_iter().map(MigrationObstacle::from).collect())
        }
        Err(error) => Err(vec![plain(&error)]),
    })
}

/// The command that has a process wait there.
fn waiting_at(destination: &Endpoint) -> String {
    let more = match destination {
        Endpoint::Unix(_) => "",
        Endpoint::Tcp { .. } => " --kernel PATH --tls-cert FILE --tls-key FILE --tls-ca FILE",
    };
    format!(
        "at the destination: bellhop run --receive {destination} --vdpa id=NAME,path=/dev/vhost-vdpa-N --api-socket PATH{more}"
    )
}

/// A guest that may stand still only for less than devices and state take is never stopped.
fn too_short(downtime_ms: u32) -> Option<MigrationObstacle> {
    let needed = SWITCH.as_millis();
    (u128::from(downtime_ms) < needed).then(|| MigrationObstacle {
        reason: format!(
            "the guest may stand still for {downtime_ms} ms, and devices and state alone are taken to need {needed} ms"
        ),
        remedy: Some("allow it longer: --downtime 300".to_owned()),
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
            reason: format!("{what} is {source} here and {destination} there"),
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
            source: "what the guest relies on".to_owned(),
            destination: "another one: no feature MRG_RXBUF".to_owned(),
            remedy: "bellhop dev add".to_owned(),
        };
        let obstacle = MigrationObstacle::from(refusal);
        assert_eq!(
            obstacle.reason,
            "device net0 is what the guest relies on here and another one: no feature MRG_RXBUF there"
        );
        assert_eq!(obstacle.remedy.as_deref(), Some("bellhop dev add"));
        assert_eq!(MigrationObstacle::from(Refusal::default()).remedy, None);

        let disk = here(&NotMovable::Disk("data".to_owned()));
        assert!(disk.reason.contains("data"), "{}", disk.reason);
        assert!(disk.remedy.unwrap().contains("/v1/vm/disks/data"));
    }

    #[test]
    fn memory_takes_as_long_as_its_rate_says() {
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
    fn the_command_for_another_host_has_what_it_needs() {
        let remote = waiting_at(&"tcp:b:7444".parse().unwrap());
        assert!(remote.contains("--receive tcp:b:7444") && remote.contains("--kernel"));
        let local = waiting_at(&"unix:/run/move".parse().unwrap());
        assert!(!local.contains("--kernel"));
    }
}
