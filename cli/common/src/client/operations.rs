//! The Rust client of the node's API: a method of [`Node`] for each operation.
//!
//! ```no_run
//! # use bellhop_common::client::Node;
//! # fn show(node: &Node, vm: &serde_json::Value) -> Result<(), bellhop_common::error::Error> {
//! let vm = node.put_vm("web", vm).only_if_absent().send()?;
//! let log = node.get_vm_log("web", "console").query("tail", 20).send()?;
//! node.delete_vm("web").query("force", true).send()?;
//! # Ok(()) }
//! ```
//!
//! The table of operations is generated from the API description. Owns the construction of a
//! request for an operation. It must not know the effect of an operation.

use std::fmt;
use std::time::Duration;

use hyper::Method;
use serde::Serialize;

use super::transport::{Answer, Condition, Request};
use super::{MAKING, Node, path, push_encoded};
use crate::error::Error;

/// A request for an operation, whose answer is a `T`.
#[must_use = "`send` sends it"]
pub struct Call<'a, T> {
    node: &'a Node,
    request: Result<Request, Error>,
    read: fn(&Answer) -> Result<T, Error>,
}

impl<T> fmt::Debug for Call<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Call").field(&self.request).finish()
    }
}

impl<'a, T> Call<'a, T> {
    fn new(
        node: &'a Node,
        method: Method,
        segments: &[&str],
        read: fn(&Answer) -> Result<T, Error>,
    ) -> Self {
        // A read may wait for a change or for the end of an operation.
        let request = Request::new(method, &path(segments.iter().copied()), MAKING);
        Self {
            node,
            request: Ok(request),
            read,
        }
    }

    fn body(self, body: &impl Serialize) -> Self {
        let request = self.request.and_then(|request| request.json(body));
        Self { request, ..self }
    }

    fn with(mut self, change: impl FnOnce(&mut Request)) -> Self {
        if let Ok(request) = &mut self.request {
            change(request);
        }
        self
    }

    /// Adds a parameter of the query.
    pub fn query(self, name: &str, value: impl fmt::Display) -> Self {
        self.with(|request| {
            let path = &mut request.path;
            path.push(if path.contains('?') { '&' } else { '?' });
            push_encoded(path, name);
            path.push('=');
            push_encoded(path, &value.to_string());
        })
    }

    /// Requires that the named object does not exist.
    pub fn only_if_absent(self) -> Self {
        self.with(|request| request.condition = Some(Condition::Absent))
    }

    /// Sets another timeout than 60 s, or 600 s for a change.
    pub fn within(self, time: Duration) -> Self {
        self.with(|request| request.time = time)
    }

    /// Ignores the answer's body.
    pub fn ignoring(self) -> Call<'a, ()> {
        Call {
            node: self.node,
            request: self.request,
            read: |_| Ok(()),
        }
    }

    /// Sends the request.
    ///
    /// # Errors
    /// The daemon is unreachable, refuses, or sends an unexpected answer.
    pub fn send(self) -> Result<T, Error> {
        (self.read)(&self.node.ask(&self.request?)?)
    }
}

/// A method for each operation: `METHOD id(parameters; body) [segments] READER ANSWER;`.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $method:ident $id:ident($($parameter:ident),* $(; $body:ident)?) [$($segment:expr),*]
            $read:ident $answer:ty;
    )*) => {
        impl super::super::Node {
            $(
                $(#[$doc])*
                pub fn $id(
                    &self, $($parameter: &str,)* $($body: &impl serde::Serialize)?
                ) -> super::Call<'_, $answer> {
                    let read = super::super::Answer::$read;
                    super::Call::new(self, hyper::Method::$method, &[$($segment),*], read)
                        $(.body($body))?
                }
            )*

            /// A call of each operation, by its ID. `argument` gives a parameter of an operation.
            #[cfg(any(test, feature = "testing"))]
            pub fn every_operation(
                &self, argument: &dyn Fn(&str, &str) -> String, json: &serde_json::Value,
            ) -> Vec<(&'static str, super::Call<'_, ()>)> {
                vec![$({
                    let id = stringify!($id);
                    $(let $body = json;)?
                    let call = self.$id(
                        $(&argument(id, stringify!($parameter)),)* $($body)?
                    );
                    (id, call.ignoring())
                }),*]
            }
        }
    };
}

mod table;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::fake::{FakeDaemon, vm};

    #[test]
    fn an_operation_is_a_request() {
        let fake = FakeDaemon::default()
            .answer(201, &vm(&json!({})))
            .answer(200, &json!("booted"))
            .answer(204, &json!(null))
            .answer(404, &json!({ "code": "no_such_vm", "message": "no" }));
        let node = fake.node();
        let body = json!({ "spec": { "kernel": "/k" } });
        let call = node.put_vm("web", &body).only_if_absent();
        call.ignoring().send().unwrap();
        let log = node.get_vm_log("a/b", "console").query("after", "1&2");
        assert_eq!(log.query("tail", 5).send().unwrap(), "booted");
        node.delete_vm("web").query("force", true).send().unwrap();
        let error = node.get_vm("web").send().unwrap_err();
        assert!(error.refusal().unwrap().is_not_there());
        assert_eq!(
            fake.asked(),
            [
                r#"PUT /v1/vms/web if-none-match: * {"spec":{"kernel":"/k"}}"#,
                "GET /v1/vms/a%2Fb/logs/console?after=1%262&tail=5",
                "DELETE /v1/vms/web?force=true",
                "GET /v1/vms/web",
            ]
        );
    }
}
