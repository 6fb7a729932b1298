//! The roles of clients.

use std::fmt;
use std::str::FromStr;

/// A client's rights; each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Read everything.
    Read,
    /// Change the state of VMs: start, pause, stop, reset.
    Operate,
    /// Everything: create and delete VMs, devices and NICs.
    Admin,
}

/// The names of roles.
const WORDS: [(Role, &str); 3] = [
    (Role::Read, "read"),
    (Role::Operate, "operate"),
    (Role::Admin, "admin"),
];

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = WORDS.iter().find(|(role, _)| role == self);
        f.write_str(said.map_or("", |(_, word)| word))
    }
}

/// Not the name of a role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a role: use read, operate or admin")]
pub struct BadRole(String);

impl FromStr for Role {
    type Err = BadRole;

    fn from_str(text: &str) -> Result<Self, BadRole> {
        let meant = WORDS.iter().find(|(_, word)| *word == text);
        meant.map_or_else(|| Err(BadRole(text.to_owned())), |(role, _)| Ok(*role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_include_the_ones_before() {
        assert!(Role::Read < Role::Operate && Role::Operate < Role::Admin);
        for role in [Role::Read, Role::Operate, Role::Admin] {
            assert_eq!(role.to_string().parse::<Role>().unwrap(), role);
        }
        for bad in ["", "Admin", "root", "read "] {
            assert!(bad.parse::<Role>().is_err(), "{bad:?}");
        }
    }
}
