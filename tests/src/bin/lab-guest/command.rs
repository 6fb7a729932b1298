//! The guest's commands: one line in, one JSON value out. `echo`, and `flood` to a peer, first
//! print `{"listening": NIC}` once they receive frames.
//!
//! * `info`: prints the content of `ready` as of now.
//! * `frames N SIZE WINDOW [NIC] [to MAC]`: sends N frames to the NIC's own address, or to a peer
//!   that echoes. At most WINDOW are in flight. It verifies each when it returns.
//! * `echo N SECONDS [NIC]`: sends N frames back to their senders, each verified. It ends after
//!   SECONDS of silence.
//! * `echo-on [NIC]`: sends frames back in the background, until `echo-off`.
//! * `echo-off`: ends the echo and prints the totals.
//! * `flood SECONDS [SIZE] [NIC] [to MAC [until N [at RATE]]]`: sends frames as fast as possible,
//!   or RATE per second. It ends early when the peer has sent N.
//! * `pace N SIZE MICROSECONDS [NIC]`: sends N frames to the NIC's own address with a pause after
//!   each, without waiting for them.
//! * `paced-on RATE [SIZE] [NIC]`: sends RATE frames per second to the NIC's own address in the
//!   background, until `paced-off`. It verifies each when it returns.
//! * `paced-off`: ends the paced frames and prints the totals.
//! * `paced-gaps FROM TO`: prints the gaps between paced frames, by the guest's clock: those wholly
//!   in FROM..TO (microseconds), and the longest that touches it.
//! * `kept-on N SIZE MICROSECONDS [NIC]`: sends N frames to the NIC's own address in the
//!   background, with a pause after each. They stay unread until `kept-off`.
//! * `kept-off`: reads and verifies these frames and prints the totals.
//! * `now`: prints the guest's monotonic clock, in microseconds.
//! * `notify [NIC]`: prints the addresses of the NIC's notify part.
//! * `notify-read QUEUE [NIC]`: reads a queue's notify page, past the driver (`iomem=relaxed` on
//!   kernels with strict checks).
//! * `flood-on [SIZE [WINDOW]] [NIC] [to MAC]`: sends frames in the background, until `flood-off`,
//!   across resets of the driver. To a peer that echoes, at most WINDOW are in flight (16 without
//!   it).
//! * `flood-off`: ends the flood and prints the totals.
//! * `rebind N [NIC] [to MAC]`: unbinds the driver from the device and binds it again. In between
//!   it sends frames: looped back, or to and from a peer that floods.
//! * `rebind-flooded N FRAMES [NIC]`: does the same after each FRAMES frames of the background
//!   flood; with 0, as fast as possible.
//! * `reset-function [NIC]`: unbinds the driver, resets the PCI function, and binds the driver.
//! * `channels N [NIC]`: uses N queue pairs, as `ethtool -L NIC combined N` does.
//! * `rings RX TX [NIC]`: sets the sizes of the NIC's rings, as `ethtool -G NIC rx RX tx TX` does.
//! * `vfio-on [PIECES] [NIC]`: takes the NIC from the kernel and drives it in this process. Its
//!   addresses are its own behind an IOMMU, and physical ones without. It has so many pieces of
//!   2 MiB, 64 without a number. Until `vfio-off`, `frames`, `flood` and `flood-on` take `vfio` for
//!   this NIC.
//! * `vfio-fill N`: maps one page at N more addresses, until `vfio-off`.
//! * `vfio-remap MILLISECONDS MAC`: sends frames and receives others, while it unmaps and maps
//!   their buffers and the rings; restarts the device whenever that stops.
//! * `vfio-map-bar NIC`: maps a page of another NIC's BAR, as if it were memory (`iomem=relaxed`).
//! * `vfio-refused [NIC]`: negotiates without ACCESS_PLATFORM, and prints whether the device
//!   refuses.
//! * `vfio-off`: gives the NIC back to the kernel; `up` brings it up.
//! * `mover-on MICROSECONDS`: has the functions whose state can move write pages, each with an
//!   interrupt, until `mover-off`. The guest has one processor.
//! * `mover-off`: ends that and prints the totals of each driver and function.
//! * `processors`: prints the topology and features of the processors.
//! * `memory-check MIB`: writes a pattern to this much memory, verifies it, and prints the memory's
//!   location.
//! * `write-on MIB [MICROSECONDS]`: starts to write pages in random order, with a pause after each.
//!   It checks each page before it writes it again.
//! * `write-off`: ends the writer and prints how many pages had changed.
//! * `disk-check DEV SEED SECTORS`: writes a pattern, drops the cache, reads and verifies it.
//! * `disk-verify DEV SEED SECTORS`: reads and verifies such a pattern, perhaps from before a
//!   reboot.
//! * `disk-read DEV`: reads the whole disk and prints its size and SHA-256.
//! * `rng BYTES`: reads the hardware random generator.
//! * `link`: prints the NICs as `ip link` shows them.
//! * `ip WORDS`: runs `ip`, and prints its output.
//! * `ipv6 [NIC]`: switches IPv6 on. The guest's kernel may send frames by itself then.
//! * `tcp-receive`: prints `{"listening": PORT}`, then the length and the SHA-256 of one stream.
//! * `tcp-send ADDRESS BYTES`: sends such a stream by TCP, and prints the same of it.
//! * `tcp-flood ADDRESS SECONDS`: sends a stream by TCP as fast as possible, and prints its length.
//! * `tcp-drain ADDRESS SECONDS`: receives such a stream, and prints the same of it.
//! * `up [NIC]`: brings up a NIC that was plugged in later, and waits for its link.
//! * `mac ADDRESS [NIC]`: sets the address through the control queue.
//! * `control-on [NIC]`: changes the address of the NIC there and back in a loop, and its filter in
//!   between, until `control-off`. Each change is at least one command on the control queue.
//! * `control-off`: ends the loop and prints how many commands there were and how many were
//!   rejected.
//! * `promisc on|off [NIC]`: switches promiscuous mode.
//! * `button SECONDS`: prints `{"listening": FILE}`, then whether the power button was pressed in
//!   that time.
//! * `dmesg`: prints the kernel's warnings and errors.
//! * `shell`: runs a shell on the console until it exits.
//! * `reboot`, `poweroff`, `panic`: end the guest.

use crate::frames::flood;
use crate::network::Address;
use crate::{
    background, button, control, disk, echo, frames, info, kept, memory, network, notify, paced,
    processors, random, system, tcp, vfio, writer,
};
use lab::error::{Error, Result};
use rustix::termios::tcdrain;
use serde_json::{Value, json};
use std::str::{FromStr, SplitWhitespace};
use std::time::Duration;

/// The NIC of commands that name none.
const DEFAULT_NIC: &str = "eth0";

/// The keyword before a peer's address.
const TO: &str = "to";

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) value: Result<Value>,
    pub(crate) afterwards: Afterwards,
}

/// The action after the answer is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    Next,
    Reboot,
    PowerOff,
    Panic,
}

impl Afterwards {
    pub(crate) fn act(self) {
        if self != Self::Next {
            // The kernel's own last lines overtake output that still waits in the terminal.
            let _ = tcdrain(std::io::stdout());
        }
        match self {
            Self::Next => {}
            Self::Reboot => system::reboot(),
            Self::PowerOff => system::power_off(),
            // The kernel panics when init ends.
            Self::Panic => std::process::exit(1),
        }
    }
}

/// Executes one line.
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
        "ip" => tcp::ip(words),
        "ipv6" => tcp::ipv6_on(nic(words)),
        "tcp-receive" => tcp::receive(),
        "tcp-send" => tcp::send(number(words, "ADDRESS")?, number(words, "BYTES")?),
        "tcp-flood" | "tcp-drain" => {
            let (peer, seconds) = (number(words, "ADDRESS")?, number(words, "SECONDS")?);
            let run = match verb {
                "tcp-flood" => tcp::flood,
                _ => tcp::drain,
            };
            run(peer, Duration::from_secs(seconds))
        }
        "frames" => {
            let (count, size) = (number(words, "N")?, number(words, "SIZE")?);
            let window = number(words, "WINDOW")?;
            let nic = nic(words);
            let plan = frames::Plan {
                count,
                size,
                window,
                peer: peer(words)?,
            };
            if nic == vfio::NIC {
                vfio::exchange(&plan)
            } else {
                frames::exchange(nic, &plan)
            }
        }
        "echo" => {
            let (count, seconds) = (number(words, "N")?, number(words, "SECONDS")?);
            echo::echo(nic(words), count, Duration::from_secs(seconds))
        }
        "echo-on" => echo::start(nic(words)),
        "echo-off" => echo::stop(),
        "control-on" => control::start(nic(words)),
        "control-off" => control::stop(),
        "flood" => {
            let seconds: u64 = number(words, "SECONDS")?;
            let size = optional(words, "SIZE")?.unwrap_or(64);
            let nic = nic(words);
            let flooded = match peer(words)? {
                Some(peer) => Some(flood::Flooded {
                    peer,
                    until: after(words, "until", "N")?,
                    rate: after(words, "at", "RATE")?,
                }),
                None => None,
            };
            let duration = Duration::from_secs(seconds);
            if nic == vfio::NIC {
                vfio::flood(duration, size, flooded)
            } else {
                flood::flood(nic, duration, size, flooded)
            }
        }
        "pace" => {
            let (count, size) = (number(words, "N")?, number(words, "SIZE")?);
            let pause = Duration::from_micros(number(words, "MICROSECONDS")?);
            frames::pace(nic(words), count, size, pause)
        }
        "notify" => notify::describe(nic(words)),
        "notify-read" => {
            let queue = number(words, "QUEUE")?;
            notify::read(nic(words), queue)
        }
        "flood-on" => {
            let size = optional(words, "SIZE")?.unwrap_or(64);
            let window = optional(words, "WINDOW")?.unwrap_or(background::WINDOW);
            let nic = nic(words);
            background::start(nic, size, window, peer(words)?).map(|()| json!({ "flood": "on" }))
        }
        "flood-off" => background::stop().map(frames::Totals::to_json),
        "paced-on" => {
            let rate = number(words, "RATE")?;
            let size = optional(words, "SIZE")?.unwrap_or(64);
            paced::start(nic(words), size, rate).map(|()| json!({ "paced": rate }))
        }
        "paced-off" => paced::stop(),
        "paced-gaps" => {
            let (from, to) = (number(words, "FROM")?, number(words, "TO")?);
            paced::gaps(from, to)
        }
        "kept-on" => {
            let (count, size) = (number(words, "N")?, number(words, "SIZE")?);
            let pause = Duration::from_micros(number(words, "MICROSECONDS")?);
            kept::start(nic(words), count, size, pause).map(|()| json!({ "kept": count }))
        }
        "kept-off" => kept::stop(),
        "now" => Ok(json!({ "now_us": paced::now() })),
        "rebind-flooded" => {
            let times = number(words, "N")?;
            let frames = number(words, "FRAMES")?;
            network::rebind_flooded(nic(words), times, frames)
        }
        "vfio-on" => {
            let pieces = optional(words, "PIECES")?.unwrap_or(vfio::PIECES);
            vfio::start(nic(words), pieces)
        }
        "vfio-fill" => vfio::fill(number(words, "N")?),
        "vfio-remap" => {
            let duration = Duration::from_millis(number(words, "MILLISECONDS")?);
            vfio::remap(duration, network::parse_address(word(words, "MAC")?)?)
        }
        "vfio-map-bar" => vfio::map_bar(word(words, "NIC")?),
        "vfio-refused" => vfio::refused(nic(words)),
        "vfio-off" => vfio::stop(),
        "mover-on" => vfio::mover::start(number(words, "MICROSECONDS")?),
        "mover-off" => vfio::mover::stop(),
        "processors" => processors::topology(),
        "memory-check" => memory::check(number(words, "MIB")?),
        "write-on" => {
            let mib = number(words, "MIB")?;
            let pause = optional(words, "MICROSECONDS")?.unwrap_or(0);
            writer::start(mib, Duration::from_micros(pause))
        }
        "write-off" => writer::stop(),
        "rebind" => {
            let times = number(words, "N")?;
            let nic = nic(words);
            network::rebind(nic, times, peer(words)?)
        }
        "reset-function" => network::reset_function(nic(words)),
        "channels" => {
            let count = number(words, "N")?;
            network::set_channels(nic(words), count)
        }
        "rings" => {
            let (rx, tx) = (number(words, "RX")?, number(words, "TX")?);
            network::set_rings(nic(words), rx, tx)
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
        "up" => network::come_up(nic(words)),
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
        "button" => button::wait(Duration::from_secs(number(words, "SECONDS")?)),
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
    // A NIC's name may follow where the number is omitted.
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
    if words.clone().next() == Some(TO) {
        return DEFAULT_NIC;
    }
    words.next().unwrap_or(DEFAULT_NIC)
}

/// `to MAC`, or nothing.
fn peer(words: &mut SplitWhitespace<'_>) -> Result<Option<Address>> {
    match words.next() {
        None => Ok(None),
        Some(TO) => network::parse_address(word(words, "MAC")?).map(Some),
        Some(other) => Err(Error::Usage(format!(
            "{other:?} where only `to MAC` may be"
        ))),
    }
}

/// `KEYWORD NUMBER`, or nothing.
fn after<T: FromStr>(
    words: &mut SplitWhitespace<'_>,
    keyword: &str,
    name: &str,
) -> Result<Option<T>> {
    match words.next() {
        None => Ok(None),
        Some(word) if word == keyword => number(words, name).map(Some),
        Some(other) => Err(Error::Usage(format!(
            "{other:?} where only `{keyword} {name}` may be"
        ))),
    }
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
            "pace 1 64",
            "notify-read",
            "rng",
            "frames 1 64 1 eth0 02:00:5e:00:53:01",
            "frames 1 64 1 to",
            "frames 1 64 1 to nowhere",
            "flood 1 64 eth0 to 02:00:5e:00:53:01 until",
            "flood 1 64 eth0 to 02:00:5e:00:53:01 for 3",
            "flood 1 64 eth0 to 02:00:5e:00:53:01 until 3 at",
            "flood 1 64 eth0 to 02:00:5e:00:53:01 until 3 at 0",
            "flood 1 64 eth0 to 02:00:5e:00:53:01 until 3 per 9",
            "echo 1",
            "channels",
            "rings 64",
            "paced-on",
            "paced-on 0",
            "paced-off",
            "paced-gaps 1",
            "frames 1 64 1 vfio",
            "vfio-off",
            "vfio-on 0",
            "vfio-on 48",
            "vfio-fill 1",
            "vfio-remap 1 02:00:5e:00:53:01",
            "vfio-remap 1",
            "vfio-map-bar",
            "flood-on 64 1 vfio",
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

    #[test]
    fn peers_follow_the_nic_or_its_absence() {
        for (line, name) in [
            ("eth1 to 02:00:5e:00:53:01", "eth1"),
            ("to 02:00:5e:00:53:01", DEFAULT_NIC),
        ] {
            let mut words = line.split_whitespace();
            assert_eq!(nic(&mut words), name);
            let expected = Some([2, 0, 0x5e, 0, 0x53, 1]);
            assert_eq!(peer(&mut words).unwrap(), expected);
        }
        assert_eq!(peer(&mut "".split_whitespace()).unwrap(), None);
    }
}
