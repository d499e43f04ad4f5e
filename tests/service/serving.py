"""The public services over a bigram engine, on a real socket."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry
from tests.service.bigram_engine import BigramEngine
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from stemserve.service.calls.services import SERVICES, CallThreads, Services
from stemserve.service.client import PLAINTEXT, Access, Client
from stemserve.service.client.channel import OPTIONS, open_channel
from stemserve.service.config.access import AuthConfig, TenantConfig, TlsConfig
from stemserve.service.config.server import ServerConfig
from stemserve.service.constraints.compile_queue import CompileQueue
from stemserve.service.limits import Limits
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving import reflection
from stemserve.service.serving.authentication import authentication
from stemserve.service.serving.call_gate import CallGate
from stemserve.service.serving.call_status import CallStatus
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.serving.health import Health
from stemserve.service.serving.server import transport_options
from stemserve.service.serving.tls import server_credentials
from stemserve.service.text.token_bytes import token_bytes
from stemserve.service.text.tokenizer import Encoders, Tokenizer

BYTE_VOCABULARY = 258
BOS_ID = 256
EOS_ID = 257


@dataclass(frozen=True, kw_only=True)
class Served:
    target: str
    client: Client
    channel: grpc.aio.Channel
    engine: BigramEngine
    registry: CollectorRegistry

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"stemserve_{name}", labels) or 0.0


def byte_encoder() -> Encoder:
    """One token a byte, then BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken("<bos>", special=True), AddedToken("<eos>")]
    )
    return encoder


def byte_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    encoder = byte_encoder()
    return Tokenizer(
        encoders=Encoders(front=encoder, continuation=encoder),
        token_bytes=token_bytes(encoder),
        bos_id=BOS_ID if adds_bos else None,
        eos_ids=frozenset({EOS_ID}),
    )


def fixed_tokens(*texts: bytes, eos_id: int | None = None) -> Tokenizer:
    """Tokens of given texts; it cannot encode."""
    eos_ids = frozenset[int]() if eos_id is None else frozenset({eos_id})
    return Tokenizer(encoders=None, token_bytes=texts, eos_ids=eos_ids)


@asynccontextmanager
async def serving(
    engine: BigramEngine,
    tokenizer: Tokenizer | None = None,
    *,
    limits: Limits | None = None,
    auth: AuthConfig | None = None,
    tls: TlsConfig | None = None,
    server_config: ServerConfig | None = None,
    tenants: Mapping[str, TenantConfig] | None = None,
    watch: CallWatch | None = None,
    access: Access = PLAINTEXT,  # of the client and channel that are yielded
) -> AsyncGenerator[Served, None]:
    limits = limits or Limits()
    registry = CollectorRegistry()
    tenants = tenants or {}
    metrics = Metrics(registry, tuple(tenants))
    config = server_config or ServerConfig()
    weights = {name: tenant.weight for name, tenant in tenants.items()}
    gate = CallGate(max_calls=limits.max_concurrent_calls, weights=weights)
    gate.open()
    server = grpc.aio.server(
        interceptors=[
            CallStatus(metrics, default_deadline_s=config.default_deadline_s, watch=watch),
            *authentication(auth or AuthConfig(), tenants, metrics),
            gate,
        ],
        options=transport_options(config, limits),
    )
    server.add_generic_rpc_handlers(reflection.handlers(SERVICES))
    server.add_generic_rpc_handlers((Health(SERVICES, note_serving=metrics.ready).handler(),))
    with ThreadPoolExecutor(1) as executor:
        queue = CompileQueue(executor, weights=weights)
        services = Services(
            engine,
            tokenizer=tokenizer or byte_tokenizer(),
            threads=CallThreads(short=executor, long=executor, compile_queue=queue),
            limits=limits,
            metrics=metrics,
            watch=watch,
        )
        await services.prepare()
        services.add_to(server)
        async with (
            _started(server, services, tls or TlsConfig()) as target,
            Client(target, access=access) as client,
            open_channel(target, access, OPTIONS) as channel,
        ):
            yield Served(
                target=target, client=client, channel=channel, engine=engine, registry=registry
            )


@asynccontextmanager
async def _started(
    server: grpc.aio.Server, services: Services, tls: TlsConfig
) -> AsyncGenerator[str, None]:
    """Yields the address that clients name."""
    keeping = asyncio.create_task(services.keep())
    credentials = server_credentials(tls)
    address = "127.0.0.1:0"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    yield f"localhost:{port}"
    keeping.cancel()
    await server.stop(None)
