//! `/v1/vms/{name}/logs/{log}`: the log of a VM's process, and the output of its guest.
//!
//! Owns the form of the answer. [`crate::logs`] has the positions in files that rotate.

use axum::extract::{FromRequestParts, Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse as _, Response};
use bellhop_api::node::{LOG_GAP, LOG_LINES, LOG_LINES_MAX, LOG_POSITION, LogQuery, VmLog};
use bellhop_api::responses::NameErrors;
use utoipa::IntoParams;
use vmm::http::parameters::Parameters;
use vmm::http::{ErrorBody, HttpError};

use super::state::{Api, SenderRole};
use crate::error::Error;
use crate::logs::{Position, after, tail};
use crate::machines::spec::VmName;

const POSITION: HeaderName = HeaderName::from_static(LOG_POSITION);
const GAP: HeaderName = HeaderName::from_static(LOG_GAP);

/// The names in the path.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct LogPath {
    /// The virtual machine's name
    #[param(value_type = String, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    name: VmName,
    /// The log
    #[param(inline)]
    log: VmLog,
}

fn no_log() -> Error {
    let message = "no such log: a virtual machine has `vmm` and `console`";
    Error::answered(StatusCode::NOT_FOUND, "no_such_log", message)
}

impl<S: Send + Sync> FromRequestParts<S> for LogPath {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let names = Path::from_request_parts(parts, state).await;
        let Path::<(String, VmLog)>((name, log)) = names.map_err(|_| no_log())?;
        let name = name.parse()?;
        Ok(Self { name, log })
    }
}

/// Read a log of a virtual machine
///
/// The last lines, or the text after a position; at most 1 MiB. To follow a log, send the header
/// `x-log-position` as `after` in the next request. A log rotates at 16 MiB; the daemon keeps one
/// older file. If the position is gone, the answer has the whole kept text and the header
/// `x-log-gap`.
#[utoipa::path(get, path = "/v1/vms/{name}/logs/{log}", operation_id = "get_vm_log",
    params(LogPath, LogQuery), responses(
    (status = 200, description = "The lines", body = String, content_type = "text/plain", headers(
        ("x-log-position" = String, description = "The position of their end: a value for `after`"),
        ("x-log-gap" = String, description = "`true`: text behind the position is missing"),
    )),
    NameErrors,
    (status = 500, description = "The log cannot be read", body = ErrorBody),
))]
pub(super) async fn show(
    State(node): Api,
    SenderRole(role): SenderRole,
    LogPath { name, log }: LogPath,
    Parameters(query): Parameters<LogQuery>,
) -> Result<Response, Error> {
    node.machines.show(&name)?;
    let path = match log {
        VmLog::Vmm => node.paths.log(&name),
        VmLog::Console => node.paths.console_log(&name),
    };
    let wrong = |text: &str| HttpError::Parameter(text.to_owned());
    let position = query.after.map(|text| text.parse::<Position>()).transpose();
    let position =
        position.map_err(|_| wrong("`after` is not a value of the header x-log-position"))?;
    let lines = query.tail.unwrap_or(LOG_LINES);
    if lines > LOG_LINES_MAX {
        return Err(wrong(&format!("tail is {lines}: at most {LOG_LINES_MAX}")).into());
    }
    let shown = path.display().to_string();
    let read = move || {
        let part = match position {
            Some(position) => after(&path, position),
            None => tail(&path, usize::try_from(lines).unwrap_or(usize::MAX)),
        };
        part.map_err(Error::context(format!("cannot read the log {shown}")))
    };
    let part = node.file_permits.run(role, read).await?;
    let headers = [
        (CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()),
        (POSITION, part.end.to_string()),
    ];
    let gap = part.gap.then_some([(GAP, "true")]);
    Ok((headers, gap, part.bytes).into_response())
}
