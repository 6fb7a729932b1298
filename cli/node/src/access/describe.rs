//! Adds access control to the description of the API: the role of each request. For tests, which
//! generate the description.
//!
//! Owns the answers 401 and 403 of all endpoints, and 503 of those that have none of their own.

use bellhop_api::responses::error;
use utoipa::openapi::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use vmm::http::description::operations;

use super::role;

/// The security schemes: TCP needs both.
const TOKEN: &str = "token";
const CERTIFICATE: &str = "certificate";

/// Adds to each endpoint the role that it needs, and the answers to callers without it.
pub(crate) fn describe(document: &mut OpenApi) {
    let token = Http::builder()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some(
            "Over TCP: a token of `bellhop serve --tokens`, which has a role. On the Unix socket \
             the role is admin.",
        ));
    let certificate = SecurityScheme::MutualTls {
        description: Some("Over TCP: a client certificate of the daemon's authority.".to_owned()),
        deprecated: None,
        extensions: None,
    };
    let components = document.components.get_or_insert_default();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(token.build()));
    components.add_security_scheme(CERTIFICATE, certificate);
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            let role = role::needed(&method, path).to_string();
            let answers = &mut operation.responses.responses;
            let unknown = error("Over TCP: no token, or an unknown one");
            answers.insert("401".to_owned(), unknown);
            let below = error(&format!("Over TCP: the token's role is below {role}"));
            answers.insert("403".to_owned(), below);
            let busy = || error("All places of the role are taken");
            answers.entry("503".to_owned()).or_insert_with(busy);
            let requirement = SecurityRequirement::new(TOKEN, [role]);
            let requirement = requirement.add(CERTIFICATE, Vec::<String>::new());
            // The second one, which is empty, is that of the Unix socket.
            operation.security = Some(vec![requirement, SecurityRequirement::default()]);
        }
    }
}

/// Endpoints of a description without a row in the table, and rows without an endpoint.
pub(crate) fn faults(description: &serde_json::Value) -> Vec<String> {
    use axum::http::Method;

    let mut faults = Vec::new();
    let mut described = Vec::new();
    for (path, item) in description["paths"].as_object().into_iter().flatten() {
        for method in item
            .as_object()
            .into_iter()
            .flatten()
            .map(|(method, _)| method)
        {
            let method: Method = method.to_uppercase().parse().unwrap();
            if !role::is_known(&method, path) {
                faults.push(format!("{method} {path} has no row in TABLE"));
            }
            described.push((method, path.as_str()));
        }
    }
    for (method, pattern, _) in role::TABLE {
        let mut described = described.iter();
        let exists = described.any(|(of, path)| of == method && role::fits(pattern, path));
        // Requests that pass to a VM's own API have no description here.
        let proxied = pattern.starts_with("/v1/vms");
        if !exists && !proxied {
            faults.push(format!("{method} {pattern} is in TABLE and no endpoint"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::OpenApi as _;

    #[test]
    fn roles_are_in_the_description() {
        #[derive(utoipa::OpenApi)]
        #[openapi(paths(one))]
        struct Api;
        #[utoipa::path(put, path = "/v1/vms/{name}/state", responses((status = 200)))]
        #[expect(dead_code, reason = "only described")]
        fn one() {}
        let mut document = Api::openapi();
        describe(&mut document);
        let written = serde_json::to_value(&document).unwrap();
        let operation = &written["paths"]["/v1/vms/{name}/state"]["put"];
        assert_eq!(operation["security"][0][TOKEN][0], "operate");
        for status in ["200", "401", "403"] {
            assert!(operation["responses"][status].is_object(), "{status}");
        }
    }
}
