"""Hooks of schemathesis for the node's API (tests/schemathesis.toml)."""

import re

import schemathesis

# The tester's codes for "a request that the schema allows is refused" and "a deleted resource is
# still available".
REFUSED = "ST202"
STILL_THERE = "ST301"
# The longest wait that a request asks for, in seconds.
WAIT = 2


@schemathesis.hook
def before_call(context, case, kwargs):
    """Shorten waits, which otherwise take most of the time, and keep snapshots out of /dev."""
    for name in ("timeout_s", "wait"):
        value = str((case.query or {}).get(name))
        # Longer ones are refused.
        if value.isdecimal() and WAIT < int(value) <= 60:
            case.query = {**case.query, name: WAIT}
    body = case.body
    if (
        case.operation.definition.raw.get("operationId") == "put_vm_state"
        and isinstance(body, dict)
        and body.get("state") == "Stopped"
        and body.get("mode") in (None, "graceful")
    ):
        # 60 s without it, and the guest need not listen to its power button.
        seconds = body.get("grace_period_s")
        if seconds is None or (type(seconds) is int and WAIT < seconds <= 86400):
            case.body = {**body, "grace_period_s": WAIT}


    path = body.get("path") if isinstance(body, dict) else None
    if case.operation.definition.raw.get("operationId") == "create_vm_snapshot" and (
        isinstance(path, str) and path.startswith("/dev/")
    ):
        # An admin may write anywhere. A directory with the path of a deleted device keeps the
        # kernel from creating the next device there.
        case.body = {**body, "path": "/tmp" + path}


# Requests to delete that were accepted, not done.
accepted = set()


@schemathesis.hook
def after_call(context, case, response):
    """Remember what is deleted later: the guest is asked to release it first."""
    if case.method == "DELETE" and response.status_code == 202:
        accepted.add(case.id)


@schemathesis.hook
def filter_failure(context, failure, case, response):
    """Drop objects that are still there after 202, and refusals of what the schema forbids.

    The tester sends empty headers, and names of other kinds of objects from its links. It takes
    these requests for valid, although the value does not match the parameter's own pattern.
    """
    if failure.code == STILL_THERE:
        return failure.deleted_case_id not in accepted
    if failure.code != REFUSED or response.status_code != 400:
        return True
    values = {"path": case.path_parameters or {}, "header": case.headers or {}}
    for parameter in case.operation.iter_parameters():
        schema = parameter.definition.get("schema", {})
        value = values.get(parameter.definition["in"], {}).get(parameter.name)
        if value is not None and "pattern" in schema:
            if not re.fullmatch(schema["pattern"], str(value)):
                return False
    return True
