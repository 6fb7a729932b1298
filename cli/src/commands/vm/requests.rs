//! Common parts of the subcommands about VMs: a VM's path and record, and repetition.

use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::node::Vm;
use bellhop_common::client::{Node, STRANGE, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use serde::Deserialize;
use serde_json::Value;

use super::view;

/// The interval of queries of a VM's state.
const PERIOD: Duration = Duration::from_millis(200);

/// Acts on one object after the other, even if one fails. Returns the first failure's code.
pub(crate) fn each(
    names: &[String],
    mut act: impl FnMut(&str) -> Result<Code, Error>,
) -> Result<Code, Error> {
    if let [name] = names {
        return act(name);
    }
    let mut ended = Code::Success;
    for name in names {
        let code = act(name).unwrap_or_else(|error| {
            error.in_words().print();
            error.code()
        });
        if ended == Code::Success {
            ended = code;
        }
    }
    Ok(ended)
}

/// The path of a VM in the API.
pub(super) fn of_vm(name: &str) -> String {
    path(["v1", "vms", name])
}

/// The path of a VM's state in the API.
pub(super) fn of_state(name: &str) -> String {
    path(["v1", "vms", name, "state"])
}

/// The daemon's current view of a VM.
pub(super) fn vm(node: &Node, name: &str) -> Result<(Vm, Value), Error> {
    let answer: Value = node.get(&of_vm(name))?;
    Ok((read(&answer)?, answer))
}

/// Decodes the daemon's answer.
pub(super) fn read<'a, T: Deserialize<'a>>(answer: &'a Value) -> Result<T, Error> {
    T::deserialize(answer).map_err(Error::context(STRANGE))
}

/// Polls `look` until it returns something; none once `limit` has passed.
pub(crate) fn until<T>(
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>, Error>,
) -> Result<Option<T>, Error> {
    let start = Instant::now();
    loop {
        let found = look()?;
        if found.is_some() || start.elapsed() >= limit {
            return Ok(found);
        }
        thread::sleep(PERIOD);
    }
}

/// Prints a VM's state in one line, or the VM as JSON. Skips an answer without a body.
pub(super) fn say(answer: &Value, format: Format) -> Result<Code, Error> {
    if answer.is_null() {
        return Ok(Code::Success);
    }
    let vm: Vm = read(answer)?;
    format.print(answer, || format!("{}\n", view::line(&vm)))
}
