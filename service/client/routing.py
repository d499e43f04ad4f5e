"""The key by which a router sends the calls of one prefix to one server: metadata `x-prefix-id`.

It is a hint. A wrong one costs cache hits, no more.
"""

import hashlib
import re

from google.protobuf.message import Message

from stemserve.proto.v1 import inference_pb2, info_pb2, prefixes_pb2
from stemserve.service.metadata_keys import ROUTING_KEY

# Of a prompt: turns of one conversation, and conversations with one system prompt, then meet.
HEAD_CHARACTERS = 1_024
HEAD_BYTES = 4 * 256  # of a prompt's token ids
ROOT_END = "."  # in an id: what stands before it names the root of a tree of prefixes
DIGEST_CHARACTERS = 24
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,128}")


def route(request: Message) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; none where nothing says what it shares with others."""
    key = _key(request)
    return ((ROUTING_KEY, key),) if key else ()


def prefix_ids(request: Message) -> tuple[str, ...]:
    """The registered prefixes that a request names."""
    match request:
        case inference_pb2.ScoreRequest():
            ids = tuple(context.prefix_id for context in request.contexts)
        case inference_pb2.GenerateRequest():
            ids = (request.prompt.prefix_id,)
        case info_pb2.ExplainRequest():
            return prefix_ids(_explained(request))
        case prefixes_pb2.RegisterRequest():
            ids = (request.parent_prefix_id,)
        case prefixes_pb2.GetRequest() | prefixes_pb2.RenewRequest():
            ids = (request.prefix_id,)
        case _:
            ids = ()
    return tuple(dict.fromkeys(name for name in ids if name))


def digest(*parts: str | bytes) -> str:
    """Of all parts, each apart from the next."""
    state = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        state.update(len(content).to_bytes(8, "little") + content)
    return state.hexdigest()[:DIGEST_CHARACTERS]


def root(prefix_id: str) -> str:
    return prefix_id.partition(ROOT_END)[0] or prefix_id


def _key(request: Message) -> str:
    match request:
        case inference_pb2.ScoreRequest():
            first = request.contexts[0] if request.contexts else inference_pb2.Context()
            text = request.query or _head(request.chat)
            return _context_key(first) or _text_key(text)
        case inference_pb2.GenerateRequest():
            return _context_key(request.prompt, head=True) or _text_key(_head(request.chat))
        case info_pb2.ExplainRequest():
            return _key(_explained(request))
        case prefixes_pb2.RegisterRequest():
            named = request.prefix_id or request.parent_prefix_id
            return _id_key(named) or _text_key(request.text) or _text_key(request.tokens)
        case prefixes_pb2.GetRequest() | prefixes_pb2.RenewRequest():
            return _id_key(request.prefix_id)
        case prefixes_pb2.ReleaseRequest():
            return _id_key(request.prefix_id)
        case _:
            return ""


def _explained(request: info_pb2.ExplainRequest) -> Message:
    return request.generate if request.HasField("generate") else request.score


def _context_key(context: inference_pb2.Context, *, head: bool = False) -> str:
    text, tokens = context.text, context.tokens
    if head:
        text, tokens = text[:HEAD_CHARACTERS], tokens[:HEAD_BYTES]
    return _id_key(context.prefix_id) or _text_key(text) or _text_key(tokens)


def _head(chat: inference_pb2.Chat) -> str:
    """The beginning of what the template is given."""
    messages = "".join(f"{message.role}\n{message.content}\n" for message in chat.messages)
    return (chat.tools + messages)[:HEAD_CHARACTERS]


def _id_key(prefix_id: str) -> str:
    """Ids of one tree have one key; a header holds no more than ASCII."""
    name = root(prefix_id)
    return name if not name or _PLAIN.fullmatch(name) else digest(name)


def _text_key(content: str | bytes) -> str:
    return digest(content) if content else ""
