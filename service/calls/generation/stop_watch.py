"""End samples at their stop strings when their tokens come, whether or not anybody reads them."""

from collections.abc import Callable, Sequence

from stemserve.service.request import GenerateChunk
from stemserve.service.text.sample_text import SampleText


class StopWatch:
    """Of the samples of one call, which has stop strings."""

    def __init__(self, texts: Sequence[SampleText], *, stop: Callable[[int], object]) -> None:
        """`texts` of the samples, used by nobody else. `stop` hears of each sample once."""
        self._texts = texts
        self._stop = stop

    def completes(self, chunk: GenerateChunk) -> bool:
        """Whether a stop string of a sample is complete with these tokens."""
        found = False
        for news in chunk.news:
            text = self._texts[news.sample]
            if text.finish:
                continue
            text.feed(news)
            if text.stopped_by_text:
                self._stop(news.sample)
                found = True
        return found
