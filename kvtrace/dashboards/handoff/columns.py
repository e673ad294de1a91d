"""What the panels of the board Hand-off have in common: colours, columns, links."""

from __future__ import annotations

from kvtrace.dashboards.panels import Column, class_mappings
from kvtrace.palette import CLASS_COLOUR, GREY
from kvtrace.stages import Class

REQUEST_LINK = (
    "/d/kvtrace-request/kvtrace-request?${__url_time_range}&${run:queryparam}"
    "&var-request=${__data.fields.request_id:percentencode}&var-attempt=${__data.fields.attempt}"
)
LAST_ATTEMPT_LINK = REQUEST_LINK.replace("${__data.fields.attempt}", "")
RUN, QUEUE, COORDINATION, TRANSFER, UNATTRIBUTED = (CLASS_COLOUR[kind.value] for kind in Class)
MODE = Column("mode", "connector")
REQUESTS = Column("requests")
PAIR = (Column("prefill_engine", "P"), Column("decode_engine", "D"))
TTFT = (Column("ttft_p50_ms", "p50", "ms"), Column("ttft_p99_ms", "p99", "ms"))
CLASS = Column("class", mappings=class_mappings(), width=130)
SHARE = Column("share", unit="percentunit", colour=GREY, bar=True)
