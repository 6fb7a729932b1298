//! `/v1/vm/migration`: the machine leaves for another process, or comes from one.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::descriptors::Descriptors;
use super::{Api, exactly};
use crate::api::error::ApiError;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::{ErrorBody, HttpError, on_worker};
use crate::machine::{
    Arriving, Direction, InFlight, Migration, MigrationEnd, Obstacle, ReceiveConfig, RequestError,
    SendConfig, Trial,
};
use crate::migration::{Phase, protocol::CONNECTIONS_MAX};

/// Which way the machine is to go.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum MigrationRequest {
    /// Send it.
    Send(SendConfig),
    /// Wait for it.
    Receive(ReceiveConfig),
}

/// What a migration does, or how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub(super) enum MigrationPhase {
    /// The other host is waited for, or asked whether it takes the machine.
    Offer,
    /// It takes it; further connections are made.
    Join,
    /// Memory goes over while the guest runs.
    Copy,
    /// The guest stands still; what is left goes over.
    Stop,
    /// The destination restores the state.
    Ready,
    /// The guest is handed over.
    Go,
    /// The destination's guest is to run.
    Done,
    /// Over: the guest runs at the destination.
    Moved,
    /// Over: the guest stayed at the source; `error` says why.
    Stayed,
    /// Over, but it cannot be known from here which host has the guest, so it stands still here: say it with
    /// `PATCH /v1/vm/migration`.
    Unsettled,
}

/// How far a migration is.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MigrationStatus {
    /// Which way.
    direction: Direction,
    /// Where the destination is, or where the source is waited for.
    peer: String,
    /// What it does.
    phase: MigrationPhase,
    /// Rounds over memory so far.
    rounds: u32,
    /// Milliseconds since it began; at a destination since it began to wait for the source, which may be long before
    /// one came.
    elapsed_ms: u64,
    /// Bytes of guest memory.
    ram_bytes: u64,
    /// Bytes on the wire; at the destination, of pages.
    sent_bytes: u64,
    /// Pages that went over with their content, all rounds.
    pages: u64,
    /// Pages of which only was said that they are zero.
    zero_pages: u64,
    /// Bytes of memory that this round has still to send.
    left_bytes: u64,
    /// Bytes per second on the wire.
    bytes_per_second: u64,
    /// Bytes of memory per second that guest and devices write, a page counting as a whole.
    dirty_bytes_per_second: u64,
    /// Share of their time that vCPUs are held back, in per cent.
    throttle_percent: u8,
    /// How long the guest would stand still if it were stopped now, in milliseconds; null before the first round ended.
    #[schema(required)]
    forecast_downtime_ms: Option<u64>,
    /// Rounds until it can be stopped; null if that is not known, or never.
    #[schema(required)]
    forecast_rounds: Option<u32>,
    /// How long the guest has stood still, in milliseconds; null before it did.
    #[schema(required)]
    downtime_ms: Option<f64>,
    /// What NICs had been given and had not used when the guest was stopped; null before, and at the destination.
    #[schema(required)]
    in_flight: Option<InFlight>,
    /// How long it took to have all writes logged, NICs' among them, in milliseconds; null before that is done, and at the
    /// destination.
    #[schema(required)]
    mediation_ms: Option<f64>,
    /// What of `downtime_ms` took how long, as the source sees it.
    downtime_parts_ms: DowntimeParts,
    /// Why it did not move, or is not settled; null in all other cases.
    #[schema(required)]
    error: Option<String>,
}

/// Where the time went that the guest stood still, in milliseconds; null: that is not done yet.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DowntimeParts {
    /// vCPUs were parked, devices stopped.
    #[schema(required)]
    stop: Option<f64>,
    /// The last pages went over.
    #[schema(required)]
    memory: Option<f64>,
    /// The state of vCPUs and devices went over.
    #[schema(required)]
    state: Option<f64>,
    /// The destination restored it.
    #[schema(required)]
    ready: Option<f64>,
    /// The destination was told to run, started its devices and said that it runs.
    #[schema(required)]
    go: Option<f64>,
}

/// Whether the machine could be sent, and what that would cost. Nothing has changed, there or here.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MigrationTrial {
    /// Where it would go.
    destination: String,
    /// Whether the destination would take it now.
    movable: bool,
    /// Why not: all that is in the way.
    obstacles: Vec<MigrationObstacle>,
    /// Bytes of guest memory.
    ram_bytes: u64,
    /// Bytes of it that hold data, of which at most all go over at first; those that the guest writes meanwhile go once more.
    data_bytes: u64,
    /// Bytes per second on the wire when the machine was last sent there; null if it never was, or not for long enough.
    #[schema(required)]
    bytes_per_second: Option<u64>,
    /// How long `data_bytes` take at that rate, in milliseconds; null where it is not known.
    #[schema(required)]
    copy_ms: Option<u64>,
    /// How long the destination took just now to open its devices and map all guest memory for them, which most NICs pin, in
    /// milliseconds; null if it refused, did not answer, or was not asked. It does that once more before memory is sent, while the guest runs.
    #[schema(required)]
    prepare_ms: Option<u64>,
    /// How long a guest would stand still that writes nothing, in milliseconds: an assumption, for devices and state.
    downtime_min_ms: u64,
    /// How long it may stand still, in milliseconds: it is stopped only when what is left is expected to fit.
    downtime_max_ms: u64,
}

/// What is in the way of a migration.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MigrationObstacle {
    /// What it is, with how it is here and there.
    reason: String,
    /// What helps, a command where there is one; null if nothing is known.
    #[schema(required)]
    remedy: Option<String>,
}

impl MigrationTrial {
    fn new(config: &SendConfig, trial: Trial, bytes_per_second: Option<u64>) -> Self {
        let time = |rate| {
            let milliseconds = u128::from(trial.data_bytes) * 1000 / u128::from(rate);
            u64::try_from(milliseconds).unwrap_or(u64::MAX)
        };
        Self {
            destination: config.destination.to_string(),
            movable: trial.obstacles.is_empty(),
            ram_bytes: trial.ram_bytes,
            data_bytes: trial.data_bytes,
            bytes_per_second,
            copy_ms: bytes_per_second.filter(|&rate| rate > 0).map(time),
            prepare_ms: trial.prepare.map(milliseconds),
            downtime_min_ms: milliseconds(trial.downtime),
            downtime_max_ms: config.downtime_ms.into(),
            obstacles: trial
                .obstacles
                .into_iter()
                .map(|Obstacle { reason, remedy }| MigrationObstacle { reason, remedy })
                .collect(),
        }
    }
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl MigrationStatus {
    fn new(migration: &Migration, end: Option<MigrationEnd>) -> Self {
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
        Self {
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
}

/// Where the guest of a migration that is not settled is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
pub(super) enum Place {
    /// At this host: it goes on.
    Here,
    /// At the other host: this machine ends.
    There,
}

/// What is to be settled.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SettleRequest {
    /// Which host has the guest.
    settle: Place,
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
    Ok(Json(MigrationStatus::new(&migration, end)))
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
    (status = 400, description = "The body is not JSON", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "Not from the state that the machine is in, or one is under way", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
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
            let (config, tls) =
                on_worker(move || config.load_tls().map(|tls| (config, tls))).await??;
            if config.dry_run {
                let (config, trial) = on_worker(move || {
                    let trial = machine.try_migration(&config, tls.as_ref())?;
                    Ok::<_, RequestError>((config, trial))
                })
                .await??;
                let rate = api.known_rate(&config.destination);
                return Ok(Json(MigrationTrial::new(&config, trial, rate)).into_response());
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
    let status = MigrationStatus::new(&migration, migration.end());
    Ok((StatusCode::ACCEPTED, Json(status)).into_response())
}

/// Say where the guest is, when a migration is not settled
///
/// Only in the phase Unsettled: the connection broke while the guest was handed over. Look at the other host first: if it
/// is Moved or Running there, say There here, else Here. Who says Here on both has the guest twice.
#[utoipa::path(patch, path = "/v1/vm/migration", operation_id = "resolve_migration",
    request_body = SettleRequest, responses(
    (status = 204, description = "The guest goes on here, or the machine ends"),
    (status = 400, description = "The body is not JSON", body = ErrorBody),
    (status = 404, description = "There was no migration", body = ErrorBody),
    (status = 408, description = "The body did not come in time", body = ErrorBody),
    (status = 409, description = "It is settled, or still under way; or the machine has ended", body = ErrorBody),
    (status = 413, description = "The body is too large", body = ErrorBody),
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

    use super::*;

    fn trial(obstacles: Vec<Obstacle>) -> Trial {
        Trial {
            prepare: obstacles.is_empty().then_some(Duration::from_millis(170)),
            obstacles,
            ram_bytes: 1 << 30,
            data_bytes: 100 << 20,
            downtime: Duration::from_millis(25),
        }
    }

    #[test]
    fn a_trial_says_what_is_known_and_what_is_not() {
        let config = SendConfig::new("tcp:b:7444".parse().unwrap());
        let movable = MigrationTrial::new(&config, trial(Vec::new()), Some(50 << 20));
        assert!(movable.movable && movable.obstacles.is_empty());
        assert_eq!(
            (movable.copy_ms, movable.prepare_ms),
            (Some(2000), Some(170))
        );
        assert_eq!(
            (movable.downtime_min_ms, movable.downtime_max_ms),
            (25, 300)
        );
        for rate in [None, Some(0)] {
            assert_eq!(
                MigrationTrial::new(&config, trial(Vec::new()), rate).copy_ms,
                None
            );
        }
        let mut endless = trial(Vec::new());
        endless.data_bytes = u64::MAX;
        let endless = MigrationTrial::new(&config, endless, Some(1));
        assert_eq!(endless.copy_ms, Some(u64::MAX));

        let obstacle = Obstacle {
            reason: "the NIC net0 is there here and given no device there".to_owned(),
            remedy: None,
        };
        let not = MigrationTrial::new(&config, trial(vec![obstacle]), None);
        assert!(!not.movable && not.obstacles.len() == 1);
        assert_eq!(not.prepare_ms, None);
    }
}
