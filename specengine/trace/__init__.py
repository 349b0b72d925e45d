"""Record the tree of every cycle in a file, read it, and show it."""

from typing import TYPE_CHECKING, Any

from specengine.trace.records import Query, Trace, TracedCycle, read_trace

if TYPE_CHECKING:
    from specengine.trace.writer import TraceWriter

__all__ = ["Query", "Trace", "TraceWriter", "TracedCycle", "read_trace"]


def __getattr__(name: str) -> Any:
    if name == "TraceWriter":  # imports torch; reading a trace does not
        from specengine.trace.writer import TraceWriter

        return TraceWriter
    raise AttributeError(f"module 'specengine.trace' has no attribute {name!r}")
