"""What a Generate call asks of its stream of messages, and what became of it."""

from collections.abc import Callable

from stemserve.service.request import GenerateChunk

Completes = Callable[[GenerateChunk], bool]


def _never(chunk: GenerateChunk) -> bool:
    return False


class StreamPace:
    """Of one call. The first tokens, a sample's last ones and the usage never wait."""

    def __init__(self, *, least_tokens: int = 0, completes: Completes = _never) -> None:
        """`least_tokens` of one sample make a message; 0: as the load of the server has it.
        `completes` hears each chunk as it comes, and says whether a sample ends with it."""
        self.least_tokens = least_tokens
        self.completes = completes
        self.joined_by_pace = 0  # chunks that came in a message with one before, for it had to wait
        self.joined_behind = 0  # because the client had not taken the message before
