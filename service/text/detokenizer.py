"""Turn one sample's tokens into text as they come, whole characters only."""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """The pieces, joined, equal the bytes of all tokens decoded at once.

    Bytes that can still become a character are held; bytes that cannot are U+FFFD, as in
    `bytes.decode(errors="replace")`. Only the sample's own tokens count: a character that the
    prompt began is not completed.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        # The logits of some models are wider than their vocabulary.
        parts = [table[token_id] for token_id in token_ids if token_id < len(table)]
        return self._decoder.decode(b"".join(parts))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
