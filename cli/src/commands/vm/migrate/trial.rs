//! `bellhop vm migrate --dry-run`, `bellhop vm compat`: whether a VM can migrate, and the expected
//! cost.

use bellhop_api::machine::{Forecast, MigrationObstacle, MigrationTrial};
use bellhop_common::client::{MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde::Serialize;

use super::super::read;

/// Sends the request, prints the answer, and returns its exit code.
pub(in crate::commands::vm) fn execute(
    node: &Node,
    at: &str,
    wanted: &impl Serialize,
    format: Format,
) -> Result<Code, Error> {
    let (_, answer) = node.send(Method::POST, at, wanted, MAKING)?;
    let trial = read::<MigrationTrial>(&answer)?;
    format.print(&answer, || text(&trial))?;
    Ok(if trial.movable {
        Code::Success
    } else {
        Code::Failed
    })
}

/// In MiB, rounded up, so that a small size is not shown as 0.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn text(trial: &MigrationTrial) -> String {
    let answer = if trial.movable { "yes" } else { "no" };
    let mut text = format!("movable to {}: {answer}\n", printable(&trial.destination));
    for MigrationObstacle { reason, remedy } in &trial.obstacles {
        text.push_str(&format!("  {}\n", printable(reason)));
        if let Some(remedy) = remedy {
            text.push_str(&format!("    remedy: {}\n", printable(remedy)));
        }
    }
    if let Some(forecast) = &trial.forecast {
        add_to(&mut text, forecast);
    }
    text
}

fn add_to(text: &mut String, forecast: &Forecast) {
    text.push_str(&format!(
        "memory: {} MiB, of which {} MiB hold data\n",
        mib(forecast.ram_bytes),
        mib(forecast.data_bytes)
    ));
    text.push_str(&match (forecast.bytes_per_second, forecast.copy_ms) {
        (Some(rate), Some(time)) => format!(
            "rate: {} MiB/s in the last migration there: sending all of that once takes {:.1} s\n",
            mib(rate),
            std::time::Duration::from_millis(time).as_secs_f64()
        ),
        _ => "rate: unknown, because it has never migrated there\n".to_owned(),
    });
    if let Some(time) = forecast.prepare_ms {
        text.push_str(&format!(
            "preparation: {time} ms there to open devices and map all memory for them (just \
             measured)\n"
        ));
    }
    text.push_str(&format!(
        "downtime: about {} ms if the guest writes nothing meanwhile (an assumption); the limit \
         is {} ms\n",
        forecast.downtime_min_ms, forecast.downtime_max_ms
    ));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn answer(movable: bool) -> Value {
        let obstacles = if movable {
            json!([])
        } else {
            json!([
                { "reason": "device net0 is this here and\u{1b}[31m that there",
                  "remedy": "bellhop dev add" },
                { "reason": "another", "remedy": null },
            ])
        };
        json!({
            "destination": "tcp:b:7444", "movable": movable, "obstacles": obstacles,
            "ram_bytes": 1_u64 << 30, "data_bytes": (100 << 20) + 1, "bytes_per_second": null,
            "copy_ms": null, "downtime_min_ms": 25, "downtime_max_ms": 300,
            "later": "another field",
        })
    }

    #[test]
    fn a_movable_machine_has_a_forecast() {
        let mut answer = answer(true);
        let said = text(&read(&answer).unwrap());
        for part in [
            "movable to tcp:b:7444: yes\n",
            "1024 MiB, of which 101 MiB",
            "rate: unknown",
            "25 ms",
            "300 ms",
        ] {
            assert!(said.contains(part), "{said}");
        }
        answer["bytes_per_second"] = (50 << 20).into();
        answer["copy_ms"] = 2020.into();
        answer["prepare_ms"] = 170.into();
        let text = text(&read(&answer).unwrap());
        assert!(
            text.contains("50 MiB/s") && text.contains("2.0 s") && text.contains("170 ms there"),
            "{text}"
        );
    }

    #[test]
    fn a_node_that_does_not_wait_gives_the_reason_without_a_forecast() {
        let answer = json!({ "destination": "https://b:1 (as web)", "movable": false,
            "obstacles": [{ "reason": "its kernel /k is not on this host: copy it there",
                            "remedy": null }] });
        let text = text(&read(&answer).unwrap());
        assert!(
            text.starts_with("movable to https://b:1 (as web): no\n  its kernel"),
            "{text}"
        );
        assert!(!text.contains("memory:"), "{text}");
    }

    #[test]
    fn an_unmovable_machine_has_obstacles_and_remedies() {
        let text = text(&read(&answer(false)).unwrap());
        assert!(
            text.starts_with("movable to tcp:b:7444: no\n  device net0"),
            "{text}"
        );
        assert!(
            text.contains("\n    remedy: bellhop dev add\n  another\n"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
