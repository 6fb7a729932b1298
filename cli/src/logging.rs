//! Log lines on standard error.

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;

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

/// Sends log lines of `level` and above to standard error from now on.
pub(crate) fn start(level: Level) {
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::from(level))
        .with_writer(std::io::stderr)
        .with_ansi(colour::wanted(&std::io::stderr()))
        .without_time()
        .with_target(false)
        .init();
}
