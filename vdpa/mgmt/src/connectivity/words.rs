//! A connectivity in words: `bridge=br0,vlan=100,mtu=9000`.

use std::fmt;
use std::str::FromStr;

use super::Connectivity;
use crate::link::{BadVlan, is_interface_name};

/// The smallest MTU of Ethernet interfaces (ETH_MIN_MTU), in bytes.
const MTU_MIN: u32 = 68;

/// The largest (ETH_MAX_MTU), in bytes.
const MTU_MAX: u32 = 65_535;

/// Words that are no connectivity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadConnectivity {
    /// Something that is no `KEY=VALUE` with a known key.
    #[error("{0:?} is not understood: write `bridge=NAME,vlan=N,mtu=BYTES`, or a part of that")]
    Word(String),
    /// A key twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// A name that no interface has.
    #[error(
        "{0:?} does not name a bridge: names have 1 to 15 bytes, without slashes, colons, commas and spaces"
    )]
    Bridge(String),
    /// A number that is no VLAN.
    #[error(transparent)]
    Vlan(#[from] BadVlan),
    /// A number that is no MTU.
    #[error("{0:?} is no MTU: they are {MTU_MIN} to {MTU_MAX} bytes")]
    Mtu(String),
}

impl FromStr for Connectivity {
    type Err = BadConnectivity;

    fn from_str(text: &str) -> Result<Self, BadConnectivity> {
        let mut read = Self::default();
        for word in text.split(',') {
            let unknown = || BadConnectivity::Word(word.to_owned());
            let (key, value) = word.split_once('=').ok_or_else(unknown)?;
            match key {
                "bridge" if is_interface_name(value) => {
                    once("bridge", &mut read.bridge, value.to_owned())?;
                }
                "bridge" => return Err(BadConnectivity::Bridge(value.to_owned())),
                "vlan" => once("vlan", &mut read.vlan, value.parse()?)?,
                "mtu" => {
                    let mtu = value
                        .parse()
                        .ok()
                        .filter(|mtu| (MTU_MIN..=MTU_MAX).contains(mtu));
                    let mtu = mtu.ok_or_else(|| BadConnectivity::Mtu(value.to_owned()))?;
                    once("mtu", &mut read.mtu, mtu)?;
                }
                _ => return Err(unknown()),
            }
        }
        Ok(read)
    }
}

fn once<T>(key: &'static str, place: &mut Option<T>, value: T) -> Result<(), BadConnectivity> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(BadConnectivity::Twice(key)),
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
