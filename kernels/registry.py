"""Every strategy that this package has for a device, by phase and kernel."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stemserve.kernels.codec.division import PieceCosts
from stemserve.kernels.fixed.registry import fixed_strategies
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.cost_model import Costs, CostTable
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.kernels.torch_paths.cascade import CascadeAttention
from stemserve.kernels.torch_paths.codec import CodecAttention
from stemserve.kernels.torch_paths.codec_plan import CodecLimits
from stemserve.kernels.torch_paths.custom_mask import CustomMaskAttention
from stemserve.kernels.torch_paths.multi_item import MultiItemAttention
from stemserve.kernels.torch_paths.naive import NaiveAttention
from stemserve.kernels.torch_paths.paged import PagedAttention
from stemserve.kernels.torch_paths.ragged import RaggedAttention
from stemserve.kernels.torch_paths.split import SplitAttention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySet:
    strategies: dict[tuple[Phase, Kernel], Strategy]
    lacking: str | None  # why torch's paths run where the device could do better; None: they do not
    # Left out, because their results depend on the batch.
    withheld: frozenset[tuple[Phase, Kernel]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Formats of what attention reads."""

    of_rows: torch.dtype  # q, the step's own K and V, the result
    of_pages: torch.dtype


PREFILL = (Kernel.NAIVE, Kernel.SPLIT, Kernel.RAGGED, Kernel.MULTI_ITEM, Kernel.CUSTOM_MASK)
DECODE = (Kernel.PAGED,)
BOTH = (Kernel.CASCADE, Kernel.CODEC)


def strategies(
    shape: HeadShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    costs: Costs,
    page_dtype: torch.dtype | None = None,
    limits: CodecLimits | None = None,
) -> dict[tuple[Phase, Kernel], Strategy]:
    """The strategies of `strategy_set`."""
    known = strategy_set(
        shape, device=device, dtype=dtype, costs=costs, page_dtype=page_dtype, limits=limits
    )
    return known.strategies


def strategy_set(
    shape: HeadShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    costs: Costs,
    page_dtype: torch.dtype | None = None,  # None: as q
    limits: CodecLimits | None = None,
) -> StrategySet:
    """`limits` of the torch codec's task division; None: the device runs one task at a time.

    One task is the case of a CPU, where each call is spread over all threads.
    """
    numbers = Numbers(of_rows=dtype, of_pages=page_dtype or dtype)
    flashinfer, lacking = _flashinfer(shape, device, numbers, costs)
    torch_codec = CodecAttention(shape, device, costs, limits or CodecLimits(workers=1))
    available: Sequence[Strategy] = (
        # Of strategies that cost the same, the first is chosen.
        CascadeAttention(shape, device, Phase.PREFILL),
        NaiveAttention(shape, device),
        SplitAttention(shape, device),
        RaggedAttention(shape, device),
        MultiItemAttention(shape, device),
        CustomMaskAttention(shape, device),
        PagedAttention(shape, device),
        CascadeAttention(shape, device, Phase.DECODE),
        *(_codec(shape, device, numbers, costs) or [torch_codec]),
        *flashinfer,
        *_dense(shape, device, dtype),
    )
    return StrategySet(
        strategies={(strategy.phase, strategy.kernel): strategy for strategy in available},
        lacking=lacking,
    )


def deterministic_set(shape: HeadShape, *, device: torch.device, dtype: torch.dtype) -> StrategySet:
    """One strategy for each phase, whose results do not depend on the rest of the batch."""
    known = {(of.phase, of.kernel): of for of in fixed_strategies(shape, device, dtype)}
    every = [(Phase.PREFILL, kernel) for kernel in PREFILL + BOTH]
    every += [(Phase.DECODE, kernel) for kernel in DECODE + BOTH]
    return StrategySet(strategies=known, lacking=None, withheld=frozenset(every) - known.keys())


def _flashinfer(
    shape: HeadShape, device: torch.device, numbers: Numbers, costs: Costs
) -> tuple[Sequence[Strategy], str | None]:
    """In place of torch's paths, and why not where they would be expected."""
    dtype = numbers.of_rows
    if device.type != "cuda" or dtype == torch.float32:  # FlashInfer has no float32
        return (), None
    from stemserve.kernels.flashinfer_paths.backends import FlashInferUnavailable
    from stemserve.kernels.flashinfer_paths.registry import flashinfer_strategies

    try:
        found = flashinfer_strategies(shape, device, dtype, costs, page_dtype=numbers.of_pages)
        return found, None
    except FlashInferUnavailable as error:
        log.warning("attention runs on torch's slower paths without FlashInfer: %s", error)
        return (), str(error)


def _dense(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Sequence[Strategy]:
    """Cascade and split prefill in place of torch's; nothing where the kernel does not run."""
    if device.type != "cuda":
        return ()
    from stemserve.kernels.dense.attention import dense_strategies

    return dense_strategies(shape, device, dtype)


def _codec(
    shape: HeadShape, device: torch.device, numbers: Numbers, costs: Costs
) -> Sequence[Strategy]:
    """The tree kernel in Triton; nothing on a CPU, where Triton need not be installed."""
    if device.type != "cuda":
        return ()
    from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers

    formats = DecodeNumbers(dtype=numbers.of_rows, page_dtype=numbers.of_pages)
    measured = costs.engines.get("tree") if isinstance(costs, CostTable) else None
    pieces = PieceCosts.of_engine(measured)
    return [CodecDecode(shape, device, formats, phase=phase, costs=pieces) for phase in Phase]
