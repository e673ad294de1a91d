"""PromQL over kvtrace's metrics, of the series that the variables of the board Live choose."""

from __future__ import annotations

from kvtrace.metrics.names import Metric

_RUN = 'run=~"$run",model=~"$model",connector=~"$connector"'
_PAIR = 'prefill=~"$prefill",decode=~"$decode"'
_WINDOW = "$__rate_interval"


def chosen(metric: Metric, extra: str = "", suffix: str = "", beside: Metric | None = None) -> str:
    """Return the selector of the metric's series that the board's variables choose.

    With `beside`, as far as that metric can be chosen too, so that one may be divided by the other.
    """
    labels = set(metric.labels) & set((beside or metric).labels)
    matchers = [_RUN]
    if "prefill" in labels:
        matchers.append(_PAIR)
    elif "decode" in labels:
        matchers.append('decode=~"$decode"')
    if "scope" in labels:
        matchers.append('scope=~"$ttft_scope"')
    if extra:
        matchers.append(extra)
    return f"{metric.name}{suffix}{{{','.join(matchers)}}}"


def rate(metric: Metric, by: str = "", extra: str = "", suffix: str = "", beside: Metric | None = None) -> str:
    """Return the metric's rate, summed, by the labels named; `beside` as in `chosen`."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({chosen(metric, extra, suffix, beside)}[{_WINDOW}]))"


def quantile(part: float, metric: Metric, by: str = "") -> str:
    """Return a quantile of a histogram, by the labels named."""
    return f"histogram_quantile({part}, {rate(metric, f'le,{by}' if by else 'le', suffix='_bucket')})"


def share(part: str, whole: str) -> str:
    """Return part of whole; no data where the whole is 0."""
    return f"{part} / ({whole} > 0)"
