"""Traces from files: five formats, plain or gzip, recognized by their content.

| format | block names | source of the description |
| --- | --- | --- |
| our own recording | whole prefix | `recording` |
| Mooncake JSONL | whole prefix | FAST'25 release of kvcache-ai/Mooncake |
| Qwen-Bailian JSONL | one block each: chained here | alibaba-edu/qwen-bailian-usagetraces-anon, README |
| agentic sessions, JSON (Lines) | whole prefix, per session or global | agentic-coding-analysis, docs/TRACE_FORMAT.md |
| the same, runs of consecutive names | whole prefix, per session | `sessions` |
"""

from kvbm.sim.traces.formats.read import ReadOptions, read_trace
from kvbm.sim.traces.formats.recording import RecordingWriter
from kvbm.sim.traces.formats.text import TraceError

__all__ = ["ReadOptions", "RecordingWriter", "TraceError", "read_trace"]
