//! Places for clients, by role.
//!
//! Owns the share of each role: clients of a low role leave places for those above it.
//!
//! ```text
//!   role      │ takes one of
//!   ──────────┼───────────────────────────────
//!   read      │ half of the places
//!   operate   │ three quarters, `read` included
//!   admin     │ all places
//! ```

use std::sync::Arc;

use bellhop_api::node::Role;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A number of places. A clone has the same places.
#[derive(Debug, Clone)]
pub struct Budget([Arc<Semaphore>; 3]);

/// A place, until it is dropped.
#[derive(Debug)]
#[must_use = "a drop gives the place back"]
pub struct BudgetPlace {
    _permits: Vec<OwnedSemaphorePermit>,
}

impl Budget {
    /// A budget with so many places for the role admin.
    #[must_use]
    pub fn new(places: usize) -> Self {
        let quarter = places / 4;
        let shares = [places / 2, places.saturating_sub(quarter), places];
        Self(shares.map(|share| Arc::new(Semaphore::new(share))))
    }

    /// The limits that a client of this role counts towards, the lowest role's first.
    fn limits(&self, role: Role) -> impl Iterator<Item = Arc<Semaphore>> {
        let lowest = match role {
            Role::Read => 0,
            Role::Operate => 1,
            Role::Admin => 2,
        };
        self.0.iter().skip(lowest).cloned()
    }

    /// A place for a client of this role, unless all of its places are taken.
    #[must_use]
    pub fn try_take(&self, role: Role) -> Option<BudgetPlace> {
        let permits = self
            .limits(role)
            .map(|limit| limit.try_acquire_owned().ok());
        let _permits = permits.collect::<Option<_>>()?;
        Some(BudgetPlace { _permits })
    }

    /// A place for a client of this role, once there is one. Cancel-safe.
    pub async fn take(&self, role: Role) -> BudgetPlace {
        let mut permits = Vec::new();
        // All clients take them in this order, so none waits for another in a circle.
        for limit in self.limits(role) {
            // An error would mean that the semaphore is closed, which never happens.
            permits.extend(limit.acquire_owned().await);
        }
        BudgetPlace { _permits: permits }
    }

    /// How many places clients of the role admin can take.
    #[must_use]
    pub fn free(&self) -> usize {
        let [.., all] = &self.0;
        all.available_permits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes all places of a role.
    fn fill(budget: &Budget, role: Role) -> Vec<BudgetPlace> {
        std::iter::from_fn(|| budget.try_take(role)).collect()
    }

    #[test]
    fn each_role_leaves_places_for_those_above() {
        let budget = Budget::new(32);
        let readers = fill(&budget, Role::Read);
        let operators = fill(&budget, Role::Operate);
        let admins = fill(&budget, Role::Admin);
        assert_eq!((readers.len(), operators.len(), admins.len()), (16, 8, 8));
        drop(readers);
        assert_eq!(fill(&budget, Role::Admin).len(), 16);
        drop((operators, admins));
        assert_eq!(fill(&budget, Role::Admin).len(), 32);
        assert!(budget.try_take(Role::Read).is_some());
    }

    #[test]
    fn a_refused_client_takes_no_place() {
        let budget = Budget::new(4);
        let admins = fill(&budget, Role::Admin);
        for _ in 0..9 {
            assert!(budget.try_take(Role::Read).is_none());
        }
        drop(admins);
        assert_eq!(fill(&budget, Role::Read).len(), 2);
        assert_eq!(budget.free(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_wait_delay_no_admin() {
        let budget = Budget::new(4);
        let mut places = fill(&budget, Role::Read);
        let waiting: Vec<_> = (0..9)
            .map(|_| {
                let budget = budget.clone();
                tokio::spawn(async move { budget.take(Role::Read).await })
            })
            .collect();
        tokio::task::yield_now().await;
        let admins = [
            budget.take(Role::Admin).await,
            budget.take(Role::Admin).await,
        ];
        assert!(waiting.iter().all(|one| !one.is_finished()));
        places.pop();
        let first = waiting.into_iter().next().unwrap();
        drop((first.await.unwrap(), admins));
    }
}
