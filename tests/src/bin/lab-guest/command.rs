//! The guest's commands: one line in, one JSON value out.
//!
//! | command | does |
//! |---|---|
//! | `info` | what `ready` said, as it is now |
//! | `frames N SIZE WINDOW [NIC]` | N frames to the NIC's own address, at most WINDOW under way, each verified when it comes back |
//! | `flood SECONDS [SIZE] [NIC]` | frames as fast as they go, unpaced |
//! | `flood-on [SIZE] [NIC]` | frames in the background, until `flood-off`, across resets of the driver |
//! | `flood-off` | ends them; totals |
//! | `rebind N [NIC]` | takes the driver off the device and back, with frames between |
//! | `rebind-flooded N FRAMES [NIC]` | the same after each FRAMES frames of the background flood; 0: as fast as it goes |
//! | `processors` | topology and features of the processors |
//! | `memory-check MIB` | writes a pattern to so much memory and verifies it; where the memory was |
//! | `disk-check DEV SEED SECTORS` | writes a pattern, forgets the cache, reads and verifies it |
//! | `disk-verify DEV SEED SECTORS` | reads and verifies such a pattern, maybe of before a reboot |
//! | `disk-read DEV` | reads all of it; size and SHA-256 |
//! | `rng BYTES` | reads the hardware random generator |
//! | `link` | the NICs as `ip link` shows them |
//! | `mac ADDRESS [NIC]` | sets the address through the control queue |
//! | `promisc on\|off [NIC]` | promiscuous mode |
//! | `dmesg` | the kernel's warnings and errors |
//! | `shell` | a shell on the console until it exits |
//! | `reboot`, `poweroff`, `panic` | ends the guest |

use crate::{background, disk, frames, info, memory, network, processors, random, system};
use lab::error::{Error, Result};
use serde_json::{Value, json};
use std::str::{FromStr, SplitWhitespace};
use std::time::Duration;

/// The NIC of commands that name none.
const DEFAULT_NIC: &str = "eth0";

/// What a command gives.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) value: Result<Value>,
    pub(crate) afterwards: Afterwards,
}

/// What happens after the answer was printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    Next,
    Reboot,
    PowerOff,
    Panic,
}

impl Afterwards {
    pub(crate) fn act(self) {
        match self {
            Self::Next => {}
            Self::Reboot => system::reboot(),
            Self::PowerOff => system::power_off(),
            // The kernel panics when init ends.
            Self::Panic => std::process::exit(1),
        }
    }
}

/// Obeys one line.
pub(crate) fn obey(line: &str) -> Answer {
    let mut words = line.split_whitespace();
    let verb = words.next().unwrap_or_default();
    let afterwards = match verb {
        "reboot" => Afterwards::Reboot,
        "poweroff" => Afterwards::PowerOff,
        "panic" => Afterwards::Panic,
        _ => Afterwards::Next,
    };
    let value = if afterwards == Afterwards::Next {
        run(verb, &mut words)
    } else {
        Ok(json!({ "ending": verb }))
    };
    Answer { value, afterwards }
}

fn run(verb: &str, words: &mut SplitWhitespace<'_>) -> Result<Value> {
    match verb {
        "info" => Ok(info::all(&[])),
        "link" => info::link(),
        "frames" => {
            let plan = frames::Plan {
                count: number(words, "N")?,
                size: number(words, "SIZE")?,
                window: number(words, "WINDOW")?,
            };
            frames::exchange(nic(words), &plan)
        }
        "flood" => {
            let seconds: u64 = number(words, "SECONDS")?;
            let size = optional(words, "SIZE")?.unwrap_or(64);
            frames::flood(nic(words), Duration::from_secs(seconds), size)
        }
        "flood-on" => {
            let size = optional(words, "SIZE")?.unwrap_or(64);
            background::start(nic(words), size).map(|()| json!({ "flood": "on" }))
        }
        "flood-off" => background::stop().map(frames::Totals::to_json),
        "rebind-flooded" => {
            let times = number(words, "N")?;
            let frames = number(words, "FRAMES")?;
            network::rebind_flooded(nic(words), times, frames)
        }
        "processors" => processors::topology(),
        "memory-check" => memory::check(number(words, "MIB")?),
        "rebind" => {
            let times = number(words, "N")?;
            network::rebind(nic(words), times)
        }
        "disk-check" => {
            let device = word(words, "DEV")?;
            disk::check(device, number(words, "SEED")?, number(words, "SECTORS")?)
        }
        "disk-verify" => {
            let device = word(words, "DEV")?;
            disk::verify(device, number(words, "SEED")?, number(words, "SECTORS")?)
        }
        "disk-read" => disk::read(word(words, "DEV")?),
        "rng" => random::hardware(number(words, "BYTES")?),
        "mac" => {
            let address = word(words, "ADDRESS")?;
            network::set_address(nic(words), address)
        }
        "promisc" => {
            let on = match word(words, "on|off")? {
                "on" => true,
                "off" => false,
                other => {
                    return Err(Error::invalid(
                        "promisc",
                        format!("{other:?} is not on or off"),
                    ));
                }
            };
            network::set_promiscuous(nic(words), on)
        }
        "dmesg" => info::kernel_messages(),
        "shell" => system::shell().map(|()| json!({ "shell": "ended" })),
        other => Err(Error::Usage(format!("unknown command {other:?}"))),
    }
}

fn word<'a>(words: &mut SplitWhitespace<'a>, name: &str) -> Result<&'a str> {
    words
        .next()
        .ok_or_else(|| Error::Usage(format!("{name} is missing")))
}

fn number<T: FromStr>(words: &mut SplitWhitespace<'_>, name: &str) -> Result<T> {
    let word = word(words, name)?;
    word.parse()
        .map_err(|_| Error::invalid(name, format!("{word:?} is not a number in range")))
}

fn optional<T: FromStr>(words: &mut SplitWhitespace<'_>, name: &str) -> Result<Option<T>> {
    // A NIC's name may follow where the number was left out.
    if words
        .clone()
        .next()
        .is_some_and(|word| word.starts_with(|first: char| first.is_ascii_digit()))
    {
        return number(words, name).map(Some);
    }
    Ok(None)
}

fn nic<'a>(words: &mut SplitWhitespace<'a>) -> &'a str {
    words.next().unwrap_or(DEFAULT_NIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_lines_are_errors() {
        for line in [
            "",
            "what",
            "frames",
            "frames x 1 1",
            "frames -1 64 1",
            "promisc maybe",
            "rng",
        ] {
            let answer = obey(line);
            assert!(answer.value.is_err(), "{line:?}");
            assert_eq!(answer.afterwards, Afterwards::Next);
        }
    }

    #[test]
    fn optional_numbers_leave_names_alone() {
        let mut words = "eth1".split_whitespace();
        assert_eq!(optional::<usize>(&mut words, "SIZE").unwrap(), None);
        assert_eq!(nic(&mut words), "eth1");
        let mut words = "128 eth1".split_whitespace();
        assert_eq!(optional::<usize>(&mut words, "SIZE").unwrap(), Some(128));
        assert_eq!(nic(&mut words), "eth1");
    }
}
