"""`recur serve` over HTTP.  S numbers: see docs/how-to/streams.md."""

from __future__ import annotations

import http.client
import json
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from serving import model, needs_server, serving

import recur
from recur import Conflict, Expired, Gap, ShapeError, Stream, UnknownStream
from recur.serve.client import Client, choose, spread
from recur.serve.protocol import Unauthorised, WrongToken

pytestmark = needs_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve")) as one:
        yield one


def call(server, method, path, body=None, **headers):
    """One call: (status, headers, content); JSON is read."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    try:
        if isinstance(body, dict):
            body = json.dumps(body)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        data = answer.read()
        kind = answer.headers.get("content-type", "")
        return answer.status, answer.headers, json.loads(data) if "json" in kind else data
    finally:
        connection.close()


def opened(server, **body):
    status, _, found = call(server, "POST", "/v1/streams", body)
    assert status == 201
    return found["id"], found["token"]


def test_s3_answers_of_many_streams_at_once_are_those_of_a_single_process(server, rng):
    X = rng.standard_normal((12, 5, 20)).astype(np.float32)
    expected = [Stream(model()).run(x) for x in X]
    found = [None] * 12

    def work(i):
        client = Client(server.address)
        stream = client.open()
        found[i] = np.stack([stream.step(X[i][:, t]) for t in range(20)], -1)
        assert stream.steps == 20
        client.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_binary_steps_and_many_steps_in_one_call(server, rng):
    x = rng.standard_normal((5, 3)).astype(np.float32)
    Y = Stream(model()).run(x)
    id, token = opened(server)
    for t in range(2):
        status, headers, data = call(
            server, "POST", f"/v1/streams/{id}/step?step={t + 1}", x[:, t].tobytes(),
            Content_Type="application/octet-stream", Stream_Token=token,
        )  # fmt: skip
        assert status == 200 and headers["Stream-Step"] == str(t + 1)
        assert data == Y[:, t].tobytes()
    other, other_token = opened(server)
    steps = [
        {"id": id, "token": token, "step": 3, "x": x[:, 2].tolist()},
        {"id": other, "token": other_token, "x": x[:, 0].tolist()},
        {"id": other, "token": token, "x": x[:, 0].tolist()},
        {"id": "nobody", "token": token, "x": x[:, 0].tolist()},
        {"id": id, "token": token, "step": 9, "x": x[:, 2].tolist()},
        {"id": id, "token": token, "x": [1]},
        {"x": [1]},
    ]
    status, _, found = call(server, "POST", "/v1/step", {"steps": steps})
    assert status == 200
    first, second, *errors = found["answers"]
    assert np.array_equal(np.float32(first["y"]), Y[:, 2]) and first["step"] == 3
    assert np.array_equal(np.float32(second["y"]), Y[:, 0]) and second["step"] == 1
    codes = [answer["error"]["code"] for answer in errors]
    assert codes == ["token", "unknown", "gap", "shape", "format"]


def test_s5_each_cause_has_its_own_code(server):
    id, token = opened(server)
    path = f"/v1/streams/{id}/step"
    x = [0.5] * 5

    def code(body, status, token=token, path=path, method="POST"):
        got, _, found = call(server, method, path, body, Stream_Token=token)
        assert got == status, found
        return found["error"]["code"]

    assert call(server, "POST", path, {"x": x, "step": 1}, Stream_Token=token)[0] == 200
    assert code({"x": x}, 404, path="/v1/streams/nobody/step") == "unknown"
    assert code({"x": x, "step": 5}, 409) == "gap"
    assert code({"x": [1] * 5, "step": 1}, 409) == "conflict"
    assert code({"id": id}, 409, path="/v1/streams", token="") == "conflict"
    assert code({"x": [1, 2]}, 422) == "shape"
    assert code({"x": x, "step": -1}, 400) == "format"
    assert code({"x": "text"}, 400) == "format"
    assert code({"x": [[1], [1, 2]]}, 400) == "format"
    assert code({"step": 2}, 400) == "format"
    assert code("{", 400) == "format"
    assert code("[" * 100_000, 400) == "format"
    assert code("[1]", 400) == "format"
    assert code({"id": "no/slash"}, 400, path="/v1/streams") == "format"
    assert code("x" * (1 << 20 | 1), 413) == "too_large"
    assert code({"x": x, "step": 1}, 403, token="guess") == "token"
    # None of it moved the stream, and the stored answer is still there.
    assert call(server, "GET", f"/v1/streams/{id}", Stream_Token=token)[2]["step"] == 1
    again = call(server, "POST", path, {"x": x, "step": 1}, Stream_Token=token)
    assert again[0] == 200 and again[2]["step"] == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/step"),
        ("POST", "/reset"),
        ("GET", "/snapshot"),
    ],
)
def test_no_client_reads_steps_or_ends_the_stream_of_another(server, method, path):
    id, token = opened(server)
    _, mine = opened(server)
    body = {"x": [0] * 5} if path == "/step" else None
    for wrong in (mine, "", token[:-1], token + "x", id):
        status, _, found = call(server, method, f"/v1/streams/{id}{path}", body, Stream_Token=wrong)
        assert status == 403 and found["error"]["code"] == "token"
        assert token not in json.dumps(found)
    assert call(server, "POST", "/v1/streams", {"id": id, "takeover": True},
                Stream_Token=mine)[0] == 403  # fmt: skip
    assert call(server, "GET", f"/v1/streams/{id}", Stream_Token=token)[2]["step"] == 0


def test_opening_again_with_the_same_proposed_token_is_the_same_stream(server):
    token = "t" * 40
    for _ in range(2):
        status, _, found = call(
            server, "POST", "/v1/streams", {"id": "proposed"}, Stream_Token=token
        )
        assert (status, found["token"], found["step"]) == (201, token, 0)
    other = call(server, "POST", "/v1/streams", {"id": "proposed"}, Stream_Token="u" * 40)
    assert other[0] == 409
    short = call(server, "POST", "/v1/streams", {"id": "short"}, Stream_Token="u" * 31)
    assert short[0] == 400 and short[2]["error"]["code"] == "format"


def test_tokens_are_long_and_all_different(server):
    tokens = {opened(server)[1] for _ in range(50)}
    assert len(tokens) == 50 and min(map(len, tokens)) >= 32


def test_s7_a_takeover_shuts_the_old_holder_out(server):
    client = Client(server.address)
    old = client.open()
    y = old.step(np.ones(5))
    new = client.takeover(old.id, old.token)
    assert new.steps == 1 and new.token != old.token
    with pytest.raises(WrongToken):
        old.step(np.ones(5))
    new.step(np.ones(5))
    with pytest.raises(Conflict):
        client.open(new.id)
    new.reset()
    assert np.array_equal(new.step(np.ones(5)), y)
    new.close()
    with pytest.raises(UnknownStream):
        new.step(np.ones(5))
    client.close()


def test_s16_a_snapshot_opens_another_stream_here_or_in_a_process(server, rng):
    X = rng.standard_normal((5, 6)).astype(np.float32)
    Y = Stream(model()).run(X)
    client = Client(server.address)
    stream = client.open()
    for t in range(4):
        stream.step(X[:, t])
    status, _, data = call(
        server, "GET", f"/v1/streams/{stream.id}/snapshot", Stream_Token=stream.token
    )
    assert status == 200
    assert np.array_equal(Stream.restore(model(), data).run(X[:, 4:]), Y[:, 4:])
    status, _, found = call(
        server, "POST", "/v1/streams?id=twin", data, Content_Type="application/octet-stream"
    )
    assert (status, found["id"], found["step"]) == (201, "twin", 4)
    twin = client.resume("twin", found["token"])
    assert np.array_equal(twin.step(X[:, 4]), Y[:, 4])
    for bad in (data[:-1], b"", data + b"x"):
        status, _, found = call(
            server, "POST", "/v1/streams", bad, Content_Type="application/octet-stream"
        )
        assert status == 400 and found["error"]["code"] == "format"
    client.close()


def test_health_metrics_model_and_openapi(server):
    assert call(server, "GET", "/healthz")[2]["status"] == "ok"
    id, token = opened(server)
    for body in ({"x": [0] * 5}, {"x": [0] * 5, "step": 9}):
        call(server, "POST", f"/v1/streams/{id}/step", body, Stream_Token=token)
    text = call(server, "GET", "/metrics")[2].decode()
    for name in ("recur_steps_total", "recur_streams ", "recur_batch_size_bucket",
                 'recur_errors_total{code="gap"}', "recur_step_seconds_sum"):  # fmt: skip
        assert name in text
    assert call(server, "GET", "/v1/model")[2]["n_in"] == 5
    assert call(server, "GET", "/v1/recent")[2]["sizes"]
    document = call(server, "GET", "/openapi.json")[2]
    assert document["openapi"] == "3.1.0"
    for path, calls in document["paths"].items():
        for method in calls:
            body = {} if method == "post" else None
            status, _, _ = call(server, method.upper(), path.format(id="x"), body)
            assert status not in (404, 405) or path.startswith("/v1/streams/{id}")


def test_limits_bearer_streams_and_rate(tmp_path):
    arguments = ("--bearer", "secret", "--streams", "3", "--rate", "0.01")
    with serving(tmp_path, *arguments, store="memory") as server:
        for path in ("/metrics", "/v1/model", "/v1/recent"):
            assert call(server, "GET", path)[0] == 401
            assert call(server, "GET", path, Authorization="Bearer guess")[0] == 401
            assert call(server, "GET", path, Authorization="Bearer secret")[0] == 200
        assert call(server, "GET", "/healthz")[0] == 200
        with Client(server.address) as stranger, pytest.raises(Unauthorised):
            stranger.open()
        client = Client(server.address, bearer="secret", patience=0.2)
        streams = [client.open() for _ in range(3)]
        status, _, found = call(server, "POST", "/v1/streams", {}, Authorization="Bearer secret")
        assert status == 429 and found["error"]["code"] == "busy"
        streams[0].step(np.ones(5))  # a full server steps its open streams
        for _ in range(99):
            streams[1].step(np.ones(5))
        streams[1].step(np.ones(5))
        with pytest.raises(recur.Busy, match=r"more than 0\.01 times a second"):
            streams[1].step(np.ones(5))
        streams[2].step(np.ones(5))
        client.close()


def test_s6_an_expired_stream_says_after_which_step(tmp_path):
    with serving(tmp_path, "--idle", "0.2", "--ttl", "0.6") as server:
        client = Client(server.address)
        stream = client.open()
        stream.step(np.ones(5))
        deadline = threading.Event()
        deadline.wait(0.4)
        assert np.array_equal(
            stream.step(np.ones(5)), Stream(model()).run(np.ones((5, 2)))[:, 1]
        )  # evicted, and back by itself
        text = call(server, "GET", "/metrics")[2].decode()
        assert 'recur_streams_idle_total{kept="true"} 1.0' in text
        deadline.wait(1.0)
        with pytest.raises(Expired) as error:
            stream.step(np.ones(5))
        assert error.value.last_step == 2
        client.close()


def test_s19_streams_spread_evenly_and_few_move_when_a_server_comes():
    servers = [f"http://host{i}:8000" for i in range(4)]
    ids = [f"stream-{i}" for i in range(10_000)]
    count = spread(servers, ids)
    assert max(count.values()) <= 1.15 * 2500
    more = [*servers, "http://host4:8000"]
    moved = sum(choose(servers, id) != choose(more, id) for id in ids)
    assert moved == spread(more, ids)[more[-1]]
    assert choose(servers, "a") == choose(servers[::-1], "a")
    with pytest.raises(ValueError, match="no server"):
        choose([], "a")


def test_a_client_without_a_server_gives_up_after_its_patience():
    with pytest.raises(OSError):
        Client("http://127.0.0.1:9", patience=0.1).open()
    with pytest.raises(ValueError, match="is no address"):
        Client("somewhere").open()


def test_errors_keep_their_fields_on_the_way(server):
    client = Client(server.address)
    stream = client.open()
    with pytest.raises(Gap) as error:
        stream._call("POST", "/step", {"step": 4, "x": [0] * 5})
    assert (error.value.expected, error.value.got) == (1, 4)
    with pytest.raises(ShapeError, match="2 features on axis 0, expected 5"):
        stream.step(np.ones(2))
    stream.step(np.ones(5))
    client.close()
