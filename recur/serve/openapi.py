"""The description of the HTTP interface, as OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "expected": {"type": "integer"},
                "got": {"type": "integer"},
                "at": {"type": "number"},
                "last_step": {"type": "integer"},
            },
            "required": ["code", "message"],
        }
    },
}
_STREAM = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "token": {"type": "string"},
        "step": {"type": "integer"},
    },
}
_STEP = {
    "type": "object",
    "properties": {
        "step": {"type": "integer", "minimum": 1},
        "x": {"oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "number"}]},
    },
    "required": ["x"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "step": {"type": "integer"},
        "y": {"type": "array", "items": {"type": ["number", "null"]}},
    },
}
_MANY = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    **_STEP["properties"],  # type: ignore[dict-item]
                    "id": {"type": "string"},
                    "token": {"type": "string"},
                },
                "required": ["id", "token", "x"],
            },
        }
    },
    "required": ["steps"],
}
_REASONS = {
    400: "the message cannot be read (format)",
    401: "no bearer token, or another (unauthorised)",
    403: "not the stream's token (token)",
    404: "no such stream (unknown)",
    409: "a step number that skips steps (gap), or a stream or step that another has (conflict)",
    410: "the stream expired (expired); the error says after which step",
    413: "the message is too long (too_large)",
    422: "the input does not fit the model (shape)",
    429: "the server or the stream is full (busy)",
    503: "the server is going down (stopping), or its store cannot be used (store)",
}


def describe(version: str) -> dict[str, Any]:
    """The document that `/openapi.json` answers."""
    stream = "/v1/streams/{id}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "recur serve", "version": version},
        "paths": {
            "/healthz": {"get": _call("Whether the server is up", {"type": "object"}, [])},
            "/metrics": {"get": _call("Figures for Prometheus", None, [401])},
            "/v1/model": {"get": _call("What the model takes", {"type": "object"}, [401])},
            "/v1/recent": {"get": _call("The last batches", {"type": "object"}, [401])},
            "/v1/streams": {
                "post": _call(
                    "Open a stream, take one over, or open one from a snapshot (binary body)",
                    _STREAM,
                    [400, 401, 403, 409, 413, 429, 503],
                    body={"type": "object", "properties": {
                        "id": {"type": "string"}, "takeover": {"type": "boolean"}}},
                    status=201,
                )
            },
            "/v1/step": {
                "post": _call(
                    "One step each of many streams; each succeeds or fails by itself",
                    {"type": "object", "properties": {"answers": {"type": "array", "items": {
                        "oneOf": [_ANSWER, _ERROR]}}}},
                    [400, 401, 413],
                    body=_MANY,
                )
            },
            stream: {
                "get": _call("Where a stream stands", _STREAM, [401, 403, 404, 410], own=True),
                "delete": _call("End a stream", None, [401, 403, 404, 410], own=True, status=204),
            },
            f"{stream}/step": {
                "post": _call(
                    "One step; as JSON, or as float32 with ?step=n",
                    _ANSWER,
                    [400, 401, 403, 404, 409, 410, 413, 422, 429, 503],
                    body=_STEP,
                    own=True,
                )
            },
            f"{stream}/reset": {
                "post": _call("Back to rest", _STREAM, [401, 403, 404, 410], own=True)
            },
            f"{stream}/snapshot": {
                "get": _call("The stream as bytes", None, [401, 403, 404, 410], own=True)
            },
        },
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }  # fmt: skip


def _call(
    summary: str,
    answer: dict[str, Any] | None,
    errors: list[int],
    *,
    body: dict[str, Any] | None = None,
    own: bool = False,
    status: int = 200,
) -> dict[str, Any]:
    responses: dict[str, Any] = {str(status): {"description": summary}}
    if answer is not None:
        responses[str(status)]["content"] = {"application/json": {"schema": answer}}
    for code in errors:
        responses[str(code)] = {
            "description": _REASONS[code],
            "content": {"application/json": {"schema": _ERROR}},
        }
    call: dict[str, Any] = {"summary": summary, "responses": responses}
    if errors:
        call["security"] = [{"bearer": []}]
    if body is not None:
        call["requestBody"] = {"content": {"application/json": {"schema": body}}}
    if own:
        text = {"type": "string"}
        call["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": text},
            {"name": "Stream-Token", "in": "header", "required": True, "schema": text},
        ]
    return call
