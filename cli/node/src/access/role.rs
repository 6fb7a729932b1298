//! The role that each endpoint requires: the one table.
//!
//! Owns [`TABLE`] and the lookup of a path in it.
//!
//! ```text
//!   read ⊂ operate ⊂ admin
//! ```
//! A path that is not in the table needs `admin`, so a forgotten path is closed. A unit test
//! compares the table with the description of the API, so that no path is missing.

use axum::http::{Method, Uri};
use bellhop_api::node::Role;

/// A row: method, path with `{…}` for any one segment, and `{*…}` for one or more at the end.
pub(super) type Row = (Method, &'static str, Role);

/// The console: a client that only reads it needs `read`.
const CONSOLE: &str = "/v1/vms/{name}/console";

/// The role that each endpoint requires; the first matching row counts. HEAD is treated as GET.
///
/// Clients reach a VM's own endpoints through `/v1/vms/{name}/`. They have rows of their own where
/// a role below `admin` is sufficient.
pub(super) const TABLE: &[Row] = &[
    (Method::GET, "/v1/openapi.json", Role::Read),
    (Method::GET, "/v1/version", Role::Read),
    (Method::PUT, "/v1/cordon", Role::Admin),
    (Method::DELETE, "/v1/cordon", Role::Admin),
    (Method::GET, "/v1/events", Role::Read),
    (Method::GET, "/v1/metrics", Role::Read),
    (Method::GET, "/v1/topology", Role::Read),
    (Method::GET, "/v1/functions", Role::Read),
    (Method::GET, "/v1/functions/{address}", Role::Read),
    (Method::PATCH, "/v1/functions/{address}", Role::Admin),
    (Method::GET, "/v1/mgmtdevs", Role::Read),
    (Method::GET, "/v1/ports", Role::Read),
    (Method::GET, "/v1/ports/{bus}/{device}", Role::Read),
    (Method::GET, "/v1/ports/{bus}/{device}/{index}", Role::Read),
    (Method::GET, "/v1/nics", Role::Read),
    (Method::POST, "/v1/nics", Role::Admin),
    (Method::GET, "/v1/nics/{name}", Role::Read),
    (Method::DELETE, "/v1/nics/{name}", Role::Admin),
    (Method::GET, "/v1/doctor", Role::Read),
    (Method::GET, "/v1/vdpa-devices", Role::Read),
    (Method::GET, "/v1/vdpa-devices/{name}", Role::Read),
    (Method::PUT, "/v1/vdpa-devices/{name}", Role::Admin),
    (Method::PATCH, "/v1/vdpa-devices/{name}", Role::Admin),
    (Method::DELETE, "/v1/vdpa-devices/{name}", Role::Admin),
    (Method::GET, "/v1/operations", Role::Read),
    (Method::GET, "/v1/operations/{id}", Role::Read),
    (Method::DELETE, "/v1/operations/{id}", Role::Admin),
    (Method::GET, "/v1/snapshots", Role::Read),
    (Method::GET, "/v1/snapshots/{name}", Role::Read),
    (Method::DELETE, "/v1/snapshots/{name}", Role::Admin),
    (Method::GET, "/v1/snapshots/{name}/spec", Role::Read),
    (Method::GET, "/v1/vms", Role::Read),
    (Method::GET, "/v1/vms/{name}", Role::Read),
    (Method::PUT, "/v1/vms/{name}", Role::Admin),
    (Method::PATCH, "/v1/vms/{name}", Role::Admin),
    (Method::DELETE, "/v1/vms/{name}", Role::Admin),
    (Method::PUT, "/v1/vms/{name}/state", Role::Operate),
    (Method::PUT, "/v1/vms/{name}/nics/{id}", Role::Admin),
    (Method::PATCH, "/v1/vms/{name}/nics/{id}", Role::Admin),
    (Method::DELETE, "/v1/vms/{name}/nics/{id}", Role::Admin),
    (Method::GET, "/v1/vms/{name}/disks", Role::Read),
    (Method::GET, "/v1/vms/{name}/disks/{id}", Role::Read),
    (Method::PUT, "/v1/vms/{name}/disks/{id}", Role::Admin),
    (Method::DELETE, "/v1/vms/{name}/disks/{id}", Role::Admin),
    (Method::GET, "/v1/vms/{name}/vfio", Role::Read),
    (Method::GET, "/v1/vms/{name}/vfio/{id}", Role::Read),
    (Method::PUT, "/v1/vms/{name}/vfio/{id}", Role::Admin),
    (Method::DELETE, "/v1/vms/{name}/vfio/{id}", Role::Admin),
    (Method::GET, CONSOLE, Role::Operate),
    (Method::POST, "/v1/vms/{name}/power-button", Role::Operate),
    (Method::POST, "/v1/vms/{name}/reset", Role::Operate),
    (Method::POST, "/v1/vms/{name}/nmi", Role::Operate),
    (Method::GET, "/v1/vms/{name}/{*rest}", Role::Read),
    (Method::PUT, "/v1/vms/{name}/{*rest}", Role::Admin),
    (Method::PATCH, "/v1/vms/{name}/{*rest}", Role::Admin),
    (Method::POST, "/v1/vms/{name}/{*rest}", Role::Admin),
    (Method::DELETE, "/v1/vms/{name}/{*rest}", Role::Admin),
];

/// The role that an endpoint needs.
pub(super) fn needed(method: &Method, path: &str) -> Role {
    row(method, path).map_or(Role::Admin, |row| row.2)
}

/// The role that a request needs: its query may lower that of the console. The endpoint rejects a
/// parameter that occurs twice, so this pair decides.
pub(super) fn needed_for(method: &Method, uri: &Uri) -> Role {
    let is_console = row(method, uri.path()).is_some_and(|row| row.1 == CONSOLE);
    let mut pairs = uri.query().unwrap_or_default().split('&');
    if is_console && pairs.any(|pair| pair == "read_only=true") {
        return Role::Read;
    }
    needed(method, uri.path())
}

/// The row of a request. `path` is not percent-decoded, as in the lookup of axum's routes.
fn row(method: &Method, path: &str) -> Option<&'static Row> {
    let method = match *method {
        Method::HEAD => &Method::GET,
        _ => method,
    };
    TABLE
        .iter()
        .find(|(of, pattern, _)| of == method && fits(pattern, path))
}

/// Whether there is a row for a request.
#[cfg(test)]
pub(super) fn is_known(method: &Method, path: &str) -> bool {
    row(method, path).is_some()
}

pub(super) fn fits(pattern: &str, path: &str) -> bool {
    let mut segments = path.split('/');
    for wanted in pattern.split('/') {
        if wanted.starts_with("{*") {
            return segments.next().is_some_and(|first| !first.is_empty());
        }
        let Some(segment) = segments.next() else {
            return false;
        };
        let fits = if wanted.starts_with('{') {
            !segment.is_empty()
        } else {
            segment == wanted
        };
        if !fits {
            return false;
        }
    }
    segments.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_found_by_its_own_path() {
        for row in TABLE {
            let found = super::row(&row.0, row.1).unwrap();
            assert_eq!(found.1, row.1, "{} is hidden by an earlier row", row.1);
        }
    }

    #[test]
    fn reading_needs_read_and_no_more() {
        for (method, path, role) in TABLE {
            let reads = method == Method::GET && *path != CONSOLE;
            assert_eq!(*role == Role::Read, reads, "{method} {path}");
        }
    }

    #[test]
    fn unknown_operations_need_admin() {
        for (method, path) in [
            (Method::GET, "/"),
            (Method::GET, ""),
            (Method::GET, "/v1/secret"),
            (Method::GET, "/v1/%76ms"),
            (Method::GET, "/v1/vms/"),
            (Method::GET, "/v1//vms"),
            (Method::OPTIONS, "/v1/vms"),
            (Method::TRACE, "/v1/vms/a"),
            (Method::POST, "/v1/vms/a"),
            (Method::PATCH, "/v1/vms"),
            (Method::PATCH, "/v1/vms/a"),
            (Method::PATCH, "/v1/vms/a/state"),
            (Method::PATCH, "/v1/vms/a/nics/b"),
            (Method::POST, "/v1/vms/a/reset/"),
            (Method::POST, "/v1/vms//reset"),
            (Method::POST, "/v1/vms/a/b/reset"),
            (Method::POST, "/v1/vms/a%2Freset"),
            (Method::POST, "/v1/vms/a/announce"),
            (Method::PUT, "/v1/vms/a/disks/b"),
        ] {
            assert_eq!(needed(&method, path), Role::Admin, "{method} {path}");
        }
    }

    #[test]
    fn operators_change_the_state_of_machines() {
        for (method, path) in [
            (Method::PUT, "/v1/vms/a/state"),
            (Method::POST, "/v1/vms/a/reset"),
            (Method::POST, "/v1/vms/a/nmi"),
            (Method::POST, "/v1/vms/a/power-button"),
        ] {
            assert_eq!(needed(&method, path), Role::Operate, "{method} {path}");
        }
        let console = |query: &str| {
            let uri = format!("/v1/vms/a/console{query}").parse().unwrap();
            needed_for(&Method::GET, &uri)
        };
        assert_eq!(console("?history=true&read_only=true"), Role::Read);
        for query in [
            "",
            "?read_only=false",
            "?read_only=true1",
            "?xread_only=true",
            "?read_only",
            "?read%5fonly=true",
            "?take=true",
        ] {
            assert_eq!(console(query), Role::Operate, "{query}");
        }
        let elsewhere = "/v1/vms/a?read_only=true".parse().unwrap();
        assert_eq!(needed_for(&Method::DELETE, &elsewhere), Role::Admin);
        assert_eq!(needed(&Method::HEAD, "/v1/vms/a/metrics"), Role::Read);
        assert_eq!(needed(&Method::GET, "/v1/vms/a/disks/b"), Role::Read);
    }
}
