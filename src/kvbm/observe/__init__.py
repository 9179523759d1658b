"""What can be seen from outside: metrics, their HTTP server, hit rates and the log."""

from kvbm.observe.hit_rates import HitCounts, HitRateLog, HitRateWindow
from kvbm.observe.log import configure, key_values, start_line, traffic_line
from kvbm.observe.metrics import TABLE, Metrics

__all__ = [
    "TABLE",
    "HitCounts",
    "HitRateLog",
    "HitRateWindow",
    "Metrics",
    "configure",
    "key_values",
    "start_line",
    "traffic_line",
]
