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
        /// The virtual machine is still arriving from another node.
        Arriving,
        /// Another process sent an invalid response.
        BadAnswer,
        /// A descriptor is missing, or is not a vDPA device.
        BadDescriptor,
        /// The path has no valid name.
        BadName,
        /// A part of the URL or a header is invalid.
        BadParameter,
        /// A certificate or key is unusable.
        BadTls,
        /// The body is too large.
        BodyTooLarge,
        /// The body did not arrive in time.
        BodyTooSlow,
        /// A browser sent the request: it has the header `Origin`.
        BrowserRefused,
        /// Too many requests wait.
        Busy,
        /// The guest cannot announce this NIC's address.
        CannotAnnounce,
        /// The state of a device cannot be saved.
        CannotBeSaved,
        /// Operations of this kind cannot be cancelled.
        CannotCancel,
        /// The device's writes cannot be tracked.
        CannotFollowWrites,
        /// The device cannot be moved while its driver uses it.
        CannotHandOver,
        /// The daemon cannot listen on this address.
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
        /// Another virtual machine uses this device.
        DeviceTaken,
        /// A different object has this name.
        Differs,
        /// The machine has ended.
        Ended,
        /// The process is about to exit.
        Ending,
        /// The token has expired.
        ExpiredToken,
        /// The virtual machine has another generation than `If-Match` names.
        GenerationConflict,
        /// The virtual machine has arrived, or may have arrived.
        HasCome,
        /// The host failed.
        HostFailed,
        /// Another device has this name.
        IdInUse,
        /// The object is in use.
        InUse,
        /// The device lacks features that the guest uses.
        Incompatible,
        /// The body ended early.
        IncompleteBody,
        /// Internal error.
        Internal,
        /// The daemon exited before the operation had a result.
        Interrupted,
        /// The body has an invalid or unknown member.
        InvalidBody,
        /// The body is not JSON.
        MalformedBody,
        /// The guest may run on another node.
        #[serde(alias = "may_be_elsewhere")]
        MigrationUnknown,
        /// The path does not support this method.
        MethodNotAllowed,
        /// The machine is being migrated.
        Migrating,
        /// The name is in use.
        NameTaken,
        /// The NIC has no working device until its driver resets it.
        NicLost,
        /// The kernel or another process does not respond.
        NoAnswer,
        /// The machine has no configuration.
        NoConfiguration,
        /// The destination cannot be reached.
        NoDestination,
        /// The kernel has no devlink.
        NoDevlink,
        /// The machine was never migrated.
        NoMigration,
        /// The daemon has no address for migrations.
        NoMigrationHost,
        /// The resources are exhausted.
        NoRoom,
        /// The device has no SR-IOV.
        NoSriov,
        /// The machine has no device of this name.
        NoSuchDevice,
        /// The virtual machine has no log of this name.
        NoSuchLog,
        /// The operation does not exist or is no longer stored.
        NoSuchOperation,
        /// The path does not exist.
        NoSuchPath,
        /// The daemon has no snapshot of this name.
        NoSuchSnapshot,
        /// The virtual machine does not exist.
        NoSuchVm,
        /// The request has no token.
        NoToken,
        /// This kernel has no vDPA management.
        NoVdpa,
        /// The device of this name is not a disk.
        NotADisk,
        /// The device of this name is not a NIC.
        NotANic,
        /// The device of this name is not a PCI function of the host.
        NotAVfioDevice,
        /// The machine has not arrived yet.
        NotArrived,
        /// The object does not exist.
        NotFound,
        /// The virtual machine was not migrated and continues to run.
        NotMoved,
        /// The driver has not negotiated the required feature.
        NotNegotiated,
        /// The daemon lacks the required permission.
        NotPermitted,
        /// The virtual machine is not running.
        NotRunning,
        /// The virtual machine keeps its program.
        NotUpgraded,
        /// Exactly one of `path` and `device` is needed.
        OneDevice,
        /// The operation has ended.
        OperationEnded,
        /// The process of the virtual machine has another API level.
        OtherApiLevel,
        /// Another virtual machine of this name is running.
        OtherVmRuns,
        /// The object belongs to a NIC.
        PartOfNic,
        /// The guest is paused and cannot power off.
        Paused,
        /// The kernel or another process refused the request.
        Refused,
        /// The destination rejected the virtual machine.
        RefusedThere,
        /// The role of the token is too low.
        RoleTooLow,
        /// The machine is being saved.
        Saving,
        /// The location of the guest is known.
        #[serde(alias = "settled")]
        Resolved,
        /// Another request wants the virtual machine to run.
        StartedAgain,
        /// The virtual machine is starting.
        Starting,
        /// The guest did not power off in time and continues to run.
        StillRuns,
        /// The daemon cannot read or write its records.
        StoreFailed,
        /// Too many clients read events or consoles.
        TooManyReaders,
        /// Too many clients wait for changes.
        TooManyWatchers,
        /// The caller is unknown.
        UnknownCaller,
        /// The operation has no such query parameter.
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
        /// The virtual machine is running.
        VmRuns,
        /// The request is not a WebSocket handshake.
        WebsocketRequired,
        /// The authorization scheme is not Bearer.
        WrongScheme,
        /// The state of the machine does not allow the request.
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

    /// The meaning of the code, as a title.
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
    /// The cause, as in `message`.
    #[serde(default)]
    #[schema(required)]
    pub detail: String,
    /// This occurrence, as a URI: `urn:bellhop:request:` and `request_id`.
    #[serde(default)]
    #[schema(required, format = "uri")]
    pub instance: String,
    /// The kind of error, for programs.
    #[schema(value_type = ErrorCode)]
    pub code: String,
    /// The error, for people.
    pub message: String,
    /// The causes, from the outermost to the innermost.
    #[serde(default)]
    #[schema(required)]
    pub causes: Vec<String>,
    /// The remedy, if the message does not contain it.
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
    /// Its position, as a JSON pointer (RFC 6901): `/nics/0/mac`.
    #[schema(format = "json-pointer")]
    pub pointer: String,
    /// The reason.
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
