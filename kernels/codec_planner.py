"""Plans of the tree kernel on the host: by the planner in C, or in numpy where there is none."""

import logging
from dataclasses import dataclass, field, replace

from stemserve.kernels.c_library import CLibraryError
from stemserve.kernels.codec_division import Division, PieceCosts
from stemserve.kernels.codec_fixed_tables import fixed_plan
from stemserve.kernels.codec_native import NativePlanner
from stemserve.kernels.codec_pairs import WIDE_TOKENS, pair_bins, shares_enough
from stemserve.kernels.codec_pieces import divide
from stemserve.kernels.codec_streams import tile_streams
from stemserve.kernels.codec_tables import HostTables, host_tables
from stemserve.kernels.layout import AttentionLayout

log = logging.getLogger(__name__)


def numpy_plan(
    layout: AttentionLayout,
    group: int,
    bins: int,
    window: int,
    costs: PieceCosts,
    division: Division,
) -> HostTables:
    """What the planner in C does, to read and to compare."""
    streams = tile_streams(layout, group, bins if division.split else 0, window)
    pieces = divide(streams, group, layout.page_size, bins, costs, division)
    return host_tables(layout, streams, pieces, group, bins)


@dataclass(kw_only=True)
class Planner:
    """Plans layouts for one shape of heads.

    The planner in C is compiled when the first plan is made.
    """

    group: int
    bins: int
    window: int
    costs: PieceCosts
    division: Division
    pairs: bool = False  # put bins together that read alike, for the kernel of codec_hopper.cu
    numpy_plans: int = 0  # made without the planner in C
    _natives: dict[PieceCosts, NativePlanner] = field(
        default_factory=dict[PieceCosts, NativePlanner]
    )
    _last: HostTables | None = None

    def take(self, layout: AttentionLayout) -> HostTables:
        """The plan of a layout, which may have been made to tell its work."""
        found = self.plan(layout)
        self._last = None
        return found

    def plan(self, layout: AttentionLayout) -> HostTables:
        """The same, remembered until it is taken."""
        last = self._last
        if last is None or last.layout is not layout:
            last = self._last = self._plan(layout)
        return last

    def _plan(self, layout: AttentionLayout) -> HostTables:
        if self.division.fixed_split:
            return fixed_plan(layout, self.group, self.bins, self.division)
        if not self.pairs:
            return self._divided(layout, self.costs)
        costs = replace(self.costs, wide=WIDE_TOKENS)
        host = self._divided(layout, costs)
        native = self._natives.get(costs)
        records = native.pair_bins(host) if native else pair_bins(host, self.bins)
        paired = replace(host, records=records, paired=True)
        if shares_enough(paired):
            return paired
        return self._divided(layout, self.costs) if host.streams.num_wide else host

    def _divided(self, layout: AttentionLayout, costs: PieceCosts) -> HostTables:
        how = (self.group, self.bins, self.window, costs, self.division)
        if costs not in self._natives and not self.numpy_plans:
            try:
                self._natives[costs] = NativePlanner(*how)
            except CLibraryError as error:
                log.warning("tree decode is planned in numpy, several times slower: %s", error)
        if costs in self._natives:
            return self._natives[costs].plan(layout)
        self.numpy_plans += 1
        return numpy_plan(layout, *how)
