"""Run by test_serve_ray in a process of its own: Ray warns, forks and logs as it likes.

Steps many streams through two replicas, kills one, goes to three and back to two; after each every
answer must be that of a single process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import ray
from serving import model

import recur
from recur import Stream
from recur.serve.client import Client
from recur.serve.ray import PLACES, Deployment, deploy, strict_router

STREAMS = 24


def inputs(i, n):
    return np.sin(np.arange(1, 6) * n + i).astype(np.float32)


def replicas():
    return [
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"].startswith("SERVE_REPLICA::recur")
    ]


def wait_for(count):
    end = time.monotonic() + 60
    while len(replicas()) != count and time.monotonic() < end:
        time.sleep(0.2)
    assert len(replicas()) == count, replicas()


class Load:
    """Steps all streams, each by a client of its own thread, and compares every answer."""

    def __init__(self, address):
        self.client = Client(address, patience=90)
        self.streams = [self.client.open() for _ in range(STREAMS)]
        self.twins = [Stream(model()) for _ in range(STREAMS)]
        self.steps = 0
        self.faults = []

    def work(self, some, steps):
        try:
            for n in range(self.steps + 1, self.steps + steps + 1):
                for i in some:
                    y = self.streams[i].step(inputs(i, n))
                    expected = self.twins[i](inputs(i, n))
                    if not np.array_equal(y, expected):
                        self.faults.append((i, n))
        except Exception as error:
            self.faults.append(repr(error))

    def run(self, steps, meanwhile=lambda: None):
        parts = [range(STREAMS)[k::4] for k in range(4)]
        threads = [threading.Thread(target=self.work, args=(part, steps)) for part in parts]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()
        self.steps += steps
        assert self.faults == [], self.faults[:3]


def kill_one():
    time.sleep(0.3)
    ray.kill(ray.get_actor(replicas()[0], namespace="serve"), no_restart=True)


def main(folder, store, port):
    file = Path(folder) / "model.safetensors"
    recur.save(model(), file)
    what = Deployment(str(file), store)

    def scale(count):
        address = deploy(what, replicas=count, port=int(port), cpus=0.1)
        wait_for(count)
        return address

    load = Load(scale(2))
    load.run(10)
    print("two replicas: all answers are those of a single process")
    load.run(15, kill_one)
    wait_for(2)
    load.run(5)
    print("one replica killed: nothing lost, nothing forked")
    load.run(10, lambda: scale(3))
    load.run(5)
    load.run(10, lambda: scale(2))
    load.run(5)
    print("rescaled to three and back: nothing lost, nothing forked")
    owners = what.open_store()
    assert len(owners.keys()) == STREAMS
    owners.close()
    for stream in load.streams:
        assert stream.steps == load.steps
    check_router()
    ray.shutdown()


def check_router():
    from ray.serve._private.common import DeploymentID, ReplicaID

    def router(**options):
        kind = strict_router()
        made = kind.__new__(kind)
        made._deployment_id = "test"
        made.initialize_state(**options)
        return made

    for options, message in (
        # Misspelt, and Ray passes over them.
        ({"num_fallback_replica": 0, "num_virtual_nodes": PLACES}, "would try 2 other replicas"),
        ({"num_fallback_replicas": 0, "num_virtual_node": PLACES}, "has 100 places on its ring"),
    ):
        try:
            router(**options)
        except recur.RecurError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{options} were taken")
    print("a router that would look elsewhere is refused")
    ring = router(num_fallback_replicas=0, num_virtual_nodes=PLACES)
    for trial in range(20):  # replicas have other names every time
        replicas = [
            ReplicaID(f"{trial}-{i}", deployment_id=DeploymentID(name="recur")) for i in range(4)
        ]
        ring._rebuild_ring(frozenset(replicas))
        count = Counter(ring._lookup_ranked_replicas(f"stream-{n}")[0] for n in range(10_000))
        assert max(count.values()) <= 1.15 * 2500, count
    print("ten thousand streams are spread evenly over four replicas")


if __name__ == "__main__":
    main(*sys.argv[1:])
