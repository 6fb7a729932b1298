"""Calls every operation of a daemon: every_operation.py SOCKET BODY

BODY is the JSON of a VM that can run here. Each answer must be described: a success, or a problem
with a documented status and code. Prints each call, and fails if an operation was not called.
"""

import inspect
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bellhop import Node, Problem  # noqa: E402
from bellhop.operations import Operations  # noqa: E402

VM = "python"
# What a read operation gets, by the name of its parameter.
THERE = {"name": VM, "id": "net0", "log": "vmm", "timeout_s": 0, "since": 0, "follow": False}
THERE |= {"address": "0000:00:00.0", "bus": "pci", "device": "0000:00:00.0", "index": 0}


class Caller:
    def __init__(self, node: Node):
        self.node = node
        self.description = node.get_openapi()
        self.operations = {
            operation["operationId"]: (method, operation)
            for item in self.description["paths"].values()
            for method, operation in item.items()
        }
        self.codes = self.description["components"]["schemas"]["ErrorCode"]["enum"]
        self.called = {"get_openapi"}

    def __call__(self, name: str, /, *arguments, **options):
        """The answer; none for a problem."""
        self.called.add(name)
        try:
            answer = getattr(self.node, name)(*arguments, **options)
            if inspect.isgenerator(answer):
                answer = list(answer)
        except Problem as problem:
            print(f"{name}: {problem}")
            assert str(problem.status) in self.operations[name][1]["responses"], name
            assert problem.code in self.codes, name
            return None
        print(f"{name}: {str(answer)[:120]}")
        return answer

    def harmlessly(self, name: str):
        """A read of the VM and its host, or a change of an object that does not exist."""
        method, _ = self.operations[name]
        arguments = {}
        for parameter in inspect.signature(getattr(self.node, name)).parameters.values():
            if parameter.name == "body":
                arguments["body"] = {}
            elif method == "get" and parameter.name in THERE:
                arguments[parameter.name] = THERE[parameter.name]
            elif parameter.default is inspect.Parameter.empty:
                arguments[parameter.name] = 0 if "int" in str(parameter.annotation) else "none"
        return self(name, **arguments)


def main(socket: str, body: dict) -> None:
    call = Caller(Node(socket))
    assert call("get_version")["api"] >= 1
    assert call("put_vm", VM, body, if_none_match="*") is not None
    assert call("put_vm", VM, body, if_none_match="*") is None, "it exists"
    assert [vm["name"] for vm in call("list_vms")["items"]] == [VM]
    # All reads, while it runs; then all changes, of objects that do not exist.
    for method in ["get", "put", "patch", "post", "delete"]:
        for name in call.operations:
            if call.operations[name][0] == method and name not in call.called:
                call.harmlessly(name)
    events = call("watch_events", vm=VM, since=0, follow=False)
    assert "created" in [event["change"] for event in events], events
    stopped = call("put_vm_state", VM, {"state": "Stopped", "mode": "hard"})
    assert stopped["status"]["phase"] == "Stopped", stopped
    call("delete_vm", VM)
    assert call("get_vm", VM) is None
    methods = {name for name in vars(Operations) if not name.startswith("_")}
    assert methods == set(call.operations), methods ^ set(call.operations)
    assert call.called == methods, methods - call.called
    print("operations:", *sorted(call.called))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
