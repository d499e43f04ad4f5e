"""Host arrays as device tensors, without waiting for what the device runs."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def device_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Of the array's shape and dtype. It must not change afterwards: on a CPU it is shared."""
    host: Tensor = torch.from_numpy(np.ascontiguousarray(array))  # pyright: ignore[reportUnknownMemberType]
    if device.type == "cpu":
        return host
    # From pageable memory the copy would wait for the work before it.
    return host.pin_memory().to(device, non_blocking=True)


def index_tensor(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """As int64, which torch indexes with."""
    return device_tensor(values.astype(np.int64), device)
