//! Log lines on standard error.

use bellhop_common::colour;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The target of lines that are logged at every level: who changed what.
const AUDIT: &str = "audit";

/// Reads how much is logged.
pub(crate) fn level() -> impl TypedValueParser<Value = LevelFilter> {
    PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"])
        .try_map(|level| level.parse::<LevelFilter>())
}

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people, without the time: whoever keeps logs adds it
    Text,
    /// One JSON object a line, with time and target
    Json,
}

/// Sends log lines of `level` and above, and those of the audit, to standard error from now on.
pub(crate) fn start(level: LevelFilter, format: LogFormat) {
    let lines = Targets::new()
        .with_default(level)
        .with_target(AUDIT, level.max(LevelFilter::INFO));
    let registry = tracing_subscriber::registry().with(lines);
    match format {
        LogFormat::Text => registry
            .with(
                layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(colour::wanted(&std::io::stderr()))
                    .without_time()
                    .with_target(false),
            )
            .init(),
        LogFormat::Json => registry
            .with(
                layer()
                    .json()
                    .flatten_event(true)
                    .with_writer(std::io::stderr),
            )
            .init(),
    }
}
