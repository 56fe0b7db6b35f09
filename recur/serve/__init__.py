"""A server for live streams (`recur serve`), and clients of it.  Needs the extra `serve`."""

from recur.serve.app import application
from recur.serve.options import Options
from recur.serve.run import serve

__all__ = ["Options", "application", "serve"]
