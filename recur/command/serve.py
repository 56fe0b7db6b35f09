"""`recur serve`: live streams of a model over HTTP and WebSockets, with a page to look at."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from typing import Any

from recur.command.arguments import at_least, count
from recur.errors import RecurError
from recur.io import model as models
from recur.io import safetensors
from recur.streaming import Flush, MemoryStore, RedisStore, SQLiteStore, StreamPool

_ALPHABET = "alphabet"  # of a character model, as `recur demo` and `recur train` write it


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "serve",
        help="serve live streams of a model",
        description="Serve live streams of a model over HTTP and WebSockets, with a page at /. "
        "Streams are kept in a store and go on after a restart.",
    )
    parser.add_argument("model", metavar="MODEL", help="a .safetensors file that recur wrote")
    where = parser.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    where.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument(
        "--store",
        metavar="STORE",
        help="an SQLite file, redis://…, or 'memory' (default: MODEL.streams.db)",
    )
    kept.add_argument("--flush-steps", type=count, metavar="N",
                      help="write after N steps (1; in memory: when idle)")  # fmt: skip
    kept.add_argument(
        "--flush-seconds", type=at_least(0.001), metavar="T", help="write every T seconds instead"
    )
    kept.add_argument("--idle", type=at_least(0.01), default=600.0, metavar="T",
                      help="seconds until an idle stream leaves memory (600)")  # fmt: skip
    kept.add_argument("--ttl", type=at_least(0.01), metavar="T",
                      help="seconds until a stream in the store expires (never)")  # fmt: skip
    kept.add_argument("--durable", action="store_true",
                      help="wait for the disk: streams survive a power cut")  # fmt: skip
    kept.add_argument("--allow-weights-change", action="store_true",
                      help="streams in the store go on with other weights")  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument("--bearer", metavar="TOKEN",
                        help="what every call must carry (or set RECUR_BEARER)")  # fmt: skip
    limits.add_argument("--streams", type=count, default=100_000, help="in memory (100000)")
    limits.add_argument("--message", type=count, default=1 << 20, metavar="BYTES",
                        help="longest message (1048576)")  # fmt: skip
    limits.add_argument("--rate", type=at_least(0.001), metavar="N",
                        help="steps a second of one stream (no limit)")  # fmt: skip
    limits.add_argument("--max-wait", type=at_least(0.0), default=0.0, metavar="T",
                        help="seconds a step waits for others (0)")  # fmt: skip
    cluster = parser.add_argument_group("more than one process")
    cluster.add_argument("--ray", action="store_true",
                         help="serve from replicas on a Ray cluster, over one store")  # fmt: skip
    cluster.add_argument("--replicas", type=count, default=2, help="how many, with --ray (2)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from recur.serve import Options, serve  # inside: the other subcommands need no server

    if arguments.ray:
        return run_ray(arguments)
    model, characters = load(arguments.model)
    take_open_files()
    collect_less()
    pool = StreamPool(
        model,
        store=store_of(arguments),
        flush=flush_of(arguments),
        idle=arguments.idle,
        ttl=arguments.ttl,
        allow_weights_change=arguments.allow_weights_change,
    )
    try:
        serve(
            pool,
            host=arguments.host,
            port=arguments.port,
            options=Options(**limits_of(arguments)),
            characters=characters,
            on_start=lambda address: print(f"{model!r} at {address}", flush=True),
        )
    except ImportError as error:
        raise RecurError(str(error)) from None


def run_ray(arguments: argparse.Namespace) -> None:
    """Serves from a Ray cluster until the process is told to end."""
    from recur.serve import Options
    from recur.serve.ray import Deployment, deploy, remove

    model, characters = load(arguments.model)
    store = arguments.store or f"{arguments.model}.streams.db"
    if store == "memory":
        raise RecurError("--ray needs a store that replicas share: an SQLite file, or redis://…")
    deployment = Deployment(
        os.path.abspath(arguments.model),
        store if "://" in store else os.path.abspath(store),
        flush=flush_of(arguments),
        idle=arguments.idle,
        ttl=arguments.ttl,
        allow_weights_change=arguments.allow_weights_change,
        options=Options(**limits_of(arguments)),
        characters=characters,
    )
    try:
        address = deploy(
            deployment, replicas=arguments.replicas, host=arguments.host, port=arguments.port
        )
    except ImportError as error:
        raise RecurError(str(error)) from None
    print(f"{model!r} at {address}, {arguments.replicas} replicas", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    remove()


def take_open_files() -> None:
    """Lets this process open as many connections as it may; the limit is low for select's sake."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names more than it allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def collect_less() -> None:
    """Makes collections of garbage rare: one looks at what all connections hold, for a second where
    they are 10,000.  Nearly all garbage of a server is freed without them.
    """
    gc.collect()
    gc.freeze()  # the packages and the model: they stay
    gc.set_threshold(50_000, 20, 50)


def limits_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Options`; warns of an address that strangers may reach."""
    bearer = arguments.bearer or os.environ.get("RECUR_BEARER") or None
    if bearer is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        print("recur: anyone who reaches this address may open streams; see --bearer.",
              file=sys.stderr)  # fmt: skip
    return {
        "bearer": bearer,
        "streams": arguments.streams,
        "message": arguments.message,
        "rate": arguments.rate,
        "max_wait": arguments.max_wait,
    }


def load(path: str) -> tuple[Any, list[str] | None]:
    """The model of a file, and its characters if it is a character model."""
    arrays, metadata = safetensors.read(path)
    model = models.unpack(arrays, metadata, path)
    if _ALPHABET not in metadata:
        return model, None
    return model, ["", *json.loads(metadata[_ALPHABET])]


def store_of(arguments: argparse.Namespace) -> Any:
    """The store that the arguments ask for."""
    where = arguments.store or f"{arguments.model}.streams.db"
    if where == "memory":
        return MemoryStore()
    if where.startswith(("redis://", "rediss://", "unix://")):
        try:
            return RedisStore(where)
        except ImportError as error:
            raise RecurError(str(error)) from None
    return SQLiteStore(where, durable=arguments.durable)


def flush_of(arguments: argparse.Namespace) -> Flush:
    """When streams are written."""
    if arguments.flush_seconds is None and arguments.flush_steps is None:
        if arguments.store == "memory":  # it ends with this process: written when they leave
            return Flush(steps=None)
    if arguments.flush_seconds is None:
        return Flush(steps=arguments.flush_steps or 1)
    return Flush(steps=arguments.flush_steps, seconds=arguments.flush_seconds)
