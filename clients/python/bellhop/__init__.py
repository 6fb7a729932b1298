"""The API of Bellhop's node daemon: virtual machines with vDPA NICs, and the NICs of the host.

    from bellhop import Node, Problem

    node = Node()  # /run/bellhop/node.socket
    for vm in node.list_vms()["items"]:
        print(vm["name"], vm["status"]["phase"])
    try:
        node.delete_vm("web", force=True)
    except Problem as problem:
        print(problem.code, problem.detail)

A daemon on another host needs TLS, a client certificate and a token:

    node = Node("https://node2:8443", ca="ca.crt", certificate="me.crt", key="me.key", token=token)

`records` has the types of requests and responses. They are plain dictionaries. A later version of
the daemon may add members and words: ignore those that you do not know.
"""

from .operations import Operations as Node
from .transport import Lost, Problem

__all__ = ["Lost", "Node", "Problem"]
