"""The engine's load in the ORCA header that vLLM sends on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from inference.http.exchange import Exchange, Headers
    from inference.workers.target import Target


def load_headers(exchange: Exchange, target: Target) -> Headers:
    """`endpoint-load-metrics` if `endpoint-load-metrics-format` names a format, else nothing."""
    form = (exchange.header("endpoint-load-metrics-format") or "").upper()
    if form not in ("TEXT", "JSON"):
        return []
    stats = [client.stats for client in target.clients.values()]
    blocks = sum(s.blocks_total for s in stats)
    metrics = {
        "kv_cache_usage_perc": sum(s.blocks_used for s in stats) / blocks if blocks else 0.0,
        "num_requests_waiting": sum(s.waiting for s in stats),
    }
    if form == "JSON":
        text = msgspec.json.encode({"named_metrics": metrics}).decode()
    else:
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return [(b"endpoint-load-metrics", f"{form} {text}".encode())]
