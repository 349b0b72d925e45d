"""Traces: every cycle's tree in a file, and the ways to look at it."""

from specengine.trace.reader import read_trace
from specengine.trace.records import Query, Trace, TracedCycle
from specengine.trace.writer import TraceWriter

__all__ = ["Query", "Trace", "TraceWriter", "TracedCycle", "read_trace"]
