"""Why an attention group runs with the strategy that it has."""

from enum import StrEnum


class Reason(StrEnum):
    COST_MODEL = "cost_model"
    FORCED = "forced"
    # The forced kernel refused the layout, is withheld, or the device lacks its library: the cost
    # model chose.
    FALLBACK = "fallback"
    ONLY = "only"  # no other strategy takes the layout
    GRAPH = "graph"  # the tree kernel, replayed in a captured graph: nobody chose


class Fallback(StrEnum):
    """Why a choice is a fallback."""

    NONE = ""
    REFUSED = "refused"  # the forced kernel cannot run the layout
    WITHHELD = "withheld"  # the forced kernel is left out on purpose
    LACKING = "lacking"  # the device's fast kernels are not installed
