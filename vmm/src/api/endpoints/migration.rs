//! `/v1/vm/migration`: the VM leaves for another process, or arrives from one.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bellhop_api::machine::{
    DowntimeParts, MigrationPhase, MigrationRequest, MigrationStatus, MigrationTrial, Place,
    ResolveRequest,
};
use bellhop_api::responses::{BodyErrors, HostErrors, MigrationErrors};

use super::descriptors::Descriptors;
use super::state::Api;
use crate::api::error::ApiError;
use crate::api::exactly;
use crate::http::body::JsonBody;
use crate::http::descriptors::Received;
use crate::http::{ErrorBody, on_worker};
use crate::machine::{Arriving, Migration, MigrationEnd, milliseconds, route};

fn status(migration: &Migration, end: Option<MigrationEnd>) -> MigrationStatus {
    let progress = migration.progress();
    let parts = progress.downtime_parts;
    let (phase, error) = match end {
        Some(MigrationEnd::Moved) => (MigrationPhase::Moved, None),
        Some(MigrationEnd::Stayed { why }) => (MigrationPhase::Stayed, Some(why)),
        Some(MigrationEnd::Indeterminate { why }) => (MigrationPhase::Indeterminate, Some(why)),
        None => (progress.phase, None),
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
        log_start_ms: progress.log_start.map(exactly),
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

/// Read the state of the last migration
///
/// The migration in progress, or the last one. A source whose guest has moved exits after this
/// response, or after 10 s.
#[utoipa::path(get, path = "/v1/vm/migration", operation_id = "get_migration", responses(
    (status = 200, description = "The state of the migration", body = MigrationStatus),
    (status = 404, description = "Not found: there was no migration", body = ErrorBody),
))]
pub(super) async fn show(State(api): Api) -> Result<Json<MigrationStatus>, ApiError> {
    let migration = api.migration()?;
    let end = migration.see_end();
    Ok(Json(status(&migration, end)))
}

/// Start a migration
///
/// Sends the machine to another process (`send`) or receives one (`receive`). The response is
/// immediate; `GET` reports progress. The guest runs until the last pages are copied. After a
/// failure before the phase Go, the guest runs at the source as before.
///
/// Only a process without a machine (NotStarted) receives one. It takes the configuration of the
/// source, except for the devices of NICs and the boot files.
///
/// With `dry_run` the destination only reports whether it accepts the machine. The response takes
/// as long as opening the devices there.
#[utoipa::path(post, path = "/v1/vm/migration", operation_id = "start_migration",
    request_body = MigrationRequest, responses(
    (status = 200, description = "With `dry_run`: acceptance and forecast", body = MigrationTrial),
    (status = 202, description = "The migration is in progress", body = MigrationStatus),
    BodyErrors, HostErrors,
))]
pub(super) async fn begin(
    State(api): Api,
    received: Received,
    JsonBody(wanted): JsonBody<MigrationRequest>,
) -> Result<Response, ApiError> {
    let migration = match wanted {
        MigrationRequest::Send(config) => {
            let machine = api.running()?;
            machine.primaries()?;
            let connector = Descriptors::of(&received)?.take(config.fd)?;
            let (config, route) = on_worker(move || {
                let route = route(&config, connector)?;
                Ok::<_, crate::Error>((config, route))
            })
            .await??;
            if config.dry_run {
                let rate = api.known_rate(&config.destination);
                let trial = on_worker(move || machine.try_migration(&config, rate, &route));
                return Ok(Json(trial.await??).into_response());
            }
            api.send(config, route)?
        }
        MigrationRequest::Receive(mut config) => {
            let mut descriptors = Descriptors::of(&received)?;
            let listening = descriptors.take(config.fd)?;
            descriptors.give(&mut config.vdpa, &mut config.vfio)?;
            api.before_boot("a process with a machine cannot receive another one")?;
            let arriving = on_worker(move || Arriving::new(config, listening)).await??;
            api.receive(arriving)?
        }
    };
    let under_way = status(&migration, migration.end());
    Ok((StatusCode::ACCEPTED, Json(under_way)).into_response())
}

/// Resolve an indeterminate migration
///
/// Only in the phase Indeterminate, after the connection broke while the source handed over the
/// guest. Look at the other host first. If its state is Moved or Running, answer There here;
/// otherwise Here. Here on both hosts runs the guest twice.
#[utoipa::path(patch, path = "/v1/vm/migration", operation_id = "resolve_migration",
    request_body = ResolveRequest, responses(
    (status = 204, description = "The guest resumes here, or the machine ends"),
    BodyErrors, MigrationErrors,
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
))]
pub(super) async fn resolve(
    State(api): Api,
    JsonBody(wanted): JsonBody<ResolveRequest>,
) -> Result<StatusCode, ApiError> {
    let migration = api.migration()?;
    let machine = api.running()?;
    if !matches!(migration.end(), Some(MigrationEnd::Indeterminate { .. })) {
        return Err(ApiError::Resolved);
    }
    let here = wanted.resolve == Place::Here;
    on_worker(move || machine.resolve(&migration, here)).await??;
    Ok(StatusCode::NO_CONTENT)
}

/// Cancel a migration
///
/// Possible until the guest is handed over; later the phase shows that it moved. The guest of a
/// source continues to run. A destination stops waiting.
#[utoipa::path(delete, path = "/v1/vm/migration", operation_id = "cancel_migration", responses(
    (status = 202, description = "The migration is being cancelled: `GET` reports the result"),
    MigrationErrors,
))]
pub(super) async fn cancel(State(api): Api) -> Result<StatusCode, ApiError> {
    let migration = api.migration()?;
    if migration.end().is_some() {
        return Err(ApiError::Resolved);
    }
    migration.cancel();
    Ok(StatusCode::ACCEPTED)
}
