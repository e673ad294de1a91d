"""PromQL over kvtrace's metrics, of the series that the variables of the board Live choose."""

from __future__ import annotations

from kvtrace.metrics.names import Metric

_RUN = 'run=~"$run",model=~"$model",connector=~"$connector"'
_PAIR = 'prefill=~"$prefill",decode=~"$decode"'
_WINDOW = "$__rate_interval"


def chosen(metric: Metric, extra: str = "", suffix: str = "") -> str:
    """Return the selector of the metric's series that the board's variables choose."""
    matchers = [_RUN]
    if "prefill" in metric.labels:
        matchers.append(_PAIR)
    elif "decode" in metric.labels:
        matchers.append('decode=~"$decode"')
    if "scope" in metric.labels:
        matchers.append('scope=~"$ttft_scope"')
    if extra:
        matchers.append(extra)
    return f"{metric.name}{suffix}{{{','.join(matchers)}}}"


def rate(metric: Metric, by: str = "", extra: str = "", suffix: str = "") -> str:
    """Return the metric's rate, summed, by the labels named."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({chosen(metric, extra, suffix)}[{_WINDOW}]))"


def quantile(part: float, metric: Metric, by: str = "") -> str:
    """Return a quantile of a histogram, by the labels named."""
    return f"histogram_quantile({part}, {rate(metric, f'le,{by}' if by else 'le', suffix='_bucket')})"


def share(part: str, whole: str) -> str:
    """Return part of whole; no data where the whole is 0."""
    return f"{part} / ({whole} > 0)"
