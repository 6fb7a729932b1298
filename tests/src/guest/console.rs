//! A guest's console: remembers its last output and forwards the lines of the guest's init.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// The prefix of the lines of the guest's init.
pub(super) const MARK: &str = "@lab ";

/// How many bytes of a console are kept; the end matters.
pub(super) const REMEMBERED: usize = 1 << 20;
/// The unfinished line of the guest's console.
#[derive(Debug, Default)]
pub(super) struct Begun {
    pub(super) line: Vec<u8>,
    /// The first line that ended here: it may have begun on another VMM.
    pub(super) first: Option<String>,
}

/// The guest's output, with the VMM's messages in between.
#[derive(Debug, Default)]
pub(super) struct Console {
    pub(super) text: String,
    /// The time of the last output.
    pub(super) last: Option<Instant>,
}

/// Records the output and forwards the init's lines.
pub(super) fn read_console(
    stream: impl Read + Send + 'static,
    console: Arc<Mutex<Console>>,
    said: Option<(Sender<String>, Arc<Mutex<Begun>>)>,
    show: Option<&'static str>,
) -> JoinHandle<()> {
    let (lines, begun) = said.unzip();
    let begun = begun.unwrap_or_default();
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        loop {
            // Any output counts as a sign of life, even half a line.
            let (bytes, ended) = match stream.fill_buf() {
                Ok([]) | Err(_) => return,
                Ok(bytes) => match bytes.iter().position(|byte| *byte == b'\n') {
                    Some(end) => (bytes.get(..=end).unwrap_or_default(), true),
                    None => (bytes, false),
                },
            };
            let count = bytes.len();
            let (Ok(mut console), Ok(mut begun)) = (console.lock(), begun.lock()) else {
                return;
            };
            begun.line.extend_from_slice(bytes);
            stream.consume(count);
            console.last = Some(Instant::now());
            // A guest that never ends a line must not fill the memory.
            if !ended && begun.line.len() < REMEMBERED {
                continue;
            }
            let text = String::from_utf8_lossy(&begun.line).into_owned();
            begun.line.clear();
            if begun.first.is_none() {
                begun.first = Some(text.clone());
            }
            drop(begun);
            remember(&mut console.text, &text);
            drop(console);
            if let (Some(prefix), false) = (show, text.contains(MARK) || text.trim().is_empty()) {
                eprintln!("{prefix} {}", text.trim_end());
            }
            if let (Some(lines), Some(said)) = (&lines, said_in(&text)) {
                // The receiver may be gone.
                let _ = lines.send(said);
            }
        }
    })
}

/// The text of the guest's init in a line.
pub(super) fn said_in(line: &str) -> Option<String> {
    let (_, said) = line.split_once(MARK)?;
    Some(said.trim_end().to_owned())
}

/// Appends text and drops the beginning where it grows too long.
pub(super) fn remember(text: &mut String, more: &str) {
    text.push_str(more);
    if text.len() > 2 * REMEMBERED {
        let mut cut = text.len() - REMEMBERED;
        while !text.is_char_boundary(cut) {
            cut += 1;
        }
        text.drain(..cut);
    }
}
