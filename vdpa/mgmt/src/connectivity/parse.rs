//! Parses and prints a connectivity: `bridge=br0,vlan=100,mtu=9000`.

use std::fmt;
use std::str::FromStr;

use super::Connectivity;
use crate::error::{Error, ErrorKind};
use crate::link::is_interface_name;

/// The smallest MTU of Ethernet interfaces (ETH_MIN_MTU), in bytes.
const MTU_MIN: u32 = 68;

/// The largest (ETH_MAX_MTU), in bytes.
const MTU_MAX: u32 = 65_535;

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadName, message)
}

impl FromStr for Connectivity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut read = Self::default();
        for word in text.split(',') {
            let unknown = || {
                bad(format!(
                    "cannot parse {word:?}: write `bridge=NAME,vlan=N,mtu=BYTES`, or a part of that"
                ))
            };
            let (key, value) = word.split_once('=').ok_or_else(unknown)?;
            match key {
                "bridge" if is_interface_name(value) => {
                    once("bridge", &mut read.bridge, value.to_owned())?;
                }
                "bridge" => {
                    return Err(bad(format!(
                        "{value:?} does not name a bridge: names have 1 to 15 bytes, without \
                         slashes, colons, commas and spaces"
                    )));
                }
                "vlan" => once("vlan", &mut read.vlan, value.parse()?)?,
                "mtu" => {
                    let mtu = value
                        .parse()
                        .ok()
                        .filter(|mtu| (MTU_MIN..=MTU_MAX).contains(mtu));
                    let mtu = mtu.ok_or_else(|| {
                        bad(format!(
                            "{value:?} is not an MTU: use {MTU_MIN} to {MTU_MAX} bytes"
                        ))
                    })?;
                    once("mtu", &mut read.mtu, mtu)?;
                }
                _ => return Err(unknown()),
            }
        }
        Ok(read)
    }
}

fn once<T>(key: &'static str, place: &mut Option<T>, value: T) -> Result<(), Error> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(bad(format!("{key} is given twice"))),
    }
}

impl fmt::Display for Connectivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            self.bridge
                .as_ref()
                .map(|bridge| format!("bridge={bridge}")),
            self.vlan.map(|vlan| format!("vlan={vlan}")),
            self.mtu.map(|mtu| format!("mtu={mtu}")),
        ];
        let words: Vec<String> = words.into_iter().flatten().collect();
        f.write_str(&words.join(","))
    }
}
