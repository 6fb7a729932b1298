//! All requests that follow from a description: valid ones, ones with a single fault, and ones that
//! are not described.

use super::conforming::{Extent, Maker};
use super::exchange::Request;
use super::faults::{changes, texts_instead};
use super::known::Known;
use super::random::Random;
use super::{Description, Operation};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// What an answer must be, besides being described.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Any described answer.
    Described,
    /// The body is valid: the server may reject its meaning, not its form.
    Understood,
    /// A rejection that blames the client.
    Refused,
    /// Malformed HTTP: the server rejects it, perhaps in its lowest layer (then without a body), or
    /// closes without an answer.
    NoHttp,
}

/// A request with the expected outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// A description of the case for human readers.
    pub what: String,
    /// The request.
    pub request: Request,
    /// The expected outcome.
    pub expect: Expect,
    /// The operation and the odd part of the request. `None` for the few cases without such a
    /// family.
    pub family: Option<String>,
}

/// One in `each` of the cases of a family, starting with the first, and all cases without a family.
#[must_use]
pub fn sample(cases: Vec<Case>, each: usize) -> Vec<Case> {
    let mut numbers = BTreeMap::<String, usize>::new();
    let mut is_taken = |case: &Case| {
        let Some(family) = &case.family else {
            return true;
        };
        let number = numbers.entry(family.clone()).or_default();
        *number += 1;
        (*number - 1).is_multiple_of(each)
    };
    cases.into_iter().filter(|case| is_taken(case)).collect()
}

/// Methods to try on every path.
const METHODS: [&str; 10] = [
    "GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get",
];

/// Headers that no operation supports.
const REFUSED_HEADERS: [(&str, &str); 4] = [
    ("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ("if-unmodified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ("if-range", "\"1\""),
    ("origin", "https://example.org"),
];

/// Parts of a path that a server might misread, as they are sent.
const NAMES: [&str; 22] = [
    "..",
    ".",
    "%2e%2e",
    "%2f",
    "..%2f..%2f..%2fetc%2fpasswd",
    "a%2fb",
    "%00",
    "a%00b",
    "%ff%fe",
    "%c3%a9",
    "%e2%80%ae",
    "%",
    "%zz",
    "%0d%0ax-injected:%201",
    "-",
    "--help",
    "a%20b",
    "%7b%7d",
    "a;b=c",
    "a:b",
    "*",
    "~root",
];

/// The cases, grouped by operation.
#[must_use]
pub fn cases(description: &Description, known: &Known, random: &mut Random) -> Vec<Case> {
    let mut builder = Builder {
        description,
        known,
        random,
        cases: Vec::new(),
    };
    for operation in description.operations() {
        builder.right(operation);
        builder.bodies(operation);
        builder.parameters(operation);
        builder.headers(operation);
        builder.names(operation);
    }
    builder.methods();
    builder.paths();
    builder.heads();
    builder.cases
}

struct Builder<'a> {
    description: &'a Description,
    known: &'a Known,
    random: &'a mut Random,
    cases: Vec<Case>,
}

impl Builder<'_> {
    fn maker(&mut self) -> Maker<'_> {
        Maker {
            whole: self.description.whole(),
            known: self.known,
            random: self.random,
        }
    }

    fn add(&mut self, what: impl Into<String>, request: Request, expect: Expect) {
        let what = what.into();
        self.cases.push(Case {
            what,
            request,
            expect,
            family: None,
        });
    }

    /// Adds one of many cases with the same odd part.
    fn add_odd(
        &mut self,
        (operation, part): (&Operation, &str),
        what: impl Into<String>,
        request: Request,
        expect: Expect,
    ) {
        self.add(what, request, expect);
        if let Some(case) = self.cases.last_mut() {
            let Operation {
                method, template, ..
            } = operation;
            case.family = Some(format!("{method} {template}: {part}"));
        }
    }

    /// The path with valid parameters.
    fn path(&mut self, operation: &Operation, extent: Extent) -> String {
        let mut values = Vec::new();
        for parameter in &operation.path {
            let value = self
                .maker()
                .parameter(&operation.template, parameter, extent);
            values.push((parameter.name.clone(), value));
        }
        operation.at(|parameter| {
            let value = values.iter().find(|(name, _)| *name == parameter.name);
            encoded(value.map_or("", |(_, value)| value))
        })
    }

    fn query(&mut self, operation: &Operation, extent: Extent) -> String {
        let mut query = String::new();
        for parameter in &operation.query {
            // The test would wait for a watch without a limit.
            let known = !self
                .known
                .of(&operation.template, &parameter.name)
                .is_empty();
            if extent == Extent::All || known || self.random.below(2) == 0 {
                let value = self
                    .maker()
                    .parameter(&operation.template, parameter, extent);
                let separator = if query.is_empty() { '?' } else { '&' };
                let _ = write!(query, "{separator}{}={}", parameter.name, encoded(&value));
            }
        }
        query
    }

    fn body(&mut self, operation: &Operation, extent: Extent) -> Option<Value> {
        let schema = operation.body.as_ref()?;
        Some(self.maker().value(schema, extent))
    }

    /// A valid request, without its body.
    fn request(&mut self, operation: &Operation, extent: Extent) -> Request {
        let target = self.path(operation, extent) + &self.query(operation, extent);
        Request::new(&operation.method, target)
    }

    fn right(&mut self, operation: &Operation) {
        let extents = [
            Extent::Least,
            Extent::All,
            Extent::Any,
            Extent::Any,
            Extent::Any,
        ];
        for extent in extents {
            let mut request = self.request(operation, extent);
            let expect = match extent {
                Extent::Least | Extent::All => Expect::Understood,
                Extent::Any => Expect::Described,
            };
            if let Some(body) = self.body(operation, extent) {
                request = request.with_body(body.to_string());
            }
            self.add(format!("right ({extent:?})"), request, expect);
        }
    }

    fn bodies(&mut self, operation: &Operation) {
        let Some(schema) = &operation.body else {
            // A body that the operation does not take does no harm.
            for body in ["{}", "nonsense", &"x".repeat(100_000)] {
                let request = self.request(operation, Extent::Least).with_body(body);
                self.add(
                    "a body that the operation does not take",
                    request,
                    Expect::Described,
                );
            }
            return;
        };
        let mut seen = BTreeSet::new();
        for extent in [Extent::Least, Extent::All] {
            let right = self.maker().value(schema, extent);
            for change in changes(self.description.whole(), schema, &right) {
                let text = change.value.to_string();
                if !seen.insert(text.clone()) {
                    continue;
                }
                let request = self.request(operation, Extent::Least).with_body(text);
                if change.is_fault {
                    self.add_odd((operation, "body"), change.what, request, Expect::Refused);
                } else {
                    self.add(change.what, request, Expect::Described);
                }
            }
        }
        let right = self.maker().value(schema, Extent::Least);
        for (what, text) in texts_instead(&right) {
            let request = self.request(operation, Extent::Least).with_body(text);
            self.add_odd((operation, "text"), what, request, Expect::Refused);
        }
        let request = self.request(operation, Extent::Least);
        self.add("no body", request, Expect::Refused);
        for kind in ["text/plain", "application/x-www-form-urlencoded", "\u{1}"] {
            let request = self.request(operation, Extent::Least);
            let request = request
                .with_header("content-type", kind)
                .with_body(right.to_string());
            let expect = if kind == "\u{1}" {
                Expect::NoHttp
            } else {
                Expect::Refused
            };
            self.add(format!("{kind:?} as the content's type"), request, expect);
        }
    }

    /// Parameters after the question mark.
    fn parameters(&mut self, operation: &Operation) {
        let path = self.path(operation, Extent::Least);
        let right = self
            .body(operation, Extent::Least)
            .map(|body| body.to_string());
        let mut queries = Vec::new();
        for parameter in &operation.query {
            let values = [
                json!(""),
                json!("x"),
                json!("-1"),
                json!("0x1"),
                json!("1.5"),
                json!("1e3"),
                json!(" 1"),
                json!("null"),
                json!("18446744073709551616"),
                json!("٣"),
                json!("\u{0}"),
                json!("é"),
                json!("9".repeat(2000)),
            ];
            for value in values {
                let value = value.as_str().unwrap_or_default();
                // In a URL everything is text, so a text of digits counts as a number.
                let is = value.parse::<u64>().map_or(json!(value), Value::from);
                let whole = self.description.whole();
                let expect = match super::schema::conforms(whole, &parameter.schema, &is) {
                    Ok(()) => Expect::Described,
                    Err(_) => Expect::Refused,
                };
                queries.push((format!("{}={}", parameter.name, encoded(value)), expect));
            }
            queries.push((format!("{0}=0&{0}=0", parameter.name), Expect::Described));
            queries.push((format!("{}=%ff", parameter.name), Expect::Refused));
            queries.push((parameter.name.clone(), Expect::Described));
        }
        for odd in ["", "&&&", "#"] {
            queries.push((odd.to_owned(), Expect::Described));
        }
        for unknown in [
            "=",
            "x=y",
            "%",
            "%00=%00",
            "a[b]=c",
            "?",
            &"q=1&".repeat(1000),
        ] {
            queries.push((unknown.to_owned(), Expect::Refused));
        }
        for (query, expect) in queries {
            // The valid body ensures that only the query can cause a rejection.
            let mut request = Request::new(&operation.method, format!("{path}?{query}"));
            if let Some(right) = &right {
                request = request.with_body(right.clone());
            }
            let shown: String = query.chars().take(40).collect();
            self.add_odd((operation, "query"), format!("?{shown}"), request, expect);
        }
    }

    /// Headers that would change a request's effect if they were not ignored.
    fn headers(&mut self, operation: &Operation) {
        for (name, value) in REFUSED_HEADERS {
            let mut request = self.request(operation, Extent::Least);
            request = request.with_header(name, value);
            if let Some(right) = self.body(operation, Extent::Least) {
                request = request.with_body(right.to_string());
            }
            self.add_odd((operation, "header"), name, request, Expect::Refused);
        }
    }

    /// Parameters in the path.
    fn names(&mut self, operation: &Operation) {
        let right = self
            .body(operation, Extent::Least)
            .map(|body| body.to_string());
        let long = [64, 65, 256, 4096, 15_000, 100_000].map(|length| "n".repeat(length));
        let names: Vec<&str> = NAMES
            .into_iter()
            .chain(long.iter().map(String::as_str))
            .chain([""])
            .collect();
        for bad in &operation.path {
            for name in &names {
                let mut values = Vec::new();
                for parameter in &operation.path {
                    let value = if parameter.name == bad.name {
                        (*name).to_owned()
                    } else {
                        let mut maker = self.maker();
                        encoded(&maker.parameter(&operation.template, parameter, Extent::Least))
                    };
                    values.push((parameter.name.clone(), value));
                }
                let target = operation.at(|parameter| {
                    let value = values.iter().find(|(one, _)| *one == parameter.name);
                    value.map_or_else(String::new, |(_, value)| value.clone())
                });
                let mut request = Request::new(&operation.method, target);
                if let Some(right) = &right {
                    request = request.with_body(right.clone());
                }
                let shown: String = name.chars().take(40).collect();
                // Heads have a limit of their own.
                let expect = match name.len() {
                    0..15_000 => Expect::Described,
                    _ => Expect::NoHttp,
                };
                self.add_odd(
                    (operation, "name"),
                    format!("{} {shown:?} ({} bytes)", bad.name, name.len()),
                    request,
                    expect,
                );
            }
        }
    }

    /// All methods on all paths.
    fn methods(&mut self) {
        let mut done = BTreeSet::new();
        for operation in self.description.operations() {
            if !done.insert(&operation.template) {
                continue;
            }
            let path = self.path(operation, Extent::Least);
            for method in METHODS {
                if self.description.operation(method, &path).is_none() {
                    let request = Request::new(method, path.clone());
                    self.add("a method that is not described", request, Expect::Described);
                }
            }
        }
    }

    /// Paths that do not exist.
    fn paths(&mut self) {
        for path in [
            "/",
            "/v1",
            "/v1/",
            "/v2/vm",
            "//",
            "/v1//vm",
            "/V1/VM",
            "/v1/vm/",
            "/v1/../v1/vm",
            "/v1/vm%2fconfig",
            "/%76%31/vm",
            "/v1/%00",
            "/v1/%ff",
            "/v1/openapi.json/",
            "/etc/passwd",
            "/v1/;/",
            "/v1/vm?",
            "http://other/v1/nothing",
            "*",
        ] {
            for method in ["GET", "PUT", "DELETE"] {
                // A path that is valid despite its look belongs to other cases.
                if self.description.knows_path(path) && method != "GET" {
                    continue;
                }
                let request = Request::new(method, path);
                self.add("a path that there is not", request, Expect::Described);
            }
        }
    }

    /// Malformed heads.
    fn heads(&mut self) {
        let get = || Request::new("GET", "/v1/openapi.json");
        for (what, request) in [
            ("a target that is no path", Request::new("GET", "v1")),
            ("an empty target", Request::new("GET", "")),
            ("a space in the target", Request::new("GET", "/v1/a b")),
            (
                "a target that is not UTF-8",
                Request::new("GET", b"/v1/\xff\xfe".to_vec()),
            ),
            (
                "a zero byte in the target",
                Request::new("GET", b"/v1/\0".to_vec()),
            ),
            (
                "a method that is none",
                Request::new("G@T", "/v1/openapi.json"),
            ),
            ("no method", Request::new("", "/v1/openapi.json")),
            (
                "a long method",
                Request::new(&"G".repeat(20_000), "/v1/openapi.json"),
            ),
            ("CONNECT", Request::new("CONNECT", "other:80")),
            ("a long header", get().with_header("x", "v".repeat(20_000))),
            ("a header that is none", get().with_header("a b", "1")),
            (
                "a zero byte in a header",
                get().with_header("x", b"\0".to_vec()),
            ),
            (
                "many headers",
                (0..200).fold(get(), |request, number| {
                    request.with_header(&format!("x-{number}"), "1")
                }),
            ),
            (
                "a length that is none",
                get().with_header("content-length", "-1"),
            ),
            (
                "two lengths",
                get()
                    .with_header("content-length", "1")
                    .with_header("content-length", "2"),
            ),
            (
                "another encoding",
                get().with_header("transfer-encoding", "gzip"),
            ),
            ("an expectation", get().with_header("expect", "200-ok")),
            ("another protocol", get().with_header("upgrade", "h2c")),
        ] {
            self.add(what, request, Expect::NoHttp);
        }
        for id in [
            "",
            "given",
            "a b",
            "\u{e9}",
            &"i".repeat(64),
            &"i".repeat(65),
            &"i".repeat(5000),
        ] {
            let request = get().with_header("x-request-id", id);
            self.add(
                format!("{:?} as the request's name", id.get(..10)),
                request,
                Expect::Described,
            );
        }
    }
}

/// Percent-encodes a text for a part of a path or a query.
fn encoded(text: &str) -> String {
    let mut all = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte) {
            all.push(char::from(byte));
        } else {
            let _ = write!(all, "%{byte:02x}");
        }
    }
    all
}
