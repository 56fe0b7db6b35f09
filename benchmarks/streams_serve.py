"""Load on `recur serve`: WebSocket streams on this machine, from a process of their own.

python benchmarks/streams_serve.py                           # 1 to 10,000 streams, in seven minutes
python benchmarks/streams_serve.py --json results/serve.json
python benchmarks/streams_serve.py --long --streams 500 --rate 6 --seconds 1800  # in windows
python benchmarks/streams_serve.py --full                    # S9: does a full server slow down?

Each number of streams is measured three times: every stream sends its next step as soon as the last
is answered, which gives the throughput (latency is then streams / throughput, whatever the server);
then all send at half of that throughput (or --rate), evenly spread, whether or not the last step
was answered, and latency is measured from the time that a step was due, so that a server that falls
behind cannot hide it; then the same at --offered steps a second of all streams together, to compare
numbers of streams and servers at one load.  And it is measured with three servers:

recur    all of it, with an LSTM (64, 128), a Dense layer of 16, and streams in memory
nothing  the same, but a step of the pool does nothing: what the pool costs is the difference
echo     uvicorn and Starlette alone, which answer a frame of the same size: the web stack's share

Needs recur[serve].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
from streams_client import N_IN, N_OUT

HERE = Path(__file__).resolve().parent
SERVERS = ("recur", "nothing", "echo")
AT_FULL_LOAD = 0.2  # of a window of a long run
PAIRS = 5  # of a full server's runs, with and without others that are refused


# ---------------------------------------------------------------- servers, each in its own process


def serve_recur(file, store, streams):
    from recur.command import serve

    arguments = [file, "--port", "0", "--store", store, "--streams", str(streams)]
    parser = argparse.ArgumentParser()
    serve.add_to(parser.add_subparsers())
    serve.run(parser.parse_args(["serve", *arguments]))


def serve_nothing(file, store, streams):
    from recur.serve.engine import Answer, Engine

    def nothing(engine, batch, some, results):
        y = np.zeros(N_OUT, np.float32)
        for i in some:
            results[i] = Answer(batch[i].number or 0, y)

    Engine._attempt = nothing
    serve_recur(file, store, streams)


def serve_echo(file, store, streams):
    from starlette.applications import Starlette
    from starlette.routing import WebSocketRoute

    from recur.serve.options import Options
    from recur.serve.run import _serve

    answer = bytes(8 + 4 * N_OUT)

    async def socket(socket):
        await socket.accept()
        await socket.receive_text()
        await socket.send_text("{}")
        with contextlib.suppress(Exception):
            while True:
                await socket.receive_bytes()
                await socket.send_bytes(answer)

    app = Starlette(routes=[WebSocketRoute("/v1/ws", socket)])
    tell = lambda address: print("echo at", address, flush=True)  # noqa: E731
    asyncio.run(_serve(app, "127.0.0.1", 0, Options(), tell))


@contextlib.contextmanager
def server(kind, file, store="memory", streams=100_000):
    """The address of a server, and its process."""
    command = [sys.executable, __file__, "--serve", kind, str(file), store, str(streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def client(address, streams):
    """A call that puts load on the server by that many streams: load(rate, seconds)."""
    host, _, port = address.rpartition("/")[2].partition(":")
    command = [sys.executable, HERE / "streams_client.py", host, port, str(streams)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def load(rate, seconds):
        process.stdin.write(json.dumps({"rate": rate, "seconds": seconds}) + "\n")
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError("the client has failed")
        return json.loads(answer)

    try:
        if process.stdout.readline() != "open\n":
            raise RuntimeError(f"{streams} streams could not be opened")
        yield load
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


# ---------------------------------------------------------------- what is measured


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def batches(address):
    """Steps that the server has taken, and batches: (2,)."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    found = {line[0]: float(line[1]) for line in lines if line[0].startswith("recur_batch_size_")}
    return np.array([found["recur_batch_size_sum"], found["recur_batch_size_count"]])


def cpu_and_memory(process):
    """Seconds of processor time and MiB of a process, where /proc is."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0, 0.0
    return (int(fields[11]) + int(fields[12])) / 100, pages * 4096 / 2**20


def one(kind, streams, options, file):
    """Throughput, then latency at half of it, then at the same rate for any number of streams."""
    with (
        server(kind, file, options.store) as (address, process),
        client(address, streams) as load,
    ):
        load(0, min(options.seconds, 1.0))  # warms up
        fast = load(0, options.seconds)
        rate = options.rate or fast["answers_a_second"] / 2 / streams
        found = {"server": kind, "streams": streams, "most_a_second": fast["answers_a_second"]}
        before = cpu_and_memory(process)[0]
        paced = load(rate, options.seconds)
        cpu, memory = cpu_and_memory(process)
        found |= {"rate": round(rate, 3), **paced}
        offered = load(options.offered / streams, options.seconds)
        found |= {f"{name}_offered": offered[name] for name in ("p50_ms", "p99_ms")}
        found["server_cpu_us_a_step"] = round((cpu - before) / paced["answers"] * 1e6, 1)
        found["server_MiB"] = round(memory, 1)
        if kind != "echo":
            recent = fetch(f"{address}/v1/recent")
            found["batch"] = round(float(np.mean(recent["sizes"])), 2)
            found["pool_ms_a_batch"] = round(float(np.mean(recent["seconds"])) * 1e3, 4)
        return found


def long_run(streams, options, file):
    """Window by window: latency when paced, then throughput and the mean batch of a full load."""
    rows = []
    seconds = options.seconds / options.windows
    with server("recur", file, options.store) as (address, process):
        with client(address, streams) as load:
            used = load(0, 2.0)["client_cpu_s"]  # warms up
            for window in range(1, options.windows + 1):
                cpu = cpu_and_memory(process)[0]
                paced = load(options.rate, (1 - AT_FULL_LOAD) * seconds)
                before = batches(address)
                fast = load(0, AT_FULL_LOAD * seconds)
                steps, count = batches(address) - before
                answers = paced["answers"] + fast["answers"]
                server_us = (cpu_and_memory(process)[0] - cpu) / answers * 1e6
                client_us = (fast["client_cpu_s"] - used) / answers * 1e6
                paced["answers"], used = answers, fast.pop("client_cpu_s")
                del paced["client_cpu_s"]
                rows.append({"window": window, **paced, "most_a_second": fast["answers_a_second"],
                             "batch": round(steps / count, 3),
                             "server_us": round(server_us, 2), "client_us": round(client_us, 2),
                             "server_MiB": round(cpu_and_memory(process)[1], 2)})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


def full(streams, options, file):
    """The p99 of a full server's streams while others are refused, beside that while none are."""
    codes = Counter()

    def knock(address, stop):
        body = urllib.request.Request(f"{address}/v1/streams", b"{}", method="POST")
        while not stop.wait(0.02):
            try:
                with urllib.request.urlopen(body, timeout=10) as answer:
                    codes[answer.status] += 1
            except urllib.error.HTTPError as error:
                codes[error.code] += 1
                error.close()

    quiet, pressed = [], []
    with server("recur", file, options.store, streams) as (address, _):
        with client(address, streams) as load:
            rate = options.rate or load(0, 2.0)["answers_a_second"] / 2 / streams
            for _ in range(PAIRS):
                quiet.append(load(rate, options.seconds)["p99_ms"])
                stop = threading.Event()
                other = threading.Thread(target=knock, args=(address, stop))
                other.start()
                pressed.append(load(rate, options.seconds)["p99_ms"])
                stop.set()
                other.join()
    if set(codes) != {429}:
        raise RuntimeError(f"a full server answered {dict(codes)}, expected 429 to all")
    alone, among = float(np.median(quiet)), float(np.median(pressed))
    ratios = np.array(pressed) / quiet
    return {"streams": streams, "rate": round(rate, 2), "refused": codes[429],
            "p99_ms": alone, "p99_ms_full": among, "ratio": round(float(np.median(ratios)), 3),
            "ratios": ratios.round(3).tolist()}  # fmt: skip


def raise_limit():
    """As many open files as this user may have: a stream is one in the server and in the client."""
    with contextlib.suppress(ImportError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main():
    if sys.argv[1:2] == ["--serve"]:
        kind, file, store, streams = sys.argv[2:]
        return globals()[f"serve_{kind}"](file, store, int(streams))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,100,1000,10000", help="comma-separated")
    parser.add_argument("--rate", type=float, help="steps a second of each (half of the most)")
    parser.add_argument("--offered", type=float, default=1000.0, help="steps a second of all")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--store", default="memory")
    parser.add_argument("--full", action="store_true", help="the p99 of a full server")
    parser.add_argument("--long", action="store_true", help="one run of --seconds, in windows")
    parser.add_argument("--windows", type=int, default=50, help="of a long run")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    raise_limit()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = saved_model(folder)
        for streams in map(int, options.streams.split(",")):
            if options.long:
                rows += long_run(streams, options, file)
                continue
            if options.full:
                rows.append(full(streams, options, file))
                print(json.dumps(rows[-1]), flush=True)
                continue
            for kind in options.servers.split(","):
                rows.append(one(kind, streams, options, file))
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        report = {"date": time.strftime("%Y-%m-%d"), "store": options.store, "serve": rows}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return None


def saved_model(folder):
    import recur
    from recur import LSTM, Chain, Dense

    rng = np.random.default_rng(0)
    file = Path(folder) / "model.safetensors"
    recur.save(Chain(LSTM(N_IN, 128, rng=rng), Dense(128, N_OUT, rng=rng)), file)
    return file


if __name__ == "__main__":
    main()
