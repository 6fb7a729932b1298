//! Errors: problem details (RFC 9457), with additional members.

use std::fmt::Write as _;

use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::described::line;

/// The media type of errors.
pub const PROBLEM_JSON: &str = "application/problem+json";

described! {
    /// A word for programs: the kind of an error.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ErrorCode {
        /// The virtual machine is still coming from another node.
        Arriving,
        /// A response of another process makes no sense.
        BadAnswer,
        /// A descriptor is missing, or is no vDPA device.
        BadDescriptor,
        /// The path has no valid name.
        BadName,
        /// A part of the URL or a header is invalid.
        BadParameter,
        /// A certificate or key cannot be used.
        BadTls,
        /// The body is too large.
        BodyTooLarge,
        /// The body did not arrive in time.
        BodyTooSlow,
        /// A browser sent the request: it has the header `Origin`.
        BrowserRefused,
        /// Too many requests wait.
        Busy,
        /// The guest cannot announce this NIC.
        CannotAnnounce,
        /// The state of a device cannot be saved.
        CannotBeSaved,
        /// Operations of this kind cannot be cancelled.
        CannotCancel,
        /// Writes of a device cannot be tracked.
        CannotFollowWrites,
        /// The device cannot be moved while its driver uses it.
        CannotHandOver,
        /// The address cannot be listened on.
        CannotListen,
        /// The machine cannot be migrated.
        CannotMove,
        /// Another client writes to this console.
        ConsoleInUse,
        /// Members of the body contradict each other.
        Contradiction,
        /// The node takes no new virtual machines.
        Cordoned,
        /// The machine has crashed.
        Crashed,
        /// The virtual machine is being deleted.
        Deleting,
        /// Another virtual machine has this device.
        DeviceTaken,
        /// A different object of this name exists.
        Differs,
        /// The machine has ended.
        Ended,
        /// The process is about to exit.
        Ending,
        /// The token has expired.
        ExpiredToken,
        /// The virtual machine has another generation than `If-Match` names.
        GenerationConflict,
        /// The virtual machine has arrived, or may have.
        HasCome,
        /// The host failed.
        HostFailed,
        /// Another device has this name.
        IdInUse,
        /// The object is in use.
        InUse,
        /// The device lacks what the guest uses.
        Incompatible,
        /// The body ended early.
        IncompleteBody,
        /// Internal error.
        Internal,
        /// The daemon ended before the result of the operation was known.
        Interrupted,
        /// The body has an invalid or unknown member.
        InvalidBody,
        /// The body is not JSON.
        MalformedBody,
        /// The guest may run on another node.
        MayBeElsewhere,
        /// The path does not have this method.
        MethodNotAllowed,
        /// The machine is being migrated.
        Migrating,
        /// The name is in use.
        NameTaken,
        /// The NIC has no working device: its driver has to reset it.
        NicLost,
        /// The kernel or another process does not respond.
        NoAnswer,
        /// The daemon has no certificates for migrations.
        NoCertificates,
        /// The machine has no configuration.
        NoConfiguration,
        /// The destination cannot be reached.
        NoDestination,
        /// The kernel has no devlink.
        NoDevlink,
        /// The machine has not been migrated.
        NoMigration,
        /// No resources are left.
        NoRoom,
        /// The device has no SR-IOV.
        NoSriov,
        /// The machine has no device of this name.
        NoSuchDevice,
        /// The virtual machine has no log of this name.
        NoSuchLog,
        /// The operation does not exist, or ended long ago.
        NoSuchOperation,
        /// The path does not exist.
        NoSuchPath,
        /// The daemon keeps no snapshot of this name.
        NoSuchSnapshot,
        /// The virtual machine does not exist.
        NoSuchVm,
        /// The request has no token.
        NoToken,
        /// The kernel has no vDPA management here.
        NoVdpa,
        /// The device of this name is no disk.
        NotADisk,
        /// The device of this name is no NIC.
        NotANic,
        /// The machine has not arrived yet.
        NotArrived,
        /// The object does not exist.
        NotFound,
        /// The virtual machine was not migrated and continues to run.
        NotMoved,
        /// The driver has not negotiated what this needs.
        NotNegotiated,
        /// The daemon lacks the right to do it.
        NotPermitted,
        /// The virtual machine does not run.
        NotRunning,
        /// The virtual machine keeps its program.
        NotUpgraded,
        /// Exactly one of `path` and `device` is needed.
        OneDevice,
        /// The operation has ended.
        OperationEnded,
        /// The process of the virtual machine has another API level.
        OtherApiLevel,
        /// Another virtual machine of this name runs.
        OtherVmRuns,
        /// The object is a part of a NIC.
        PartOfNic,
        /// The guest is paused and cannot power off.
        Paused,
        /// The kernel or another process refused the request.
        Refused,
        /// The destination refused the virtual machine.
        RefusedThere,
        /// The role of the token is too low.
        RoleTooLow,
        /// The machine is being saved.
        Saving,
        /// It is known where the guest is.
        Settled,
        /// Another request wants the virtual machine to run.
        StartedAgain,
        /// The virtual machine is starting.
        Starting,
        /// The guest has not powered off in time and continues to run.
        StillRuns,
        /// The records of the daemon cannot be read or written.
        StoreFailed,
        /// Too many clients read events or consoles.
        TooManyReaders,
        /// Too many clients wait for changes.
        TooManyWatchers,
        /// The caller is unknown.
        UnknownCaller,
        /// The operation has no query parameter of this name.
        UnknownParameter,
        /// The token is unknown.
        UnknownToken,
        /// The operation does not support this conditional header.
        UnsupportedCondition,
        /// The content type of the body is not JSON.
        UnsupportedContentType,
        /// A named object cannot be used.
        Unusable,
        /// A virtual machine of this name exists.
        VmExists,
        /// The virtual machine runs.
        VmRuns,
        /// The request is no WebSocket handshake.
        WebsocketRequired,
        /// The authorization has another scheme than Bearer.
        WrongScheme,
        /// The state of the machine does not allow it.
        WrongState,
        /// A code of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

impl ErrorCode {
    /// The code with this text; `Unknown` for any other text.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let text: serde::de::value::StrDeserializer<'_, serde::de::value::Error> =
            text.into_deserializer();
        Self::deserialize(text).unwrap_or(Self::Unknown)
    }

    /// Its meaning, as a title.
    #[must_use]
    pub fn title(self) -> String {
        let meaning = Self::MEANINGS.iter().find(|(code, _)| *code == self);
        let meaning = line(meaning.map_or("", |(_, meaning)| meaning));
        meaning.trim_end_matches('.').to_owned()
    }
}

/// An error: problem details (RFC 9457), with a code, causes, a hint and the ID of the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The kind of error, as a URI: `urn:bellhop:error:` and `code`.
    #[serde(rename = "type", default)]
    #[schema(required, format = "uri")]
    pub kind: String,
    /// The meaning of `code`.
    #[serde(default)]
    #[schema(required)]
    pub title: String,
    /// The HTTP status.
    #[serde(default)]
    #[schema(required, minimum = 400, maximum = 599)]
    pub status: u16,
    /// What went wrong, as in `message`.
    #[serde(default)]
    #[schema(required)]
    pub detail: String,
    /// This occurrence, as a URI: `urn:bellhop:request:` and `request_id`.
    #[serde(default)]
    #[schema(required, format = "uri")]
    pub instance: String,
    /// A word for programs.
    #[schema(value_type = ErrorCode)]
    pub code: String,
    /// A sentence for people.
    pub message: String,
    /// Why, from the outermost cause to the innermost.
    #[serde(default)]
    #[schema(required)]
    pub causes: Vec<String>,
    /// What can be done about it, if the message does not contain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Invalid members of the body.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// The ID of the request, as in the header `x-request-id` and in the log.
    #[serde(default)]
    #[schema(required)]
    pub request_id: String,
}

impl ErrorBody {
    /// Sets the ID of its request.
    pub fn set_request_id(&mut self, id: &str) {
        id.clone_into(&mut self.request_id);
        "urn:bellhop:request:".clone_into(&mut self.instance);
        for byte in id.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                self.instance.push(char::from(byte));
            } else {
                // Writing to a string does not fail.
                let _ = write!(self.instance, "%{byte:02X}");
            }
        }
    }
}

/// An invalid member of a body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// Where it is, as a JSON pointer (RFC 6901): `/nics/0/mac`.
    #[schema(format = "json-pointer")]
    pub pointer: String,
    /// What is wrong with it.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_titles() {
        assert_eq!(ErrorCode::of("no_such_vm"), ErrorCode::NoSuchVm);
        let title = ErrorCode::NoSuchVm.title();
        assert_eq!(title, "The virtual machine does not exist");
        assert_eq!(ErrorCode::of("of a later version"), ErrorCode::Unknown);
    }

    #[test]
    fn an_error_is_a_problem_with_uris() {
        let mut body = ErrorBody::default();
        body.set_request_id("a-1/\"%");
        assert_eq!(body.request_id, "a-1/\"%");
        assert_eq!(body.instance, "urn:bellhop:request:a-1%2F%22%25");
    }

    #[test]
    fn an_error_of_an_earlier_version_is_read() {
        let body = r#"{"code": "busy", "message": "m", "causes": [], "request_id": "1"}"#;
        let body: ErrorBody = serde_json::from_str(body).unwrap();
        assert_eq!(ErrorCode::of(&body.code), ErrorCode::Busy);
    }
}
