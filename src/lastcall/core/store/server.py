"""The server of our own store: one thread, one table, as many connections as the machine allows.

It lives in `lastcall run`, outside every training process, so that it survives the death of any rank. A
client that does not send the secret, or breaks the rules of wire.py, loses its own connection and disturbs no
other. A client that waits for a key is parked here and costs nothing until the key is set; there is no
polling.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable

from lastcall.core.store import links, table, wire
from lastcall.core.store.wire import Malformed

log = logging.getLogger("lastcall")
_BACKLOG = 4096  # ranks that connect at the same moment
_AT_ONCE = 64  # connections taken before the others get their turn
# connections that have not shown the secret yet, at most; and no more than an eighth of the open files
_STRANGERS = 512
_CHUNK = 256 * 1024
_INTRODUCTION = 10.0  # seconds in which a new connection has to show the secret
_NO_ROOM = 1.0  # seconds without new connections after the machine had no room for one
_STALE = 1000  # deadlines of requests that were answered, kept until they are in the way
_PATIENCE = 5.0  # seconds for the thread to follow a command


class StoreServer:
    def __init__(self, bind_host: str = "", port: int = 0, *, secret: str) -> None:
        self._bind = (bind_host, port)
        self._secret = secret.encode()
        self._table = table.Table()
        self._waiting: dict[str, set[_Connection]] = {}
        self._connections: set[_Connection] = set()
        # those that have not shown the secret, the oldest first
        self._strangers: dict[_Connection, None] = {}
        self._most_strangers = _strangers_allowed()
        self._deadlines: list[tuple[float, int, _Connection]] = []
        self._count = 0
        self._deaf_until: float | None = None
        self._soft_limit: int | None = None
        self._tasks: list[Callable[[], None]] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on, once it was started."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def start(self) -> None:
        """OSError where the address cannot be had. The thread inherits the signal mask of the caller."""
        self._listener = _listen(*self._bind)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="lastcall-store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Every connection is closed. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        thread.join(_PATIENCE)
        if not thread.is_alive():
            os.close(self._wake)

    def clear(self) -> None:
        """Forget every key and every connection: the remains of a former incarnation are cut off."""
        if self._thread is None:
            return
        done = threading.Event()

        def forget() -> None:
            self._forget()
            done.set()

        self._tasks.append(forget)
        os.eventfd_write(self._wake, 1)
        done.wait(_PATIENCE)

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._pause()):
                    self._handle(key, events)
                self._expire(time.monotonic())
        finally:
            self._forget()
            self._listener.close()
            self._selector.close()

    def _pause(self) -> float | None:
        """Seconds until the next deadline of a connection."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._deaf_until is not None:
            times.append(self._deaf_until)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fd == self._wake:
            os.eventfd_read(self._wake)
            while self._tasks:
                self._tasks.pop(0)()
        elif key.data in self._connections:  # and was not dropped by what came before it in this round
            self._attend(key.data, events)

    def _forget(self) -> None:
        for connection in list(self._connections):
            self._drop(connection, "the store was cleared")
        self._table.clear()
        self._deadlines.clear()
        if self._soft_limit is not None:  # the next incarnation is to inherit what the user had set
            _set_soft_limit(self._soft_limit)
            self._soft_limit = None

    # ---- connections

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                link, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if error.errno == errno.EMFILE and self._more_files():
                        continue
                    # The listener stays readable all the while: looking at it would keep this thread busy for
                    # nothing.
                    log.warning(
                        "Could not accept another connection to the store of this run: %s. Raise the "
                        "limit: ulimit -n",
                        error,
                    )
                    self._selector.unregister(self._listener)
                    self._deaf_until = time.monotonic() + _NO_ROOM
                    return
                continue  # that client has disconnected
            try:
                link.setblocking(False)
                links.tune(link)
                connection = _Connection(link)
                self._selector.register(link, selectors.EVENT_READ, connection)
            except OSError:
                link.close()
                continue
            self._connections.add(connection)
            self._limit(connection, _INTRODUCTION)
            self._strangers[connection] = None
            # ranks show the secret at once: the oldest is none
            if len(self._strangers) > self._most_strangers:
                self._drop(next(iter(self._strangers)), "too many connections without a secret")

    def _more_files(self) -> bool:
        """Raise the limit of open files, once; the processes below have been started with the user's own."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._soft_limit is not None or soft == hard or not _set_soft_limit(hard):
            return False
        self._soft_limit = soft
        return True

    def _drop(self, connection: _Connection, why: str) -> None:
        log.debug("Closing a connection to the store: %s", why)
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        self._unpark(connection)
        self._selector.unregister(connection.link)
        connection.link.close()

    def _attend(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
                if not connection.outgoing:
                    self._selector.modify(connection.link, selectors.EVENT_READ, connection)
            if events & selectors.EVENT_READ:
                data = connection.link.recv(_CHUNK)
                if not data:
                    self._drop(connection, "the client has disconnected")
                    return
                connection.inbox.feed(data)
            self._work(connection)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(connection, str(error))
        except Malformed as error:
            self._drop(connection, f"its client sent {error}")
        except Exception:
            log.exception(
                "Internal error in the store of this run; closing the connection of the request "
                "(please report this)"
            )
            self._drop(connection, "internal error")

    def _work(self, connection: _Connection) -> None:
        """Every request that is whole; none while an answer is under way, so that what a client does not read
        cannot pile up."""
        while not connection.outgoing and connection in self._connections:
            if connection.key is not None:
                if len(connection.inbox):
                    raise Malformed("a request while another one waits")
                return
            request = connection.inbox.take(wire.LARGEST_FRAME if connection.known else wire.LARGEST_HELLO)
            if request is None:
                return
            self._request(connection, *request)

    def _send(self, connection: _Connection, *fields: bytes | None) -> None:
        connection.outgoing = memoryview(wire.frame(wire.ANSWER, *fields))
        try:
            self._flush(connection)
        except BlockingIOError:
            pass
        if connection.outgoing:  # and it is not listened to until it has read
            self._selector.modify(connection.link, selectors.EVENT_WRITE, connection)

    def _flush(self, connection: _Connection) -> None:
        sent = connection.link.send(connection.outgoing)
        connection.outgoing = connection.outgoing[sent:]

    # ---- requests

    def _request(self, connection: _Connection, what: int, fields: list[bytes | None]) -> None:
        whole = [field for field in fields if field is not None]
        if len(whole) != len(fields):
            raise Malformed("a request with a field left out")
        if not connection.known:
            self._introduce(connection, what, whole)
        elif what == wire.MANY:
            self._send(connection, *self._some(whole))
        elif len(whole) != 2:
            raise Malformed(f"request {what} with {len(whole)} fields")
        elif what == wire.SET:
            self._store(_key(whole[0]), whole[1])
        elif what == wire.GET:
            self._get(connection, _key(whole[0]), wire.decode_seconds(whole[1]))
        elif what == wire.CLAIM:
            key = _key(whole[0])
            kept = self._table.claim(key, whole[1])
            self._send(connection, kept)
            self._tell(key, kept)
        elif what == wire.ADD:
            self._add(connection, _key(whole[0]), whole[1])
        else:
            raise Malformed(f"request {what}")

    def _introduce(self, connection: _Connection, what: int, fields: list[bytes]) -> None:
        import hmac  # it imports hashlib: not at the start of every `lastcall run`

        if what != wire.HELLO or len(fields) != 1 or not hmac.compare_digest(fields[0], self._secret):
            raise Malformed("no secret, or a wrong one")
        connection.known = True
        connection.deadline = None
        self._strangers.pop(connection, None)
        self._send(connection)

    def _some(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of as many keys as fit into an answer."""
        values: list[bytes | None] = []
        room = wire.LARGEST_VALUE
        for key in keys:
            value = self._table.get(_key(key))
            room -= 4 + len(value or b"")
            if room < 0 and values:
                break
            values.append(value)
        return values

    def _add(self, connection: _Connection, key: str, amount: bytes) -> None:
        try:
            total = self._table.add(key, int(amount)) if len(amount) <= 20 else None
        except ValueError:
            total = None
        if total is None:
            raise Malformed("a sum of what is no number")
        self._send(connection, str(total).encode())
        self._tell(key, str(total).encode())

    def _store(self, key: str, value: bytes) -> None:
        self._table.set(key, value)
        self._tell(key, value)

    # ---- waiting clients

    def _get(self, connection: _Connection, key: str, seconds: float) -> None:
        value = self._table.get(key)
        if value is not None or seconds == 0:
            self._send(connection, value)
            return
        connection.key = key
        self._waiting.setdefault(key, set()).add(connection)
        self._limit(connection, seconds)

    def _tell(self, key: str, value: bytes) -> None:
        for connection in self._waiting.pop(key, ()):
            connection.key = connection.deadline = None
            self._answer(connection, value)

    def _answer(self, connection: _Connection, value: bytes | None) -> None:
        """Send to another client than the current one: if that fails, only its connection is affected."""
        try:
            self._send(connection, value)
        except OSError as error:
            self._drop(connection, str(error))

    def _unpark(self, connection: _Connection) -> None:
        if connection.key is not None and (others := self._waiting.get(connection.key)) is not None:
            others.discard(connection)
            if not others:
                del self._waiting[connection.key]
        connection.key = connection.deadline = None

    def _limit(self, connection: _Connection, seconds: float) -> None:
        connection.deadline = time.monotonic() + seconds
        self._count += 1
        heapq.heappush(self._deadlines, (connection.deadline, self._count, connection))
        # most of them have been answered long ago
        if len(self._deadlines) > _STALE + 2 * len(self._connections):
            self._deadlines = [entry for entry in self._deadlines if entry[2].deadline == entry[0]]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        if self._deaf_until is not None and self._deaf_until <= now:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, connection = heapq.heappop(self._deadlines)
            if connection.deadline != deadline or connection not in self._connections:
                continue
            if connection.known:
                self._unpark(connection)
                self._answer(connection, None)
            else:
                self._drop(connection, "no secret in time")


class _Connection:
    __slots__ = ("deadline", "inbox", "key", "known", "link", "outgoing")

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.inbox = wire.Inbox()
        self.outgoing = memoryview(b"")
        self.known = False
        self.key: str | None = None  # what it waits for
        self.deadline: float | None = None


def _strangers_allowed() -> int:
    """More than are taken at once, so that a rank is always heard before it counts as the oldest; and never
    all that may be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_AT_ONCE + 1, min(_STRANGERS, soft // 8))


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_ipv6:
        try:  # both families at once: some clusters speak IPv6 only
            return socket.create_server(
                (host, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except (OSError, ValueError):
            pass  # a kernel without IPv6
    return socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
    )


def _key(field: bytes) -> str:
    if not 1 <= len(field) <= wire.LONGEST_KEY:
        raise Malformed(f"a key of {len(field)} bytes")
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise Malformed("a key that is no text") from None


def _set_soft_limit(soft: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):
        return False
    return True
