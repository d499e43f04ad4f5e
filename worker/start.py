"""Makes a runner from the configuration: device, model, KV cache, costs and strategies."""

import logging
import time
from dataclasses import dataclass

import torch

from stemserve.kernels.cost_model import CostTable, CostTableError, load_cost_table
from stemserve.kernels.registry import strategies
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.config import ConfigError, WorkerConfig
from stemserve.worker.costs import device_costs
from stemserve.worker.dispatch import Dispatcher
from stemserve.worker.kv_pool import MAX_SLOTS, KvPool, KvShape
from stemserve.worker.memory import free_bytes
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.models.weights import Progress
from stemserve.worker.runner import ModelRunner
from stemserve.worker.sampler import Sampler
from stemserve.worker.scorer import Scorer
from stemserve.worker.step_checks import StepLimits

log = logging.getLogger(__name__)

GPU_KV_SHARE = 0.85  # of what the weights leave
CPU_KV_SHARE = 0.25
CPU_KV_BYTES = 4 << 30  # at most, where nobody asks for more
STEPS_IN_FLIGHT = 2
MIB = 1 << 20
