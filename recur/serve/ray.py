"""The same server on a Ray cluster: replicas that share a store, each stream with one of them.

A stream belongs to the replica to which its name hashes (header `X-Session-Id`, which the clients
send).  When replicas come or go, a stream's new owner claims it in the store, under a higher epoch;
what the old owner has of it is refused from then on, so no stream forks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from recur.errors import RecurError
from recur.serve.options import Options
from recur.streaming import Flush, RedisStore, SQLiteStore, StateStore, StreamPool
from recur.streaming.arguments import whole

# Of a replica on the ring: with fewer, as Ray's own 100, some replicas have far more sessions.
PLACES = 1000


@dataclass(frozen=True)
class Deployment:
    """What every replica is made of; it travels to other machines.

    file        the model's file, which every machine can read
    store       "redis://…", or an SQLite file where all replicas run on one machine
    characters  of a character model
    allow_weights_change  as for `StreamPool`: for a new version of the model
    """

    file: str
    store: str
    flush: Flush = field(default_factory=Flush)
    idle: float | None = 600.0
    ttl: float | None = None
    options: Options = field(default_factory=Options)
    characters: list[str] | None = None
    allow_weights_change: bool = False

    def open_store(self) -> StateStore:
        """A connection of this process's own."""
        if "://" in self.store:
            return RedisStore(self.store)
        return SQLiteStore(self.store)

    def application(self) -> Any:
        """The application of one replica, with a pool of its own."""
        from recur.io.model import load
        from recur.serve.app import application

        pool = StreamPool(
            load(self.file),
            store=self.open_store(),
            flush=self.flush,
            idle=self.idle,
            ttl=self.ttl,
            allow_weights_change=self.allow_weights_change,
        )
        return application(pool, self.options, characters=self.characters)


def deploy(
    deployment: Deployment,
    *,
    replicas: int = 2,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "recur",
    cpus: float = 1.0,
) -> str:
    """Starts, or rescales, a Ray Serve application; returns its address.

    Joins the cluster that `ray start` made, or starts one on this machine.  Called again with the
    same name it changes the number of replicas while streams go on.

    replicas  how many processes share the streams
    cpus      what each of them reserves

    Raises `ImportError` without the extra, `RecurError` if Ray would not keep streams where they
    are.
    """
    replicas = whole("deploy", "replicas", replicas)
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ImportError('A deployment needs Ray Serve: pip install "recur[ray]".') from None
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, log_to_driver=False)
    serve.start(http_options={"host": host, "port": port})
    serve.run(_bound(deployment, replicas, cpus, name), name=name, route_prefix="/")
    return f"http://{host}:{port}"


def remove(name: str = "recur") -> None:
    """Ends the application; each replica first writes its streams to the store."""
    from ray import serve

    serve.delete(name)


def _bound(deployment: Deployment, replicas: int, cpus: float, name: str) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class Replica:
        """The ASGI application alone."""

    def build() -> Any:  # runs in each replica; Ray takes nothing else than a plain function
        return deployment.application()

    served = serve.ingress(build)(Replica)
    router = RequestRouterConfig(
        request_router_class=f"{__name__}.StrictRouter",
        request_router_kwargs={"num_fallback_replicas": 0, "num_virtual_nodes": PLACES},
    )
    return serve.deployment(
        name=f"{name}-replica",
        num_replicas=replicas,
        max_ongoing_requests=100_000,  # the engine gathers them; a refused call would go elsewhere
        request_router_config=router,
        ray_actor_options={"num_cpus": cpus},
        graceful_shutdown_timeout_s=10.0,
        health_check_period_s=2.0,
    )(served).bind()


@functools.cache
def strict_router() -> type:
    """Ray's router by consistent hash, which refuses to start if it would ever look elsewhere.

    Ray passes over router arguments that it does not know, so that a misspelt or renamed one would
    fork sessions in silence: this asks the router itself.
    """
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    class StrictRouter(ConsistentHashRouter):
        def initialize_state(self, **options: Any) -> None:
            super().initialize_state(**options)
            fallbacks = getattr(self, "_num_fallback_replicas", None)
            if fallbacks != 0:
                raise RecurError(
                    f"Ray's router would try {fallbacks} other replicas, expected 0: a session's "
                    "state would fork. This version of Ray is not known to recur."
                )
            places = getattr(self, "_num_virtual_nodes", None)
            if places != PLACES:
                raise RecurError(
                    f"Ray's router has {places} places on its ring for a replica, expected "
                    f"{PLACES}: some replicas would have many more sessions than others. This "
                    "version of Ray is not known to recur."
                )

    return StrictRouter


def __getattr__(name: str) -> Any:
    # Ray looks the router up by its path; it must not be made before Ray is wanted.
    if name == "StrictRouter":
        return strict_router()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
