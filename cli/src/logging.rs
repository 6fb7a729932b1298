//! Log lines on standard error.

use std::fmt;

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The target of lines that are logged at every level: who changed what.
const AUDIT: &str = "audit";

use crate::colour;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl fmt::Display for Level {
    /// As the command line takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        LevelFilter::from(*self).fmt(f)
    }
}

impl From<Level> for LevelFilter {
    fn from(level: Level) -> Self {
        match level {
            Level::Error => Self::ERROR,
            Level::Warn => Self::WARN,
            Level::Info => Self::INFO,
            Level::Debug => Self::DEBUG,
            Level::Trace => Self::TRACE,
        }
    }
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
pub(crate) fn start(level: Level, format: LogFormat) {
    let lines = Targets::new()
        .with_default(LevelFilter::from(level))
        .with_target(AUDIT, LevelFilter::from(level).max(LevelFilter::INFO));
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
