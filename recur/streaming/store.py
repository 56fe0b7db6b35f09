"""Where streams outlive their process: in memory, in an SQLite file, in Redis.

A store keeps for every stream its last snapshot and its epoch.  Whoever takes a stream over claims
it, which raises the epoch; what an older owner saves from then on is refused.  So two owners can
never write over each other, whatever each of them believes.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from recur.errors import StreamError
from recur.files import AnyPath

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    """Seconds since 1970, by the clock as it stood when the process began.

    A clock that is set while streams run makes none of them old.
    """
    return _BEGAN + time.monotonic()


@dataclass(frozen=True)
class Record:
    """What a store has of one stream: who owns it, its last snapshot, and when that was saved."""

    epoch: int
    snapshot: bytes
    saved: float


class StateStore(Protocol):
    """A place for snapshots, shared by any number of pools, threads and processes."""

    def load(self, key: str) -> Record | None:
        """The record of a stream, or None."""

    def claim(self, key: str) -> Record:
        """Makes the caller the owner: the record under an epoch that nobody had before.

        Its snapshot is empty if there was none.
        """

    def save(self, records: Mapping[str, tuple[int, bytes]]) -> set[str]:
        """Keeps snapshots, each under the epoch that its owner claimed, all at once.

        Returns the streams that somebody else has claimed since, or that are deleted; these are
        not written.
        """

    def delete(self, key: str, epoch: int) -> bool:
        """Forgets a stream, if its owner still has this epoch."""

    def purge(self, before: float) -> list[str]:
        """Forgets streams that were last saved before this time (`time.time()`); their names."""

    def keys(self) -> list[str]:
        """All streams that have a record."""

    def close(self) -> None:
        """Lets go of files and connections."""


class MemoryStore(StateStore):
    """A store in this process: for tests, and for pools that hand streams to each other."""

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def load(self, key: str) -> Record | None:
        with self._lock:
            return self._records.get(key)

    def claim(self, key: str) -> Record:
        with self._lock:
            old = self._records.get(key, Record(0, b"", self._clock()))
            record = self._records[key] = Record(old.epoch + 1, old.snapshot, old.saved)
            return record

    def save(self, records: Mapping[str, tuple[int, bytes]]) -> set[str]:
        refused = set()
        now = self._clock()
        with self._lock:
            for key, (epoch, snapshot) in records.items():
                held = self._records.get(key)
                if held is None or held.epoch != epoch:
                    refused.add(key)
                else:
                    self._records[key] = Record(epoch, bytes(snapshot), now)
        return refused

    def delete(self, key: str, epoch: int) -> bool:
        with self._lock:
            held = self._records.get(key)
            if held is None or held.epoch != epoch:
                return False
            del self._records[key]
            return True

    def purge(self, before: float) -> list[str]:
        with self._lock:
            old = [key for key, record in self._records.items() if record.saved < before]
            for key in old:
                del self._records[key]
            return old

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._records)

    def close(self) -> None:
        pass


_SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
    key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, snapshot BLOB NOT NULL, saved REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS streams_by_time ON streams (saved);
CREATE TABLE IF NOT EXISTS epochs (last INTEGER NOT NULL);
INSERT INTO epochs SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM epochs);
"""


class SQLiteStore(StateStore):
    """A store in one file, for the processes of one machine.

    path     the database; `<path>-wal` and `<path>-shm` lie beside it while it is open
    durable  True: a save survives a power cut (the disk is waited for).  False: it survives the
             death of the process, not that of the machine

    Raises `sqlite3.Error` if the file cannot be opened or written, or is no database.
    """

    def __init__(
        self, path: AnyPath, *, durable: bool = False, clock: Callable[[], float] = steady
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._database = sqlite3.connect(
            path, timeout=30, isolation_level=None, check_same_thread=False
        )
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error:
            self._database.close()
            raise

    def load(self, key: str) -> Record | None:
        with self._lock:
            found = self._database.execute(
                "SELECT epoch, snapshot, saved FROM streams WHERE key = ?", (key,)
            ).fetchone()
        return None if found is None else Record(*found)

    def claim(self, key: str) -> Record:
        with self._lock, _Transaction(self._database) as database:
            # One count for all: a stream that is deleted and opened again never repeats an epoch.
            database.execute("UPDATE epochs SET last = last + 1")
            (epoch,) = database.execute("SELECT last FROM epochs").fetchone()
            database.execute(
                "INSERT INTO streams VALUES (?, ?, X'', ?) "
                "ON CONFLICT (key) DO UPDATE SET epoch = excluded.epoch",
                (key, epoch, self._clock()),
            )
            return Record(
                *database.execute(
                    "SELECT epoch, snapshot, saved FROM streams WHERE key = ?", (key,)
                ).fetchone()
            )

    def save(self, records: Mapping[str, tuple[int, bytes]]) -> set[str]:
        refused = set()
        now = self._clock()
        with self._lock, _Transaction(self._database) as database:
            for key, (epoch, snapshot) in records.items():
                written = database.execute(
                    "UPDATE streams SET snapshot = ?, saved = ? WHERE key = ? AND epoch = ?",
                    (snapshot, now, key, epoch),
                )
                if written.rowcount == 0:
                    refused.add(key)
        return refused

    def delete(self, key: str, epoch: int) -> bool:
        with self._lock, _Transaction(self._database) as database:
            found = database.execute(
                "DELETE FROM streams WHERE key = ? AND epoch = ?", (key, epoch)
            )
            return found.rowcount > 0

    def purge(self, before: float) -> list[str]:
        with self._lock, _Transaction(self._database) as database:
            old = database.execute("SELECT key FROM streams WHERE saved < ?", (before,)).fetchall()
            database.execute("DELETE FROM streams WHERE saved < ?", (before,))
            return [key for (key,) in old]

    def keys(self) -> list[str]:
        with self._lock:
            return [key for (key,) in self._database.execute("SELECT key FROM streams")]

    def close(self) -> None:
        with self._lock:
            self._database.close()


class _Transaction:
    """`with`: all or nothing; takes the right to write at once, so that it is never refused."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def __enter__(self) -> sqlite3.Connection:
        self.database.execute("BEGIN IMMEDIATE")
        return self.database

    def __exit__(self, kind: object, *_: object) -> None:
        self.database.execute("COMMIT" if kind is None else "ROLLBACK")


_CLAIM = """
local epoch = redis.call('INCR', KEYS[2])
local now = redis.call('HGET', KEYS[1], 'saved')
redis.call('HSET', KEYS[1], 'epoch', epoch)
if not now then redis.call('HSET', KEYS[1], 'saved', ARGV[1], 'snapshot', '') end
if not now then redis.call('ZADD', KEYS[3], ARGV[1], ARGV[2]) end
return {epoch, redis.call('HGET', KEYS[1], 'snapshot'), redis.call('HGET', KEYS[1], 'saved')}
"""
_SAVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'snapshot', ARGV[2], 'saved', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[4])
return 1
"""
_DELETE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return 1
"""


class RedisStore(StateStore):
    """A store on a Redis server, for any number of machines.

    url     "redis://host:6379/0", as `redis.Redis.from_url` takes it
    prefix  what every name there starts with, so that several models may share a server

    What Redis keeps through its own death is for its configuration to say (`appendonly`).  Raises
    `ImportError` without the extra, and what the client raises if the server is not there.
    """

    def __init__(
        self, url: str, *, prefix: str = "recur:", clock: Callable[[], float] = steady
    ) -> None:
        try:
            import redis
        except ImportError:
            raise ImportError(
                'RedisStore needs the package redis: pip install "recur[redis]".'
            ) from None
        self._redis: Any = redis.Redis.from_url(url)
        self._prefix = prefix
        self._clock = clock
        self._claim = self._redis.register_script(_CLAIM)
        self._save = self._redis.register_script(_SAVE)
        self._delete = self._redis.register_script(_DELETE)
        self._redis.ping()

    def _name(self, key: str) -> str:
        return f"{self._prefix}stream:{key}"

    @property
    def _index(self) -> str:
        return f"{self._prefix}streams"

    def load(self, key: str) -> Record | None:
        epoch, snapshot, saved = self._redis.hmget(self._name(key), "epoch", "snapshot", "saved")
        return None if epoch is None else Record(int(epoch), snapshot, float(saved))

    def claim(self, key: str) -> Record:
        epoch, snapshot, saved = self._claim(
            keys=[self._name(key), f"{self._prefix}epoch", self._index],
            args=[repr(self._clock()), key],
        )
        return Record(int(epoch), snapshot, float(saved))

    def save(self, records: Mapping[str, tuple[int, bytes]]) -> set[str]:
        now = repr(self._clock())
        pipe = self._redis.pipeline(transaction=True)
        for key, (epoch, snapshot) in records.items():
            self._save(
                keys=[self._name(key), self._index],
                args=[str(epoch), bytes(snapshot), now, key],
                client=pipe,
            )
        written = pipe.execute()
        return {key for key, done in zip(records, written, strict=True) if not done}

    def delete(self, key: str, epoch: int) -> bool:
        found = self._delete(keys=[self._name(key), self._index], args=[str(epoch), key])
        return bool(found)

    def purge(self, before: float) -> list[str]:
        old = self._redis.zrangebyscore(self._index, "-inf", f"({before!r}")
        names = [key.decode() for key in old]
        if names:
            pipe = self._redis.pipeline(transaction=True)
            pipe.delete(*map(self._name, names))
            pipe.zrem(self._index, *names)
            pipe.execute()
        return names

    def keys(self) -> list[str]:
        return [key.decode() for key in self._redis.zrange(self._index, 0, -1)]

    def close(self) -> None:
        self._redis.close()


def checked_key(title: str, key: Any) -> str:
    """The id of a stream as a store can hold it; raises `StreamError` for what is no string."""
    if not isinstance(key, str):
        raise StreamError(
            f"{title}: stream {key!r} is a {type(key).__name__}, and a store keeps streams by "
            "strings. Nothing was changed."
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise StreamError(
            f"{title}: the name {key!r} is no text, expected what UTF-8 can hold. Nothing was "
            "changed."
        ) from None
    return key
