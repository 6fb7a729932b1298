//! Log lines on standard error, or in a file.

mod limit;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use bellhop_common::colour;
use bellhop_common::log_rate::Rate;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use limit::{Limit, SUPPRESSED};
use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use vmm::rotating_file::{RotatingFile, SIZE_MAX};

pub(crate) use limit::{DAEMON_RATE, VM_RATE};

/// The target of audit lines, which are logged at every level: each change, with its author.
const AUDIT: &str = "audit";

/// Parses a log level.
pub(crate) fn level() -> impl TypedValueParser<Value = LevelFilter> {
    PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"])
        .try_map(|level| level.parse::<LevelFilter>())
}

/// The format of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people; with the time only in a file, because journald adds it to standard error
    Text,
    /// One JSON object per line, with time and target
    Json,
}

/// Sends log lines of `level` and above, and audit lines, to standard error from now on, or to
/// `file`. If the file cannot be used, it logs a warning there: no VM ends because of its log.
/// `rate` limits the lines of each call site.
pub(crate) fn start(
    level: LevelFilter,
    format: LogFormat,
    file: Option<&Path>,
    rate: Option<Rate>,
) {
    let opened = file.map(|path| LogFile::open(path, SIZE_MAX)).transpose();
    let (log, error) = match opened {
        Ok(log) => (log, None),
        Err(error) => (None, Some(error)),
    };
    let lines = Targets::new()
        .with_default(level)
        .with_target(AUDIT, level.max(LevelFilter::INFO))
        .with_target(SUPPRESSED, level.max(LevelFilter::WARN));
    let registry = tracing_subscriber::registry()
        .with(lines)
        .with(rate.map(Limit::new));
    let has_file = log.is_some();
    let coloured = !has_file && colour::wanted(&io::stderr());
    let writer = match log {
        Some(log) => BoxMakeWriter::new(move || log.clone()),
        None => BoxMakeWriter::new(io::stderr),
    };
    let layer = layer().with_writer(writer).with_ansi(coloured);
    match format {
        LogFormat::Text if has_file => registry.with(layer.with_target(false)).init(),
        LogFormat::Text => registry
            .with(layer.without_time().with_target(false))
            .init(),
        LogFormat::Json => registry.with(layer.json().flatten_event(true)).init(),
    }
    if let (Some(error), Some(path)) = (error, file) {
        let path = path.display();
        tracing::warn!(%path, %error, "cannot use the log file; logging to standard error");
    }
}

/// A log file. If standard output and error are that file, they follow its rotation, because a
/// panic is written there, too.
#[derive(Debug, Clone)]
struct LogFile {
    file: Arc<Mutex<RotatingFile>>,
    output: bool,
    error: bool,
}

impl LogFile {
    fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = RotatingFile::open(path, limit)?;
        let is_it = |stream: &dyn AsFd| file.file().is_some_and(|file| is_same(file, stream));
        Ok(Self {
            output: is_it(&io::stdout()),
            error: is_it(&io::stderr()),
            file: Arc::new(Mutex::new(file)),
        })
    }
}

fn is_same(file: &File, stream: &dyn AsFd) -> bool {
    let place =
        |fd: &dyn AsFd| rustix::fs::fstat(fd.as_fd()).map(|stat| (stat.st_dev, stat.st_ino));
    place(file).is_ok_and(|place_of_file| place(stream) == Ok(place_of_file))
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut file = self.file.lock();
        let rotated = file.append(line).map_err(|failed| failed.source)?;
        if rotated && let Some(file) = file.file() {
            // Otherwise they stay in the older file.
            if self.output {
                let _ = rustix::stdio::dup2_stdout(file);
            }
            if self.error {
                let _ = rustix::stdio::dup2_stderr(file);
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    /// Uses the subscriber of this process: lines of other tests reach it, too.
    #[test]
    fn a_flood_is_suppressed_and_counted() {
        const FLOOD: usize = 10_000;
        let name = format!("bellhop-flood-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        start(
            LevelFilter::ERROR,
            LogFormat::Text,
            Some(&path),
            Some(VM_RATE),
        );
        for round in ["first", "second"] {
            for line in 0..FLOOD {
                // An argument that differs must not make it another source.
                tracing::error!(line, "{round} flood");
                tracing::info!(target: AUDIT, "{round} audit line");
            }
            tracing::error!("{round} quiet line");
            tracing::warn!("below the level");
            sleep(Duration::from_millis(1100));
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        let first = count("first flood");
        // Each interval lets a line through, and this processor may be busy.
        assert!((100..200).contains(&first), "{first}");
        assert!((1..100).contains(&count("second flood")), "{text}");
        assert!(count("lines suppressed: too many from one source") > 0);
        // Between the last line of the first round and the first one of the second.
        let suppressed = text
            .lines()
            .rfind(|line| line.contains("lines suppressed"))
            .unwrap();
        assert!(suppressed.contains(" WARN "), "{suppressed}");
        assert!(suppressed.contains("logging.rs:"), "{suppressed}");
        for round in ["first", "second"] {
            assert_eq!(count(&format!("{round} audit line")), FLOOD);
            assert_eq!(count(&format!("{round} quiet line")), 1);
        }
        assert_eq!(count("below the level"), 0);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_log_rotates_and_leaves_other_streams_alone() {
        let name = format!("bellhop-logging-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let mut log = LogFile::open(&path, 20).unwrap();
        assert!(!log.output && !log.error);
        let own = File::open(&path).unwrap();
        assert!(is_same(log.file.lock().file().unwrap(), &own));
        for line in ["the first line\n", "the second line\n"] {
            log.write_all(line.as_bytes()).unwrap();
        }
        let old = path.with_extension("1");
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "the first line\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "the second line\n");
        // The reader still has the older file.
        assert!(!is_same(log.file.lock().file().unwrap(), &own));
        for file in [path, old] {
            std::fs::remove_file(file).unwrap();
        }
    }
}
