//! The oracle's connection, in a network namespace.

use std::os::fd::AsFd as _;

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::{Error, Handle, LinkGetRequest};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::runtime::Builder;
use vdpa_mgmt::link::Namespace;

/// Runs a future on a thread in the namespace.
pub(crate) fn in_namespace<T: Send>(
    namespace: &Namespace,
    work: impl AsyncFnOnce() -> T + Send,
) -> T {
    let run = || {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(namespace.as_fd(), kind).unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work())
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// Requests of rtnetlink in the namespace.
pub(crate) fn rtnetlink<T: Send>(
    namespace: &Namespace,
    requests: impl AsyncFnOnce(Handle) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    in_namespace(namespace, async || {
        let (connection, handle, _) = rtnetlink::new_connection().unwrap();
        tokio::spawn(connection);
        requests(handle).await
    })
}

/// The links that rtnetlink reads.
pub(crate) fn links(
    namespace: &Namespace,
    request: impl FnOnce(LinkGetRequest) -> LinkGetRequest + Send,
) -> Vec<LinkMessage> {
    let all = rtnetlink(namespace, async |handle: Handle| {
        request(handle.link().get()).execute().try_collect().await
    });
    all.unwrap()
}
