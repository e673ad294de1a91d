"""The colour of every class, told apart by colour-blind eyes too: Okabe and Ito's palette, the same in every output."""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace.stages import Class

CLASS_COLOUR: Mapping[str, str] = {
    Class.RUN.value: "#0072b2",
    Class.QUEUE.value: "#56b4e9",
    Class.COORDINATION.value: "#e69f00",
    Class.TRANSFER.value: "#009e73",
    Class.UNATTRIBUTED.value: "#cc79a7",
}

VERMILION = "#d55e00"
YELLOW = "#f0e442"
GREY = "#999999"
"""The palette's colours that no class has: for what failed, for targets, and for what is only context."""
