//! `/v1/cordon`: whether the node takes new VMs.

use axum::extract::State;
use axum::http::StatusCode;
use vmm::http::{ErrorBody, on_worker};

use super::state::Api;
use crate::error::Error;

/// Take no new virtual machines
///
/// From now on the creation of virtual machines and their arrival from other nodes are refused (409
/// `cordoned`), also after a restart of the daemon. Existing ones are not affected. The response
/// waits for creations in progress. `GET /v1/version` shows it.
#[utoipa::path(put, path = "/v1/cordon", operation_id = "put_cordon", responses(
    (status = 204, description = "The node takes no new virtual machines"),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
))]
pub(super) async fn put(State(node): Api) -> Result<StatusCode, Error> {
    on_worker(move || node.machines.cordon()).await??;
    Ok(StatusCode::NO_CONTENT)
}

/// Take new virtual machines again
///
/// Changes nothing if the node takes them already.
#[utoipa::path(delete, path = "/v1/cordon", operation_id = "delete_cordon", responses(
    (status = 204, description = "The node takes new virtual machines"),
    (status = 500, description = "Internal error: the host failed", body = ErrorBody),
))]
pub(super) async fn remove(State(node): Api) -> Result<StatusCode, Error> {
    on_worker(move || node.machines.uncordon()).await??;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::version;
    use super::*;
    use crate::context::Node;
    use crate::machines::condition::Condition;
    use crate::machines::spec::VmName;

    async fn create(node: &Node, name: &str, memory: &str) -> Result<(), &'static str> {
        let spec = json!({ "kernel": "/nonexistent", "state": "Stopped", "memory": memory });
        let spec = serde_json::from_value(spec).unwrap();
        let vm: VmName = name.parse().unwrap();
        let put = node.machines.put(&vm, Condition::None, spec, None).await;
        put.map(drop).map_err(|error| error.answer().1)
    }

    #[tokio::test]
    async fn a_creation_that_races_ends_before_the_cordon_or_is_refused() {
        let name = format!("node-cordon-race-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let node = Node::below(&directory);
        let mut creations = tokio::task::JoinSet::new();
        for number in 0..16 {
            let node = node.clone();
            creations.spawn(async move {
                let name = format!("vm{number}");
                let created = create(&node, &name, "32M").await;
                (name, created)
            });
            tokio::task::yield_now().await;
        }
        put(State(node.clone())).await.unwrap();
        let names = |node: &Node| -> Vec<String> {
            let list = node.machines.list().into_iter();
            list.map(|(name, _)| name.to_string()).collect()
        };
        let before = names(&node);
        for (name, created) in creations.join_all().await {
            assert!(matches!(created, Ok(()) | Err("cordoned")), "{created:?}");
            assert_eq!(
                before.contains(&name),
                created.is_ok(),
                "{name}: {before:?}"
            );
        }
        assert_eq!(names(&node), before);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn a_cordoned_node_takes_no_new_vm_until_it_is_uncordoned() {
        let name = format!("node-cordon-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        {
            let node = Node::below(&directory);
            create(&node, "old", "32M").await.unwrap();
            for _ in 0..2 {
                put(State(node.clone())).await.unwrap();
            }
        }
        // Another daemon.
        let node = Node::below(&directory);
        assert!(version::show(State(node.clone())).await.0.cordoned);
        assert_eq!(create(&node, "new", "32M").await, Err("cordoned"));
        // The same again, and a replacement whose kernel does not exist.
        create(&node, "old", "32M").await.unwrap();
        assert_eq!(create(&node, "old", "64M").await, Err("unusable"));
        for _ in 0..2 {
            remove(State(node.clone())).await.unwrap();
        }
        assert!(!version::show(State(node.clone())).await.0.cordoned);
        create(&node, "new", "32M").await.unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
