//! Metrics in the Prometheus text format, version 0.0.4.
//!
//! Owns the form of a family and of its samples. Also owns the families of devices, which the
//! metrics of a VM and of a node share. Escapes label values.

use std::fmt::Write as _;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bellhop_api::machine::{DeviceInfo, Kick, WatchInfo};

/// The version of the format is a part of its type.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text, family by family.
#[derive(Debug, Default)]
pub struct Text(String);

/// The type of a family.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A figure that grows and shrinks.
    Gauge,
    /// A figure that only grows.
    Counter,
}

/// A device, and the labels of its samples.
pub type Labelled<'a> = (Vec<(&'static str, &'a str)>, &'a DeviceInfo);

impl Text {
    /// Begins a family: all its samples follow.
    pub fn family(&mut self, kind: Kind, name: &str, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let name = name.to_owned();
        Family { text: self, name }
    }

    /// Begins a family of gauges.
    pub fn gauge(&mut self, name: &str, help: &str) -> Family<'_> {
        self.family(Kind::Gauge, name, help)
    }

    /// Begins a family of counters.
    pub fn counter(&mut self, name: &str, help: &str) -> Family<'_> {
        self.family(Kind::Counter, name, help)
    }

    /// The families of devices and of their enabled queues. The names of those of a device begin
    /// with `prefix`.
    pub fn devices(&mut self, prefix: &str, devices: &[Labelled<'_>]) {
        let help = "Whether the guest's driver runs the device";
        let mut running = self.gauge(&format!("{prefix}_driver_ok"), help);
        for (labels, device) in devices {
            running.sample(labels, device.driver_ok.into());
        }
        let help = "Whether the device or its driver gave up";
        let mut broken = self.gauge(&format!("{prefix}_broken"), help);
        for (labels, device) in devices {
            broken.sample(labels, device.broken.into());
        }
        let help = "Enabled queues by the way in which they are kicked";
        let mut queues = self.gauge(&format!("{prefix}_queues"), help);
        for (labels, device) in devices {
            for (way, kick) in [
                ("exit", Kick::Exit),
                ("eventfd", Kick::Eventfd),
                ("doorbell", Kick::Doorbell),
            ] {
                let all = device.queues.iter();
                let kicked = all.filter(|queue| queue.enabled && queue.kick == kick);
                queues.sample(&with(labels, ("kick", way)), count(kicked.count()));
            }
        }
        self.watches(devices);
    }

    /// The results of the ring watch; no samples if it is off.
    fn watches(&mut self, devices: &[Labelled<'_>]) {
        type Value = fn(&WatchInfo) -> Option<u64>;
        let families: [(Kind, &str, &str, Value); 5] = [
            (
                Kind::Gauge,
                "bellhop_queue_in_flight",
                "Buffers that the device has not used yet",
                |watch| watch.in_flight.map(u64::from),
            ),
            (
                Kind::Counter,
                "bellhop_queue_posted_total",
                "Buffers that the driver posted, by 16-bit indices sampled once a second",
                |watch| Some(watch.posted),
            ),
            (
                Kind::Counter,
                "bellhop_queue_completed_total",
                "Buffers that the device used, by 16-bit indices sampled once a second",
                |watch| Some(watch.completed),
            ),
            (
                Kind::Gauge,
                "bellhop_queue_stuck_seconds",
                "Seconds for which the queue has been stuck",
                |watch| Some(watch.stuck_for_s),
            ),
            (
                Kind::Counter,
                "bellhop_queue_stall_kicks_total",
                "How often the stuck queue was kicked and its driver interrupted",
                |watch| Some(watch.stall_kicks),
            ),
        ];
        for (kind, name, help, value) in families {
            let mut family = self.family(kind, name, help);
            for (labels, device) in devices {
                for queue in device.queues.iter().filter(|queue| queue.enabled) {
                    if let Some(value) = queue.watch.as_ref().and_then(value) {
                        let index = queue.index.to_string();
                        family.sample(&with(labels, ("queue", &index)), value);
                    }
                }
            }
        }
    }

    /// The text so far.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl IntoResponse for Text {
    fn into_response(self) -> Response {
        ([(CONTENT_TYPE, FORMAT)], self.0).into_response()
    }
}

fn with<'a>(labels: &[(&'a str, &'a str)], more: (&'a str, &'a str)) -> Vec<(&'a str, &'a str)> {
    [labels, &[more]].concat()
}

/// A number of objects as a figure.
#[must_use]
pub fn count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Samples of one name.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut Text,
    name: String,
}

impl Family<'_> {
    /// Adds a sample.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: u64) -> &mut Self {
        let out = &mut self.text.0;
        out.push_str(&self.name);
        for (number, (label, value)) in labels.iter().enumerate() {
            out.push(if number == 0 { '{' } else { ',' });
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let _ = write!(out, "{label}=\"{value}\"");
        }
        if !labels.is_empty() {
            out.push('}');
        }
        let _ = writeln!(out, " {value}");
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text::default();
        text.gauge("x", "help")
            .sample(&[("a", "q\"\\\n"), ("b", "")], 7)
            .sample(&[], u64::MAX);
        assert_eq!(
            text.as_str(),
            "# HELP x help\n# TYPE x gauge\nx{a=\"q\\\"\\\\\\n\",b=\"\"} 7\n\
             x 18446744073709551615\n"
        );
    }
}
