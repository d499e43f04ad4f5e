"""Plans of the tree kernel on the host: by the planner in C, or in numpy where there is none."""

import logging
from dataclasses import dataclass, replace

from stemserve.kernels.c_library import CLibraryError
from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.fixed_tables import fixed_plan
from stemserve.kernels.codec.host_tables import ArraySections, HostTables, host_tables
from stemserve.kernels.codec.native import NativePlanner
from stemserve.kernels.codec.pairs import Pairing, long_enough, pair_bins
from stemserve.kernels.codec.pieces import divide
from stemserve.kernels.codec.streams import tile_streams
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


def numpy_paired(
    layout: AttentionLayout,
    group: int,
    bins: int,
    costs: PieceCosts,
    division: Division,
    pairing: Pairing,
) -> HostTables:
    """The same with pairs of bins, where these are long enough."""
    host = numpy_plan(layout, group, bins, 0, replace(costs, wide=pairing.wide), division)
    if long_enough(host, pairing):
        records = pair_bins(host, bins)
        sections = ArraySections(of_streams=host.streams, of_pieces=host.pieces, of_records=records)
        return replace(host, sections=sections, paired=True)
    if not host.streams.num_wide:
        return host
    return numpy_plan(layout, group, bins, 0, costs, division)


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
    pairing: Pairing | None = None  # of bins that read alike, for the kernel of codec_hopper.cu
    numpy_plans: int = 0  # made without the planner in C
    _native: NativePlanner | None = None
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
        if self._native is not None:
            return self._native.plan(layout)
        if self.division.fixed_split:
            return fixed_plan(layout, self.group, self.bins, self.division)
        how = (self.group, self.bins, self.window, self.costs, self.division)
        if not self.numpy_plans:
            try:
                self._native = NativePlanner(*how, self.pairing)
            except CLibraryError as error:
                log.warning("tree decode is planned in numpy, several times slower: %s", error)
            else:
                return self._native.plan(layout)
        self.numpy_plans += 1
        if self.pairing is None:
            return numpy_plan(layout, *how)
        return numpy_paired(layout, self.group, self.bins, self.costs, self.division, self.pairing)
