"""Arrays to and from the device, without waiting for what runs there."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array must not change afterwards: on a CPU it is shared."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    # From pageable memory the copy would wait for the steps before it.
    return host.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Complete once an event that is recorded after this call has passed."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
