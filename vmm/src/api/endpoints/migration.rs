//! `/v1/vm/migration`: the machine leaves for another process, or comes from one.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::{
    CONNECTIONS_MAX, DowntimeParts, Forecast, MigrationPhase, MigrationRequest, MigrationStatus,
    MigrationTrial, Place, SendConfig, SettleRequest,
};
use bellhop_api::responses::BodyErrors;

use super::descriptors::Descriptors;
use super::{Api, exactly};
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::{ErrorBody, HttpError, on_worker};
use crate::machine::{Arriving, Migration, MigrationEnd, RequestError, Trial, load_tls};
use crate::migration::Phase;

fn trial_info(config: &SendConfig, trial: Trial, bytes_per_second: Option<u64>) -> MigrationTrial {
    let time = |rate| {
        let milliseconds = u128::from(trial.data_bytes) * 1000 / u128::from(rate);
        u64::try_from(milliseconds).unwrap_or(u64::MAX)
    };
    MigrationTrial {
        destination: config.destination.to_string(),
        movable: trial.obstacles.is_empty(),
        forecast: Some(Forecast {
            ram_bytes: trial.ram_bytes,
            data_bytes: trial.data_bytes,
            bytes_per_second,
            copy_ms: bytes_per_second.filter(|&rate| rate > 0).map(time),
            prepare_ms: trial.prepare.map(milliseconds),
            downtime_min_ms: milliseconds(trial.downtime),
            downtime_max_ms: config.downtime_ms.into(),
        }),
        obstacles: trial.obstacles,
    }
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn status(migration: &Migration, end: Option<MigrationEnd>) -> MigrationStatus {
    let progress = migration.progress();
    let parts = progress.downtime_parts;
    let (phase, error) = match end {
        Some(MigrationEnd::Moved) => (MigrationPhase::Moved, None),
        Some(MigrationEnd::Stayed { why }) => (MigrationPhase::Stayed, Some(why)),
        Some(MigrationEnd::Unsettled { why }) => (MigrationPhase::Unsettled, Some(why)),
        None => {
            let phase = match progress.phase {
                Phase::Offer => MigrationPhase::Offer,
                Phase::Join => MigrationPhase::Join,
                Phase::Copy => MigrationPhase::Copy,
                Phase::Stop => MigrationPhase::Stop,
                Phase::Ready => MigrationPhase::Ready,
                Phase::Go => MigrationPhase::Go,
                Phase::Done => MigrationPhase::Done,
            };
            (phase, None)
        }
    };
    MigrationStatus {
        direction: migration.direction(),
        peer: migration.peer().to_string(),
        phase,
        rounds: progress.round,
        elapsed_ms: milliseconds(progress.elapsed),
        ram_bytes: progress.ram_bytes,
        sent_bytes: progress.bytes_sent,
        pages: progress.pages,
        zero_pages: progress.zero_pages,
        left_bytes: progress.bytes_left,
        bytes_per_second: progress.bytes_per_second,
        dirty_bytes_per_second: progress.dirty_bytes_per_second,
        throttle_percent: progress.throttle_percent,
        forecast_downtime_ms: progress
            .forecast
            .map(|forecast| milliseconds(forecast.downtime)),
        forecast_rounds: progress.forecast.and_then(|forecast| forecast.rounds_left),
        downtime_ms: progress.downtime.map(exactly),
        mediation_ms: progress.mediation.map(exactly),
        downtime_parts_ms: DowntimeParts {
            stop: parts.stop.map(exactly),
            memory: parts.memory.map(exactly),
            state: parts.state.map(exactly),
            ready: parts.ready.map(exactly),
            go: parts.go.map(exactly),
        },
        in_flight: migration.in_flight(),
        error,
    }
}

/// The machine's migration: the one under way, or the last one
///
/// A source that has sent its machine ends when somebody has read that here, or after 10 s.
#[utoipa::path(get, path = "/v1/vm/migration", operation_id = "get_migration", responses(
    (status = 200, description = "How far it is", body = MigrationStatus),
    (status = 404, description = "There was none", body = ErrorBody),
))]
pub(super) async fn show(State(api): Api) -> Result<Json<MigrationStatus>, ApiError> {
    let migration = api.migration()?;
    let end = migration.see_end();
    Ok(Json(status(&migration, end)))
}

/// Send the machine to another process, or have it come from one
///
/// The answer comes at once; `GET` says how far it is. A machine that is sent runs until the last pages go over;
/// whatever fails before GO leaves it as it was. A machine can be received only in the state NotStarted, in a process
/// that has none; it gets the source's configuration, but for its NICs' devices and the files that it boots from.
///
/// With `dry_run` the destination is only asked whether it would take the machine, and waits on. The answer comes when it is
/// known, which takes as long as it takes to open the devices there.
#[utoipa::path(post, path = "/v1/vm/migration", operation_id = "start_migration",
    request_body = MigrationRequest, responses(
    (status = 200, description = "With `dry_run`: whether it could be sent", body = MigrationTrial),
    (status = 202, description = "It is under way", body = MigrationStatus),
    BodyErrors,
    (status = 409, description = "Not from the state that the machine is in, or one is under way", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or nobody can be waited for there; or certificates are missing (over TCP) or cannot be used; or a descriptor did not come along, or is no vDPA device", body = ErrorBody),
    (status = 500, description = "The host cannot do it", body = ErrorBody),
    (status = 503, description = "This process ends", body = ErrorBody),
))]
pub(super) async fn begin(
    State(api): Api,
    received: Received,
    JsonBody(wanted): JsonBody<MigrationRequest>,
) -> Result<Response, ApiError> {
    let migration = match wanted {
        MigrationRequest::Send(config) => {
            if !config.is_possible() {
                return Err(HttpError::Invalid {
                    at: " at send.connections".to_owned(),
                    reason: format!("1 to {CONNECTIONS_MAX} are possible"),
                }
                .into());
            }
            let machine = api.running()?;
            let (config, tls) = on_worker(move || {
                let tls = load_tls(&config.destination, config.tls.as_ref(), config.plaintext)?;
                Ok::<_, crate::Error>((config, tls))
            })
            .await??;
            if config.dry_run {
                let (config, trial) = on_worker(move || {
                    let trial = machine.try_migration(&config, tls.as_ref())?;
                    Ok::<_, RequestError>((config, trial))
                })
                .await??;
                let rate = api.known_rate(&config.destination);
                return Ok(Json(trial_info(&config, trial, rate)).into_response());
            }
            api.send(config, tls)?
        }
        MigrationRequest::Receive(mut config) => {
            let mut descriptors = Descriptors::of(&received)?;
            for nic in &mut config.vdpa {
                nic.take_descriptor(|number| descriptors.take(number))?;
            }
            drop(descriptors);
            api.before_boot("a machine can come only where none is")?;
            let arriving = on_worker(move || Arriving::new(config)).await??;
            api.receive(arriving)?
        }
    };
    let under_way = status(&migration, migration.end());
    Ok((StatusCode::ACCEPTED, Json(under_way)).into_response())
}

/// Say where the guest is, when a migration is not settled
///
/// Only in the phase Unsettled: the connection broke while the guest was handed over. Look at the other host first: if it
/// is Moved or Running there, say There here, else Here. Who says Here on both has the guest twice.
#[utoipa::path(patch, path = "/v1/vm/migration", operation_id = "resolve_migration",
    request_body = SettleRequest, responses(
    (status = 204, description = "The guest goes on here, or the machine ends"),
    BodyErrors,
    (status = 404, description = "There was no migration", body = ErrorBody),
    (status = 409, description = "It is settled, or still under way; or the machine has ended", body = ErrorBody),
    (status = 422, description = "An unknown field or a wrong value, named; or the machine cannot go on: a device does not take its state", body = ErrorBody),
    (status = 500, description = "The host failed at it", body = ErrorBody),
))]
pub(super) async fn settle(
    State(api): Api,
    JsonBody(wanted): JsonBody<SettleRequest>,
) -> Result<StatusCode, ApiError> {
    let migration = api.migration()?;
    let machine = api.running()?;
    if !matches!(migration.end(), Some(MigrationEnd::Unsettled { .. })) {
        return Err(ApiError::Settled);
    }
    let here = wanted.settle == Place::Here;
    on_worker(move || machine.settle(&migration, here)).await??;
    Ok(StatusCode::NO_CONTENT)
}

/// End a migration
///
/// Until the guest is handed over: then it comes too late, and the phase tells. A machine that is sent goes on as it
/// was; a machine that is waited for does not come.
#[utoipa::path(delete, path = "/v1/vm/migration", operation_id = "cancel_migration", responses(
    (status = 202, description = "It ends: GET says how"),
    (status = 404, description = "There is none", body = ErrorBody),
    (status = 409, description = "It is over", body = ErrorBody),
))]
pub(super) async fn cancel(State(api): Api) -> Result<StatusCode, ApiError> {
    let migration = api.migration()?;
    if migration.end().is_some() {
        return Err(ApiError::Settled);
    }
    migration.cancel();
    Ok(StatusCode::ACCEPTED)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bellhop_api::machine::MigrationObstacle;

    use super::*;

    fn trial(obstacles: Vec<MigrationObstacle>) -> Trial {
        Trial {
            prepare: obstacles.is_empty().then_some(Duration::from_millis(170)),
            obstacles,
            ram_bytes: 1 << 30,
            data_bytes: 100 << 20,
            downtime: Duration::from_millis(25),
        }
    }

    fn copy_ms(trial: MigrationTrial) -> Option<u64> {
        trial.forecast.unwrap().copy_ms
    }

    #[test]
    fn a_trial_says_what_is_known_and_what_is_not() {
        let config = SendConfig::new("tcp:b:7444".parse().unwrap());
        let movable = trial_info(&config, trial(Vec::new()), Some(50 << 20));
        assert!(movable.movable && movable.obstacles.is_empty());
        let forecast = movable.forecast.unwrap();
        assert_eq!(
            (forecast.copy_ms, forecast.prepare_ms),
            (Some(2000), Some(170))
        );
        assert_eq!(
            (forecast.downtime_min_ms, forecast.downtime_max_ms),
            (25, 300)
        );
        for rate in [None, Some(0)] {
            assert_eq!(copy_ms(trial_info(&config, trial(Vec::new()), rate)), None);
        }
        let mut endless = trial(Vec::new());
        endless.data_bytes = u64::MAX;
        let endless = trial_info(&config, endless, Some(1));
        assert_eq!(copy_ms(endless), Some(u64::MAX));

        let obstacle = MigrationObstacle {
            reason: "the NIC net0 is there here and given no device there".to_owned(),
            remedy: None,
        };
        let not = trial_info(&config, trial(vec![obstacle]), None);
        assert!(!not.movable && not.obstacles.len() == 1);
        assert_eq!(not.forecast.unwrap().prepare_ms, None);
    }
}
