"""Live streams: one, or many that share a model's weights and step together."""

from recur.streaming.kept import Departure, Flush, StreamPool
from recur.streaming.precision import Drift, drift
from recur.streaming.rest import Settled, settle
from recur.streaming.slots import Slots
from recur.streaming.store import MemoryStore, Record, RedisStore, SQLiteStore, StateStore
from recur.streaming.stream import Stream

__all__ = [
    "Departure",
    "Drift",
    "Flush",
    "MemoryStore",
    "Record",
    "RedisStore",
    "SQLiteStore",
    "Settled",
    "Slots",
    "StateStore",
    "Stream",
    "StreamPool",
    "drift",
    "settle",
]
