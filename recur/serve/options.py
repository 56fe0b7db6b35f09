"""What a server is told: limits, times, secrets."""

from __future__ import annotations

from dataclasses import dataclass

from recur.streaming.arguments import SHORTEST, amount, whole


@dataclass(frozen=True)
class Options:
    """Limits of a server.

    bearer       what every call must carry as `Authorization: Bearer …`; None asks for nothing
    streams      how many streams may be in memory; None: as many as fit
    message      bytes of the longest message or request body
    rate         steps a second that one stream may take; None: as many as the pool can
    burst        steps that a stream may take at once before `rate` counts
    pending      steps of one stream that may wait
    slow         seconds after which a client is dropped that does not read its answers, or does
                 not say what it wants
    ping         seconds after which a silent socket is asked for a sign of life; after so many
                 more without one it is ended
    connections  how many may be open at once, idle ones too
    max_wait     seconds that a step waits for others to join it
    stop         seconds in which connections must have ended when the server goes down
    origins      pages of other hosts whose sockets are taken; a browser says where it comes from
    """

    bearer: str | None = None
    streams: int | None = 100_000
    message: int = 1 << 20
    rate: float | None = None
    burst: int = 100
    pending: int = 64
    slow: float = 10.0
    ping: float = 10.0
    connections: int = 100_000
    max_wait: float = 0.0
    stop: float = 5.0
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bearer is not None and (not isinstance(self.bearer, str) or not self.bearer):
            raise ValueError("Options: bearer is empty or no text, expected a secret, or None.")
        for name in ("message", "burst", "pending", "connections"):
            whole("Options", name, getattr(self, name))
        if self.streams is not None:
            whole("Options", "streams", self.streams, 0)
        for name in ("slow", "ping", "stop"):
            amount("Options", name, getattr(self, name), SHORTEST, "seconds")
        amount("Options", "max_wait", self.max_wait, 0.0, "seconds")
        if self.rate is not None:
            amount("Options", "rate", self.rate, 1e-9)


class Rate:
    """A token bucket: `burst` steps at once, `rate` a second."""

    __slots__ = ("_burst", "_left", "_rate", "_since")

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = float(burst)
        self._since = now

    def take(self, now: float) -> float:
        """Takes one step; returns 0, or, if there is none, the seconds until there is one."""
        self._left = min(self._burst, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self._rate

    def full(self, now: float) -> bool:
        """Whether nothing was taken for so long that the bucket need not be kept."""
        return self._left + (now - self._since) * self._rate >= self._burst
