//! The output of a file of tests. If several files run at once, the output is kept until the file
//! has ended and then printed whole. So lines of two files never mix. If one runs alone, each line
//! is printed as it arrives.

use crate::agent::client::Printed;
use crate::progress;
use std::io::Write as _;

/// The lines of one run.
#[derive(Debug)]
pub(super) enum Transcript {
    /// Printed already.
    Live,
    /// Kept, in the order in which they came.
    Kept(Vec<(Printed, String)>),
}

impl Transcript {
    /// A transcript of a run beside others, or of one alone.
    pub(super) fn new(beside_others: bool) -> Self {
        if beside_others {
            Self::Kept(Vec::new())
        } else {
            Self::Live
        }
    }

    /// Takes one line, without its end.
    pub(super) fn line(&mut self, printed: Printed, line: &str) {
        match (self, printed) {
            (Self::Live, Printed::Output) => println!("{line}"),
            (Self::Live, Printed::Error) => eprintln!("{line}"),
            (Self::Kept(lines), _) => lines.push((printed, line.to_owned())),
        }
    }

    /// Prints the kept lines below a title.
    pub(super) fn show(self, title: &str) {
        let Self::Kept(lines) = self else {
            return;
        };
        progress::around(|| {
            // Both are locked until the end: other threads also print to them.
            let mut output = std::io::stdout().lock();
            let mut errors = std::io::stderr().lock();
            // A closed output does not end the tests.
            let _ = writeln!(output, "{title}");
            for (printed, line) in &lines {
                let _ = match printed {
                    Printed::Output => writeln!(output, "{line}"),
                    Printed::Error => writeln!(errors, "{line}"),
                };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_output_of_parallel_tests_is_kept() {
        let mut kept = Transcript::new(true);
        kept.line(Printed::Output, "one");
        kept.line(Printed::Error, "two");
        let Transcript::Kept(lines) = &kept else {
            panic!("{kept:?}");
        };
        assert_eq!(lines[0], (Printed::Output, "one".to_owned()));
        assert_eq!(lines[1], (Printed::Error, "two".to_owned()));
        assert!(matches!(Transcript::new(false), Transcript::Live));
    }
}
