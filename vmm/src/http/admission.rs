//! Connections before and after their admission.
//!
//! Owns the limits for connections whose client has no proven role yet: strangers can only take
//! places from each other. It must not know how a role is proven.
//!
//! ```text
//!   accept ──> pending: handshake, first request ── admit(role) ──> admitted: one of 64 places,
//!              at most 256, and 32 of one address                   half of them for `read`
//!                └─ one more comes: the oldest is closed
//! ```

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use bellhop_api::node::Role;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::budget::{Budget, BudgetPlace};

/// Connections that are admitted at a time.
pub(super) const ADMITTED_MAX: usize = 64;
/// Connections that wait for their admission.
pub(super) const PENDING_MAX: usize = 256;
/// Those of them that come from one address.
pub(super) const PER_SOURCE_MAX: usize = 32;
/// The bits of an IPv6 address that distinguish networks. A host may use all addresses of its own.
const NETWORK: u128 = !0 << 64;

/// All connections of a server.
#[derive(Debug)]
pub(super) struct Admissions {
    /// The oldest first.
    pending: Mutex<VecDeque<Arc<Connection>>>,
    places: Budget,
}

#[derive(Debug)]
struct Connection {
    /// None for a client of this host.
    source: Option<IpAddr>,
    /// Notified when a newer connection replaces it.
    replaced: Notify,
    /// Its place, once it is admitted.
    place: Mutex<Option<BudgetPlace>>,
}

impl Admissions {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            pending: Mutex::default(),
            places: Budget::new(ADMITTED_MAX),
        })
    }

    /// Adds a new connection. If there are too many, it replaces the oldest one, or the oldest one
    /// of its address.
    pub(super) fn add(self: &Arc<Self>, source: Option<IpAddr>) -> Admission {
        let source = source.map(network);
        let own = Arc::new(Connection {
            source,
            replaced: Notify::new(),
            place: Mutex::default(),
        });
        let mut pending = self.pending.lock();
        let is_of_source = |one: &Arc<Connection>| source.is_some() && one.source == source;
        let of_source = pending.iter().filter(|one| is_of_source(one)).count();
        let oldest = if of_source >= PER_SOURCE_MAX {
            pending.iter().position(is_of_source)
        } else {
            (pending.len() >= PENDING_MAX).then_some(0)
        };
        if let Some(replaced) = oldest.and_then(|oldest| pending.remove(oldest)) {
            replaced.replaced.notify_one();
        }
        pending.push_back(own.clone());
        drop(pending);
        Admission {
            all: self.clone(),
            own,
        }
    }
}

/// The address, or the network of a host that has many addresses.
fn network(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// Admits the connection of a request, which has it as an extension.
#[derive(Debug, Clone)]
pub struct Admission {
    all: Arc<Admissions>,
    own: Arc<Connection>,
}

impl Admission {
    /// Admits the connection until its end: newer ones no longer replace it. Waits until the role
    /// has a place. Cancel-safe.
    pub async fn admit(&self, role: Role) {
        if self.is_admitted() {
            return;
        }
        let place = self.all.places.take(role).await;
        self.forget();
        *self.own.place.lock() = Some(place);
    }

    fn is_admitted(&self) -> bool {
        self.own.place.lock().is_some()
    }

    /// Waits until a newer connection replaces this one.
    pub(super) async fn replaced(&self) {
        self.own.replaced.notified().await;
    }

    /// The connection has ended.
    pub(super) fn end(&self) {
        self.forget();
        *self.own.place.lock() = None;
    }

    fn forget(&self) {
        let mut pending = self.all.pending.lock();
        pending.retain(|one| !Arc::ptr_eq(one, &self.own));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_one_source() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::2"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn the_oldest_pending_connection_is_replaced() {
        let all = Admissions::new();
        let address = |last: usize| Some(IpAddr::from([192, 0, 2, u8::try_from(last).unwrap()]));
        let first = all.add(address(1));
        for _ in 1..PER_SOURCE_MAX {
            let _ = all.add(address(1));
        }
        let other = all.add(address(2));
        let holds = |one: &Admission| {
            all.pending
                .lock()
                .iter()
                .any(|it| Arc::ptr_eq(it, &one.own))
        };
        assert!(holds(&first));
        let _ = all.add(address(1));
        assert!(!holds(&first) && holds(&other));
        // Clients of this host count towards the total only.
        while all.pending.lock().len() < PENDING_MAX {
            let _ = all.add(None);
        }
        assert!(holds(&other));
        for _ in 1..PER_SOURCE_MAX {
            let _ = all.add(address(3));
        }
        assert!(holds(&other));
        let _ = all.add(address(4));
        assert!(!holds(&other));
        assert_eq!(all.pending.lock().len(), PENDING_MAX);
    }
}
