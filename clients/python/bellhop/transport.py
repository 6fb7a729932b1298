"""How requests travel: HTTP over a Unix socket, or over TLS."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from typing import Any, Iterator, Mapping, Sequence
from urllib.parse import quote, urlencode, urlsplit

SOCKET = "/run/bellhop/node.socket"
# The largest body of a response, in bytes.
BODY_MAX = 16 << 20
# The longest line of a stream, in bytes.
LINE_MAX = 1 << 20


class Problem(Exception):
    """The daemon refuses a request (RFC 9457). `body` is an `ErrorBody` if the daemon sent one."""

    def __init__(self, status: int, body: Mapping[str, Any]):
        self.status = status
        self.body = body
        self.code: str = str(body.get("code", ""))
        self.detail: str = str(body.get("detail", ""))
        causes = [str(cause) for cause in body.get("causes", [])]
        super().__init__(": ".join([f"{status} {self.code}: {self.detail}", *causes]))


class Lost(Exception):
    """The daemon no longer keeps all events: read the objects of interest again.

    `watch_events(since=lost.generation)` continues with the next event.
    """

    def __init__(self, generation: int):
        self.generation = generation
        super().__init__(f"events up to {generation} may be lost")


class Transport:
    """A daemon's address, and what a daemon on another host needs.

    Each request has a connection of its own, so threads may share an object. `timeout` limits each
    wait for the daemon, in seconds. A change may take minutes.
    """

    def __init__(
        self,
        address: str = SOCKET,
        *,
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        token: str | None = None,
        timeout: float = 600,
    ):
        self._address = address
        self._timeout = timeout
        self._headers = {"Accept": "*/*"}
        self._tls: ssl.SSLContext | None = None
        if address.startswith("https://"):
            self._tls = ssl.create_default_context(cafile=ca)
            if certificate is not None:
                self._tls.load_cert_chain(certificate, key)
            if token is not None:
                self._headers["Authorization"] = f"Bearer {token}"
        elif "://" in address:
            raise ValueError(f"{address}: give the path of a socket, or https://HOST:PORT")

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            url = urlsplit(self._address)
            return http.client.HTTPSConnection(
                url.hostname or "", url.port or 8443, timeout=self._timeout, context=self._tls
            )
        connection = http.client.HTTPConnection("bellhop", timeout=self._timeout)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(self._timeout)
        connection.sock.connect(self._address)
        return connection

    def _open(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        segments: Sequence[object],
        query: Mapping[str, object],
        headers: Mapping[str, object],
        body: Any,
        media_type: str,
    ) -> http.client.HTTPResponse:
        """Sends a request, and returns the head of a response that is no refusal."""
        path = "".join("/" + quote(str(segment), safe="") for segment in segments)
        given = {name: _text(value) for name, value in query.items() if value is not None}
        if given:
            path += "?" + urlencode(given)
        head = {name: _text(value) for name, value in headers.items() if value is not None}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            head["Content-Type"] = media_type
        connection.request(method, path, data, {**self._headers, **head})
        response = connection.getresponse()
        if response.status < 300:
            return response
        content = _read(response)
        try:
            problem = json.loads(content)
        except ValueError:
            problem = None
        if not isinstance(problem, dict):
            problem = {"detail": content[:200].decode(errors="replace")}
        raise Problem(response.status, problem)

    def _call(
        self,
        method: str,
        segments: Sequence[object],
        *,
        query: Mapping[str, object] = {},
        headers: Mapping[str, object] = {},
        body: Any = None,
        media_type: str = "application/json",
    ) -> Any:
        """The body of the response: JSON as its value, text as a string, nothing as `None`."""
        connection = self._connect()
        try:
            response = self._open(connection, method, segments, query, headers, body, media_type)
            content = _read(response)
            if response.headers["Content-Type"] is None:
                return None
            if response.headers.get_content_type() == "application/json":
                return json.loads(content)
            return content.decode()
        finally:
            connection.close()

    def _stream(
        self,
        method: str,
        segments: Sequence[object],
        *,
        query: Mapping[str, object] = {},
        headers: Mapping[str, object] = {},
    ) -> Iterator[Any]:
        """The `data` of each message of a stream (Server-Sent Events), until the stream ends."""
        connection = self._connect()
        try:
            response = self._open(connection, method, segments, query, headers, None, "")
            event, data = "", ""
            while line := response.readline(LINE_MAX):
                if not line.endswith(b"\n"):
                    # The line is too long, or the connection broke within it.
                    raise http.client.IncompleteRead(line)
                text = line.decode().rstrip("\r\n")
                name, _, value = text.partition(":")
                if not text:
                    if event == "lost":
                        raise Lost(json.loads(data)["generation"])
                    if data:
                        yield json.loads(data)
                    event, data = "", ""
                elif name == "event":
                    event = value.lstrip(" ")
                elif name == "data":
                    data += value
        finally:
            connection.close()


def _text(value: object) -> str:
    """A value in a query or a header."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(response: http.client.HTTPResponse) -> bytes:
    content = response.read(BODY_MAX + 1)
    if len(content) > BODY_MAX:
        raise http.client.IncompleteRead(content[:0])
    return content
