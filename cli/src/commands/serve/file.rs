//! The options of `bellhop serve` from a file, whose keys are the names of options.
//!
//! Owns the file's form. It adds words to the command line, so clap checks values of both alike.
//! `--config` is the only option that it knows.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use bellhop_common::error::Error;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use toml::{Table, Value};

use crate::{config_file, help};

/// The file that is read without `--config`, if it exists.
const DEFAULT: &str = "/etc/bellhop/bellhop.toml";

/// How similar an option's name must be to be suggested, from 0 to 1.
const SIMILAR: f64 = 0.7;

/// The words of a command line, with the options of the file after them if it is `serve`. The
/// command is only built for it.
pub(crate) fn with_file(
    command: impl FnOnce() -> Command,
    words: Vec<OsString>,
) -> Result<Vec<OsString>, Error> {
    if words.iter().any(|word| word == "serve") {
        with_default(command(), words, Path::new(DEFAULT))
    } else {
        Ok(words)
    }
}

fn with_default(
    mut command: Command,
    mut words: Vec<OsString>,
    default: &Path,
) -> Result<Vec<OsString>, Error> {
    // The file may supply a missing option, so errors are ignored here.
    let given = command.clone().ignore_errors(true);
    let given = given.try_get_matches_from(&words).ok();
    let given = given.as_ref().and_then(ArgMatches::subcommand);
    let Some(("serve", given)) = given else {
        return Ok(words);
    };
    let file = match given.get_one::<PathBuf>("config") {
        Some(file) => file.clone(),
        None if default.exists() => {
            let mut word = OsString::from("--config=");
            word.push(default);
            words.push(word);
            default.to_owned()
        }
        None => return Ok(words),
    };
    // Adds the global options to the subcommand's own.
    command.build();
    let Some(serve) = command.find_subcommand("serve") else {
        return Ok(words);
    };
    for (key, value) in config_file::read::<Table>(&file)? {
        let wrong =
            |problem: String| Error::invalid_input(format!("{}: {key}: {problem}", file.display()));
        let name = key.replace('_', "-");
        let option = options(serve).find(|(known, _)| *known == name);
        let (_, option) = option.ok_or_else(|| wrong(unknown(&name, serve)))?;
        let value = match value {
            Value::String(text) => text,
            Value::Integer(number) => number.to_string(),
            _ => {
                return Err(wrong(
                    "the value is neither a string nor an integer".to_owned(),
                ));
            }
        };
        let word = format!("--{name}={value}");
        check(serve, &word).map_err(wrong)?;
        if given.value_source(option.get_id().as_str()) != Some(ValueSource::CommandLine) {
            words.push(word.into());
        }
    }
    Ok(words)
}

/// The options that a file may have, by name: those of the daemon, and of its log. Options without
/// a value, such as --end-orphans, are for one start only.
fn options(serve: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let is_for_file = |option: &&Arg| {
        option.get_help_heading() != Some("Output options")
            && option.get_action().takes_values()
            && option.get_id() != "config"
    };
    let options = serve.get_arguments().filter(is_for_file);
    options.filter_map(|option| Some((option.get_long()?, option)))
}

fn unknown(name: &str, serve: &Command) -> String {
    let similarity = |known: &str| strsim::jaro_winkler(known, name);
    let nearest = options(serve)
        .map(|(known, _)| (similarity(known), known))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    match nearest {
        Some((_, known)) => {
            let known = known.replace('-', "_");
            format!("no option has this name; did you mean {known}?")
        }
        None => "no option has this name; `bellhop serve --help` lists them".to_owned(),
    }
}

/// Checks one option by itself; other options may be missing.
fn check(serve: &Command, word: &str) -> Result<(), String> {
    match serve.clone().try_get_matches_from(["serve", word]) {
        Err(error)
            if [ErrorKind::InvalidValue, ErrorKind::ValueValidation].contains(&error.kind()) =>
        {
            Err(help::message(&error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bellhop_common::exit::Code;
    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::Arguments;

    /// A file that is removed when dropped.
    struct File(PathBuf);

    impl File {
        fn new(test: &str, content: &str) -> Self {
            let name = format!("bellhop-serve-{test}-{}.toml", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::write(&path, content).unwrap();
            Self(path)
        }

        fn words(&self, line: &str) -> Result<Vec<OsString>, Error> {
            let words = line.split(' ').map(OsString::from).collect();
            with_default(Arguments::command(), words, &self.0)
        }

        /// The options of the command line and the file.
        fn parsed(&self, line: &str) -> String {
            let words = self.words(line).unwrap();
            let arguments = Arguments::try_parse_from(words).unwrap();
            format!("{arguments:?}")
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn the_command_line_precedes_the_file_and_the_file_the_defaults() {
        let file = File::new(
            "order",
            "state_dir = \"/s\"\nruntime-dir = \"/r\"\ngroup = 7\nlog_level = \"info\"\n\
             tls_cert = \"c\"\ntls_key = \"k\"\ntls_ca = \"a\"\ntokens = \"t\"\n\
             node_ca = \"n\"\n",
        );
        // What `--listen` requires is in the file.
        let parsed = file.parsed("bellhop serve --runtime-dir /other --listen [::1]:8443");
        for part in [
            "state_dir: \"/s\"",
            "runtime_dir: \"/other\"",
            "group: Some(\"7\")",
            "log_level: LevelFilter::INFO",
            "listen: Some([::1]:8443)",
            "tokens: Some(\"t\")",
            "node_ca: Some(\"n\")",
        ] {
            assert!(parsed.contains(part), "{part}: {parsed}");
        }
        let line = "bellhop --log-level debug serve --listen [::1]:1";
        assert!(file.parsed(line).contains("log_level: LevelFilter::DEBUG"));
        for line in [
            "bellhop vm show serve",
            "bellhop serve --help",
            "bellhop vm list",
        ] {
            let words = file.words(line).unwrap();
            assert_eq!(words.len(), line.split(' ').count(), "{line}");
        }
    }

    #[test]
    fn a_named_file_precedes_the_default_and_must_exist() {
        let default = File::new("default", "group = \"a\"");
        let other = File::new("other", "group = \"b\"");
        let line = format!("bellhop serve --config {}", other.0.display());
        assert!(default.parsed(&line).contains("group: Some(\"b\")"));
        default
            .words("bellhop serve --config /nonexistent.toml")
            .unwrap_err();
        let none = Path::new("/nonexistent.toml");
        let words = vec!["bellhop".into(), "serve".into()];
        assert_eq!(
            with_default(Arguments::command(), words.clone(), none).unwrap(),
            words
        );
    }

    #[test]
    fn errors_name_the_file_and_the_key() {
        for (content, part) in [
            (
                "lisen = \"a\"",
                "lisen: no option has this name; did you mean listen?",
            ),
            ("stat_dir = \"a\"", "did you mean state_dir?"),
            ("zzz = 1", "`bellhop serve --help` lists them"),
            ("config = \"a\"", "config: no option has this name"),
            ("output = \"json\"", "output: no option has this name"),
            (
                "listen = \"a\"",
                "listen: invalid value 'a' for '--listen <ADDRESS:PORT>'",
            ),
            ("log_level = \"loud\"", "log_level: invalid value 'loud'"),
            (
                "group = [\"a\"]",
                "group: the value is neither a string nor an integer",
            ),
            ("group = true", "group: the value is neither"),
            ("group", "is wrong"),
            ("[group]\na = 1", "group: the value is neither"),
        ] {
            let file = File::new("error", content);
            let error = file.words("bellhop serve").unwrap_err();
            assert_eq!(error.code(), Code::InvalidInput, "{content}");
            let error = error.to_string();
            assert!(error.contains(part), "{content}: {error}");
            assert!(error.contains("bellhop-serve-error"), "{error}");
        }
    }

    #[test]
    fn the_file_of_the_package_is_understood_with_all_its_examples() {
        let path = "../images/package/root/etc/bellhop/bellhop.toml";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let content = fs::read_to_string(path).unwrap();
        // `#key = …` is an example, `# text` a comment.
        let example = |line: &str| match line.strip_prefix('#') {
            Some(rest) if !rest.starts_with(' ') => rest.to_owned(),
            _ => line.to_owned(),
        };
        let all: Vec<String> = content.lines().map(example).collect();
        for (name, content) in [("packaged", content), ("examples", all.join("\n"))] {
            let parsed = File::new(name, &content).parsed("bellhop serve");
            assert!(parsed.contains("group: Some(\"bellhop\")"), "{parsed}");
        }
    }
}
