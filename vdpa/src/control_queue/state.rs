//! The control state that the device acknowledged, for replay.
//!
//! A device forgets most of its control state at a reset, and a device on another host never had
//! it. [`ControlState`] holds one value for each setting, so its size is bounded for any sequence
//! of guest commands.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::command::{Command, HashConfig, Limits, MacAddress, MacTable, RssConfig, RxMode};

/// How received packets are distributed or hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Steering {
    Rss(RssConfig),
    Hash(HashConfig),
}

/// The acknowledged control state. `None` and empty sets are the state after a reset.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ControlState {
    mac: Option<MacAddress>,
    mac_table: Option<MacTable>,
    vq_pairs: Option<u16>,
    steering: Option<Steering>,
    offloads: Option<u64>,
    rx_modes: BTreeMap<RxMode, bool>,
    vlans: BTreeSet<u16>,
}

impl ControlState {
    /// Creates the state after a reset.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Remembers a command that the device answered with VIRTIO_NET_OK.
    pub fn acknowledge(&mut self, command: &Command) {
        match command {
            Command::Rx { mode, on } => {
                self.rx_modes.insert(*mode, *on);
            }
            Command::MacTableSet(table) => self.mac_table = Some(table.clone()),
            Command::MacAddrSet(address) => self.mac = Some(*address),
            Command::VlanAdd(id) => {
                self.vlans.insert(*id);
            }
            Command::VlanDel(id) => {
                self.vlans.remove(id);
            }
            // The VMM answers this itself, so there is nothing to remember.
            Command::AnnounceAck => {}
            Command::VqPairsSet(pairs) => {
                self.vq_pairs = Some(*pairs);
                // Steering is automatic again: a later replay of the RSS configuration would undo
                // this command.
                if matches!(self.steering, Some(Steering::Rss(_))) {
                    self.steering = None;
                }
            }
            Command::RssConfig(config) => self.steering = Some(Steering::Rss(config.clone())),
            Command::HashConfig(config) => self.steering = Some(Steering::Hash(config.clone())),
            Command::GuestOffloadsSet(offloads) => self.offloads = Some(*offloads),
        }
    }

    /// The MAC address that the guest set, if any.
    #[must_use]
    pub fn mac(&self) -> Option<MacAddress> {
        self.mac
    }

    /// The number of queue pairs that the guest set, if any.
    #[must_use]
    pub fn vq_pairs(&self) -> Option<u16> {
        self.vq_pairs
    }

    /// The commands that bring a freshly reset device to this state. Their order is QEMU's: MAC,
    /// MAC table, queue pairs, RSS or hash, offloads, receive modes, VLANs.
    #[must_use]
    pub fn replay(&self) -> Vec<Command> {
        let steering = self.steering.clone().map(|steering| match steering {
            Steering::Rss(config) => Command::RssConfig(config),
            Steering::Hash(config) => Command::HashConfig(config),
        });
        let rx_modes = self
            .rx_modes
            .iter()
            .map(|(&mode, &on)| Command::Rx { mode, on });
        let commands = self.mac.map(Command::MacAddrSet).into_iter();
        commands
            .chain(self.mac_table.clone().map(Command::MacTableSet))
            .chain(self.vq_pairs.map(Command::VqPairsSet))
            .chain(steering)
            .chain(self.offloads.map(Command::GuestOffloadsSet))
            .chain(rx_modes)
            .chain(self.vlans.iter().copied().map(Command::VlanAdd))
            .collect()
    }

    /// Checks a state from a file or another host as if the guest had sent its commands.
    ///
    /// # Errors
    /// The first command that this device could not have acknowledged.
    pub fn validate(&self, limits: &Limits) -> Result<(), crate::Error> {
        for command in self.replay() {
            Command::parse(&command.encode()?, limits)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::command::tests::{command, limits};
    use super::*;

    proptest! {
        /// Replaying into a fresh state gives the same state. So does the saved form, and every
        /// replayed command is valid.
        #[test]
        fn replay_is_complete(commands in prop::collection::vec(command(), 0..40)) {
            let mut state = ControlState::new();
            for command in &commands {
                state.acknowledge(command);
            }
            let mut again = ControlState::new();
            for command in state.replay() {
                again.acknowledge(&command);
            }
            prop_assert_eq!(&again, &state);
            let saved = postcard::to_stdvec(&state).unwrap();
            prop_assert_eq!(&postcard::from_bytes::<ControlState>(&saved).unwrap(), &state);
            state.validate(&limits()).unwrap();
        }
    }

    #[test]
    fn order_of_the_replay() {
        let mut state = ControlState::new();
        let hash = HashConfig {
            hash_types: 1,
            key: vec![],
        };
        let on = |mode| Command::Rx { mode, on: true };
        let commands = [
            Command::MacAddrSet([2; 6]),
            Command::MacTableSet(MacTable::default()),
            Command::VqPairsSet(2),
            Command::HashConfig(hash),
            Command::GuestOffloadsSet(2),
            on(RxMode::Promiscuous),
            on(RxMode::AllMulticast),
            Command::VlanAdd(5),
            Command::VlanAdd(7),
        ];
        for command in commands.iter().rev() {
            state.acknowledge(command);
        }
        assert_eq!(state.replay(), commands);
        assert_eq!((state.mac(), state.vq_pairs()), (Some([2; 6]), Some(2)));
    }

    #[test]
    fn later_commands_replace_earlier_ones() {
        let mut state = ControlState::new();
        state.acknowledge(&Command::VlanAdd(5));
        state.acknowledge(&Command::VlanDel(5));
        state.acknowledge(&Command::AnnounceAck);
        assert_eq!(state, ControlState::new());
        let rss = RssConfig {
            hash_types: 0,
            unclassified_queue: 0,
            indirection_table: vec![0],
            max_tx_vq: 1,
            key: vec![],
        };
        state.acknowledge(&Command::RssConfig(rss));
        state.acknowledge(&Command::VqPairsSet(1));
        assert_eq!(state.replay(), [Command::VqPairsSet(1)]);
    }

    #[test]
    fn a_foreign_state_is_checked() {
        let mut state = ControlState::new();
        state.vlans.insert(4096);
        state.validate(&limits()).unwrap_err();
        let mut state = ControlState::new();
        state.vq_pairs = Some(9);
        state.validate(&limits()).unwrap_err();
        let mut state = ControlState::new();
        state.mac_table = Some(MacTable {
            unicast: vec![[0; 6]; 5000],
            multicast: vec![],
        });
        state.validate(&limits()).unwrap_err();
    }
}
