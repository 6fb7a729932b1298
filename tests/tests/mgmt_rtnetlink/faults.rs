//! Why Bellhop sends its requests itself: the faults of rtnetlink 0.24 and netlink-proto 0.14. A
//! test that fails here is good news: docs/design/decisions.md has the decision to revise.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use lab::process::output;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::sys::AsyncSocket as _;
use rtnetlink::{Error, Handle, LinkUnspec, new_connection};
use vdpa_mgmt::ErrorKind;

use super::namespace::Netns;
use super::oracle::{self, in_namespace, rtnetlink};

/// Longer than any answer of an idle kernel.
const LONG: Duration = Duration::from_secs(5);

#[test]
fn a_request_that_was_never_sent_succeeds() {
    let netns = Netns::new("unsent");
    netns.ip("link add d0 type dummy");
    let before = netns.state();
    let index = netns.links().link("d0").unwrap().index;
    let result = in_namespace(&netns.open(), async || {
        let (connection, handle, _) = new_connection().unwrap();
        let message = LinkUnspec::new_with_index(index).mtu(1400).build();
        let request = handle.link().set(message).execute();
        // The connection ends while the request is in its queue, as after an error of its socket.
        let (result, ()) = tokio::join!(request, async { drop(connection) });
        result
    });
    assert_eq!(result, Ok(()));
    assert_eq!(netns.state(), before);
}

#[test]
fn a_name_that_is_not_utf_8_hides_a_link_and_hangs_a_query() {
    let netns = Netns::new("odd");
    let words = format!(
        "ip -n {} link set lo name $(printf 'l\\377o')",
        netns.name()
    );
    output(std::process::Command::new("sh").args(["-c", &words])).unwrap();
    netns.ip("link add d0 type dummy");

    // Bellhop lists it, shows it and sets it up.
    let links = netns.links();
    let found = links.links().unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].index, found[0].name.as_str()), (1, "l\u{fffd}o"));
    links.set_up(&found[0]).unwrap();
    assert!(links.link_at(1).unwrap().up);

    // rtnetlink lists the other one, without an error.
    let namespace = netns.open();
    let indexes: Vec<u32> = oracle::links(&namespace, |it| it)
        .iter()
        .map(|link| link.header.index)
        .collect();
    assert_eq!(indexes, [found[1].index]);
    // Its query for this one never ends.
    let answer = rtnetlink(&namespace, async |handle: Handle| {
        let query = handle.link().get().match_index(1).execute();
        let answer = query.try_collect::<Vec<LinkMessage>>();
        Ok(tokio::time::timeout(LONG, answer).await.is_ok())
    });
    assert_eq!(answer, Ok(false));
}

#[test]
fn the_kernels_explanation_is_not_requested_and_not_decoded() {
    let netns = Netns::new("words");
    netns.ip("link add d0 type veth peer name d1");
    let link = netns.links().link("d0").unwrap();
    let explanation = "mtu greater than device maximum";
    let refused = |explained| {
        let result = in_namespace(&netns.open(), async || {
            let (mut connection, handle, _) = new_connection().unwrap();
            let socket = connection.socket_mut().socket_mut();
            socket.set_ext_ack(explained).unwrap();
            tokio::spawn(connection);
            let message = LinkUnspec::new_with_index(link.index).mtu(70_000).build();
            handle.link().set(message).execute().await
        });
        let Err(Error::NetlinkError(error)) = result else {
            panic!("{result:?}");
        };
        assert!(!error.to_string().contains(explanation), "{error}");
        // The repeated request, and attributes that no type of the crates describes.
        String::from_utf8_lossy(&error.header).contains(explanation)
    };
    assert!(!refused(false));
    assert!(refused(true));
    let error = netns.links().set_mtu(&link, 70_000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let words = error.refusal().unwrap().explanation().unwrap();
    assert_eq!(words, explanation);
}
