"""HTTP, server-sent events, dialects, admission. Knows no tensor."""

__version__ = "0.1.0"
