//! An error and its causes on one line, for a place with room for one text. Such places are a
//! record, a response to another host and a log line.
//!
//! Code that prints one cause per line walks the causes itself.

use std::error::Error;

/// The error and its causes, outermost first, joined by `: `.
#[must_use]
pub fn in_one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the device cannot be used")]
    struct Outer(#[source] io::Error);

    #[test]
    fn each_cause_is_there_once() {
        assert_eq!(in_one_line(&io::Error::other("no")), "no");
        let error = Outer(io::Error::other("it is in use"));
        assert_eq!(
            in_one_line(&error),
            "the device cannot be used: it is in use"
        );
    }
}
