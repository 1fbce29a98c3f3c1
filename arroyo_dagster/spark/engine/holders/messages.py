"""What the driver, tasks and holders tell each other."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import pickle
import secrets
import socket
import struct
import threading
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from arroyo_dagster.errors import ArroyoStateError

SILENCE_SECONDS = 300.0
"""User code that blocks all threads of its process for longer, in one call into C, is ended."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What tasks of a run need to meet holders.

    Attributes:
        driver_host: for the address of a holder to tasks on other hosts; None = it gets none, and
            tasks reach the holders of their own host.
        idle_seconds: how long a holder waits for the next epoch.
        silence_seconds: a holder that does not say for this long that it is alive hangs.
        start: whether a task starts the holder of its worker even if it does not need it.
    """

    secret: Secret
    driver_host: str | None
    idle_seconds: float
    start: bool
    silence_seconds: float = SILENCE_SECONDS


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a task had its subtask run.

    Attributes:
        holder: the process that holds the subtask now; None = none does.
        own: the holder of the worker that ran the task; None = it has none.
        lost: the holder that the subtask was placed at, if it is gone.
        blocked: whether `lost` may run, behind a network that drops packets.
    """

    level: int
    subtask: int
    holder: HolderAddress | None
    own: HolderAddress | None
    lost: HolderAddress | None = None
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The request of one task: an epoch of one subtask. Its rows follow as a `ChunkStream`.

    Attributes:
        level_work: a pickled `LevelWork`, which the task passes on as the driver made it.
        idle_seconds: how long the process waits for the next request before it ends.
    """

    level_work: bytes
    subtask: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An error of user code. Its class may not be known to the task, and cannot be sent.

    Attributes:
        error: an error of this package as it is; None for others.
        text: the traceback.
    """

    module: str
    name: str
    message: str
    text: str
    error: ArroyoStateError | None = None

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Describe an error that was raised here."""
        kind = type(error)
        typed = error if isinstance(error, ArroyoStateError) else None
        text = "".join(traceback.format_exception(error))
        return cls(kind.__module__, kind.__qualname__, str(error), text, typed)

    def as_error(self) -> BaseException:
        """Return an error that reads as the one that was raised there."""
        if self.error is not None:
            return self.error
        name = self.name.rpartition(".")[2]
        kind: type[Exception] = type(
            name, (Exception,), {"__module__": self.module, "__qualname__": self.name}
        )
        return kind(self.message)

    def dumps(self) -> bytes:
        """Pickle it, without the error if that cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception:
            return pickle.dumps(replace(self, error=None))


class RemoteTraceback(Exception):
    """The traceback of a holder, as the cause of the error that a task raises for it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# ---- how a task talks with the process that holds a subtask: addresses, handshake, frames --------
# Within a host the two meet at an abstract Unix socket, which has no file and needs no port. Across
# hosts they use TCP. Either side proves that it knows the secret before anything is unpickled.

_HEADER = struct.Struct(">cQ")
_NONCE_BYTES = _PROOF_BYTES = 32
_MAX_HANDSHAKE_BYTES = 1 << 12
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 5.0
_LOSS_SECONDS = 60
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: only the route to it counts

WORK, ROWS, CHUNKS, DONE, ERROR, ALIVE, STEP = b"W", b"I", b"C", b"D", b"E", b"A", b"S"
_HELLO, _PROOF = b"H", b"P"


@dataclass(frozen=True, slots=True)
class Secret:
    """What driver, tasks and holders of one driver process share; never shown."""

    value: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """Return a random secret."""
        return cls(secrets.token_bytes(32))

    def token(self, text: str) -> str:
        """Return a name that only those who know the secret can derive."""
        return hmac.digest(self.value, f"name:{text}".encode(), "sha256").hex()[:32]

    def proof(self, side: bytes, *parts: bytes) -> bytes:
        """Return the answer of one side of a handshake."""
        return hmac.digest(self.value, b"\0".join((side, *parts)), "sha256")


@dataclass(frozen=True, slots=True)
class HolderAddress:
    """Where a holder listens.

    Attributes:
        holder: the id of the process; a process started in its place has another.
        name: of its Unix socket.
        host, port: for tasks on other hosts; None = it has no port.
    """

    holder: str
    name: str
    host: str | None = None
    port: int | None = None

    def about(self, process: int) -> bytes:
        """Return what the holder with this address and process number says about itself."""
        return json.dumps({"process": process, "address": asdict(self)}).encode()

    @classmethod
    def read(cls, about: bytes) -> tuple[HolderAddress, int]:
        """Read the address and the process number from what a holder says about itself."""
        document = json.loads(about)
        return cls(**document["address"]), int(document["process"])


class Channel:
    """One connection of a task with a holder. Sends from several threads do not mix."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The other side reads its end."""
        self._reader.close()
        self.connection.close()

    def send(self, kind: bytes, payload: bytes | memoryview = b"") -> None:
        """Send one frame.

        Raises:
            OSError: the other side is gone.
        """
        with self._sending:
            self.connection.sendall(_HEADER.pack(kind, len(payload)))
            if len(payload):
                self.connection.sendall(payload)

    def receive(self, limit: int | None = None) -> tuple[bytes, bytearray]:
        """Return the next frame.

        Args:
            limit: the maximum size in bytes; None = any.

        Raises:
            OSError: the other side is gone, or said nothing for the timeout of the connection.
        """
        kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        if limit is not None and size > limit:
            raise ConnectionAbortedError(f"a frame of {size} bytes in a handshake")
        return kind, self._exactly(size)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            count = self._reader.readinto(view[filled:])
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            filled += count
        return data


def greet(channel: Channel, secret: Secret) -> bytes:
    """Prove to a holder that this side knows the secret, and have it prove the same.

    Returns:
        What the holder says about itself.

    Raises:
        OSError: it does not know the secret, or does not answer.
    """
    peer_nonce = bytes(channel.receive(_MAX_HANDSHAKE_BYTES)[1])
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(_HELLO, own_nonce + secret.proof(b"task", peer_nonce, own_nonce))
    _, answer = channel.receive(_MAX_HANDSHAKE_BYTES)
    proof, about = answer[:_PROOF_BYTES], bytes(answer[_PROOF_BYTES:])
    if not hmac.compare_digest(proof, secret.proof(b"holder", own_nonce, peer_nonce, about)):
        raise ConnectionAbortedError("the process at the address of a holder is another")
    return about


def welcome(channel: Channel, secret: Secret, about: bytes) -> None:
    """Let a task prove that it knows the secret, prove the same, and send `about`.

    Raises:
        OSError: it does not know the secret, or does not answer.
    """
    channel.connection.settimeout(HANDSHAKE_SECONDS)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(_HELLO, own_nonce)
    _, answer = channel.receive(_MAX_HANDSHAKE_BYTES)
    peer_nonce, proof = bytes(answer[:_NONCE_BYTES]), bytes(answer[_NONCE_BYTES:])
    if not hmac.compare_digest(proof, secret.proof(b"task", own_nonce, peer_nonce)):
        raise ConnectionAbortedError("a peer does not know the secret")
    channel.send(_PROOF, secret.proof(b"holder", peer_nonce, own_nonce, about) + about)


def can_listen() -> bool:
    """Whether this system has what holders need: abstract Unix sockets, a feature of Linux."""
    return hasattr(socket, "AF_UNIX") and os.path.exists("/proc/self/stat")


def listen_here(name: str) -> socket.socket:
    """Listen at the Unix socket of a name.

    Raises:
        OSError: another process listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect_here(name: str) -> socket.socket:
    """Connect to the Unix socket of a name.

    Raises:
        OSError: no process of this host listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def connect(address: HolderAddress, *, across: bool) -> socket.socket:
    """Connect to a holder: on this host, else over TCP.

    Args:
        across: whether to use TCP.

    Raises:
        OSError: the holder is not reachable; TimeoutError: it may run, behind a network that drops
            packets.
    """
    try:
        return connect_here(address.name)
    except OSError:
        if not across or address.host is None or address.port is None:
            raise
    connection = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
    bound_loss(connection)
    return connection


def bound_loss(connection: socket.socket) -> None:
    """Let a TCP connection fail if the other host is gone, which sends nothing when it goes."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOSS_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOSS_SECONDS * 1000)


def own_host(driver_host: str) -> str | None:
    """Return the address by which other hosts reach this one; None = unknown.

    It is the one from which this host reaches the driver or, on the driver's own host, a host
    elsewhere. Connecting a datagram socket sends nothing.
    """
    address = _source_address(driver_host)
    if address is None or not _is_loopback(address) or _is_loopback(driver_host):
        return address
    return _source_address(_ELSEWHERE)


def _source_address(target: str) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
