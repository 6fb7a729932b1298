//! The part of curl that the manual's examples use. The lab host has no curl.
//!
//! ```text
//! lab-curl -s --unix-socket SOCKET [-H 'content-type: application/json'] [-X METHOD] URL [-d BODY]
//! ```
//! It prints the answer's body as received. Unlike curl, it exits with 22 when the answer is no
//! success, as curl does with `--fail-with-body`: a rejected example must not appear to work.

use lab::api::Client;
use lab::error::{Error, Result, report};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;

/// curl's exit code for a status of 400 or more.
const REFUSED: u8 = 22;
/// The header that the APIs need with a body.
const JSON: &str = "content-type: application/json";

/// One request.
#[derive(Debug, Default)]
struct Request {
    socket: PathBuf,
    method: Option<String>,
    url: String,
    body: Option<String>,
    /// True if a header names the body's type. Without it curl sends a form.
    is_json: bool,
}

fn main() -> ExitCode {
    let asked = Request::of(std::env::args().skip(1)).and_then(|request| request.ask());
    match asked {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lab-curl: {}", report(&error));
            ExitCode::FAILURE
        }
    }
}

impl Request {
    fn of(mut words: impl Iterator<Item = String>) -> Result<Self> {
        let mut request = Self::default();
        while let Some(word) = words.next() {
            let mut value = || {
                words
                    .next()
                    .ok_or_else(|| Error::Usage(format!("{word} needs a value")))
            };
            match word.as_str() {
                "-s" => {}
                "--unix-socket" => request.socket = value()?.into(),
                "-X" => request.method = Some(value()?),
                "-d" => request.body = Some(value()?),
                "-H" => request.is_json |= value()? == JSON,
                option if option.starts_with('-') => {
                    return Err(Error::Usage(format!(
                        "{option} is not known here; add it to tests/src/bin/lab-curl.rs"
                    )));
                }
                url => url.clone_into(&mut request.url),
            }
        }
        if request.body.is_some() && !request.is_json {
            return Err(Error::Usage(format!(
                "curl sends a form without -H '{JSON}'"
            )));
        }
        Ok(request)
    }

    fn ask(&self) -> Result<u8> {
        let wrong = |why: &str| Error::invalid(format!("the URL {:?}", self.url), why);
        let rest = self
            .url
            .strip_prefix("http://")
            .ok_or_else(|| wrong("it does not begin with http://"))?;
        let slash = rest.find('/').ok_or_else(|| wrong("it has no path"))?;
        let path = rest.get(slash..).unwrap_or_default();
        let body = self.body.as_deref().map(serde_json::from_str::<Value>);
        let body = body
            .transpose()
            .map_err(|error| Error::invalid("the body", error.to_string()))?;
        // As with curl, a body makes the request a POST.
        let usual = if body.is_some() { "POST" } else { "GET" };
        let method = self.method.as_deref().unwrap_or(usual);
        let answer = Client::new(&self.socket).ask(method, path, body.as_ref())?;
        match &answer.body {
            Value::Null => {}
            Value::String(text) => println!("{text}"),
            body => println!("{body}"),
        }
        Ok(if answer.status < 400 { 0 } else { REFUSED })
    }
}
