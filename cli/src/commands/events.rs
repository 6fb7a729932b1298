//! `bellhop events`: the events of a node.

use std::time::Duration;

use bellhop_api::node::{Event, EventQuery};
use bellhop_common::client::{Node, NodeArguments, Notice, STRANGE};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{self, Format};
use bellhop_common::text::{printable, utc};
use serde::Deserialize as _;
use serde_json::Value;

/// The time limit of one wait for an event; the command then waits again.
const WAIT: Duration = Duration::from_secs(3600);

/// Print events of a node: of its VMs, NICs and devices
///
/// The node daemon keeps the last 1024 events. Each line has the time (UTC), the object, the change
/// and its details.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
With --follow the command continues after a broken connection or a restart of the daemon. If it lost
events meanwhile, it warns on standard error. With -o json each line is an object.

Examples:
  bellhop events
  bellhop events --follow --vm web
  bellhop events -f --type nic_failed_over -o json")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    /// Continue with events as they happen
    #[arg(short, long)]
    follow: bool,

    /// Only events of this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,

    /// Only this change, such as created or nic_failed_over
    #[arg(long = "type", value_name = "CHANGE")]
    kind: Option<String>,
}

pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let node = arguments.node.connect()?;
    let mut print = |text: String| listing::print(text.as_bytes()).map(drop);
    show(arguments, &node, format, &mut print)
}

fn show(
    arguments: &Arguments,
    node: &Node,
    format: Format,
    print: &mut dyn FnMut(String) -> Result<(), Error>,
) -> Result<Code, Error> {
    let query = EventQuery {
        vm: arguments.vm.clone(),
        kind: arguments.kind.clone(),
        since: Some(0),
        follow: None,
    };
    let has_lines = format.is_text() || format.is_json();
    if arguments.follow && !has_lines {
        return Err(Error::wrong(
            "--follow prints a line for each event: use -o table or -o json, without --columns",
        ));
    }
    if !arguments.follow {
        let events = node.past_events(query)?;
        if !has_lines {
            return format.print_done(&events);
        }
        let lines = events.iter().map(|event| line(event, format));
        print(lines.collect::<Result<_, _>>()?)?;
        return Ok(Code::Success);
    }
    let mut events = node.events(query);
    loop {
        match events.next(WAIT)? {
            Some(Notice::Event(event)) => print(line(&event, format)?)?,
            Some(Notice::Lost) => {
                tracing::warn!("events were lost while the connection was broken")
            }
            Some(Notice::Begin) | None => {}
        }
    }
}

fn line(event: &Value, format: Format) -> Result<String, Error> {
    if format.is_json() {
        return Ok(format!("{event}\n"));
    }
    let event = Event::deserialize(event).map_err(Error::context(STRANGE))?;
    Ok(text(&event) + "\n")
}

/// An event in a line.
pub(crate) fn text(event: &Event) -> String {
    let time = utc(event.time_ms / 1000);
    let detail = event.detail.as_ref();
    let detail = detail.map(|detail| format!("  {detail}"));
    let detail = detail.unwrap_or_default();
    let line = format!("{time}  {}  {}{detail}", event.subject, event.change);
    printable(&line)
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use clap::{Args as _, FromArgMatches as _};
    use serde_json::json;

    use super::*;

    fn shown(words: &[&str], fake: &FakeDaemon) -> (String, Result<Code, Error>) {
        let command = Arguments::augment_args(clap::Command::new("x"));
        let line = std::iter::once(&"x").chain(words);
        let command = Format::augment_args(command);
        let matches = command.try_get_matches_from(line).unwrap();
        let arguments = Arguments::from_arg_matches(&matches).unwrap();
        let format = Format::from_arg_matches(&matches).unwrap();
        let mut all = String::new();
        let mut print = |text: String| {
            all.push_str(&text);
            Ok(())
        };
        let code = show(&arguments, &fake.node(), format, &mut print);
        (all, code)
    }

    const FIRST: &str = "id: 1\ndata: {\"generation\":1,\"time_ms\":1795297500123,\
                         \"subject\":\"/v1/vms/web\",\"change\":\"created\",\"new\":1}\n\n";
    const SECOND: &str = "id: 2\ndata: {\"generation\":2,\"time_ms\":1795297501000,\
                          \"subject\":\"/v1/vms/web\",\"change\":\"ended\",\
                          \"detail\":\"a\\u001bb\"}\n\n";
    const LINES: &str = "2026-11-21T21:45:00Z  /v1/vms/web  created\n\
                         2026-11-21T21:45:01Z  /v1/vms/web  ended  a?b\n";

    #[test]
    fn past_events_are_printed_and_the_command_ends() {
        let fake = FakeDaemon::default().answer(200, &json!(format!("{FIRST}{SECOND}")));
        let (text, code) = shown(&["--vm", "web"], &fake);
        assert_eq!((text.as_str(), code.unwrap()), (LINES, Code::Success));
        assert_eq!(fake.asked(), ["GET /v1/events?vm=web&since=0&follow=false"]);
        let fake = FakeDaemon::default().answer(200, &json!(FIRST));
        let (text, _) = shown(&["-j", "--type", "created"], &fake);
        let event: Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(
            (&event["change"], &event["new"]),
            (&json!("created"), &json!(1))
        );
        let (_, error) = shown(&["-f", "-o", "csv"], &FakeDaemon::default());
        assert_eq!(error.unwrap_err().code(), Code::WrongCommandLine);
    }

    #[test]
    fn followed_events_survive_a_break_of_the_connection() {
        let gone = json!({"code": "no_such_vm", "message": "no"});
        let fake = FakeDaemon::default()
            .answer(200, &json!(FIRST))
            .answer(200, &json!(SECOND))
            .answer(404, &gone);
        let (text, code) = shown(&["-f"], &fake);
        assert_eq!(text, LINES);
        assert_eq!(code.unwrap_err().code(), Code::NotThere);
        assert_eq!(
            fake.asked(),
            [
                "GET /v1/events?since=0",
                "GET /v1/events?since=1",
                "GET /v1/events?since=2"
            ]
        );
    }
}
