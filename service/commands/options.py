"""What the options of score, generate and explain mean as requests."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.config.server import KERNELS

Query = Annotated[str, typer.Option(metavar="TEXT", help="Text that all items continue.")]
Contexts = Annotated[
    list[str] | None,
    typer.Option(
        "--context", metavar="TEXT", help="Text before the query; given often: several contexts."
    ),
]
PrefixIds = Annotated[
    list[str] | None,
    typer.Option(
        "--prefix-id", metavar="ID", help="A registered prefix before the query; also often."
    ),
]
ItemsFile = Annotated[
    str | None,
    typer.Option(
        "--items",
        metavar="FILE",
        help="Items, one a line, blank lines skipped; - reads standard input.",
    ),
]
Items = Annotated[
    list[str] | None, typer.Option("--item", metavar="TEXT", help="One item; also often.")
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="TEXTS",
        help='Labels, split at commas. Spaces count: " yes, no" is " yes" and " no".',
    ),
]
Kernel = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"Force a strategy, for debugging: {', '.join(KERNELS)}."),
]


def _whole(lowest: int, highest: int) -> Callable[[str], int]:
    """A number that fits the request's field."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not a whole number") from error
        if not lowest <= number <= highest:
            raise typer.BadParameter(f"{number} is not in {lowest} .. {highest}")
        return number

    return parse


whole_int32 = _whole(-(1 << 31), (1 << 31) - 1)
whole_uint32 = _whole(0, (1 << 32) - 1)
whole_uint64 = _whole(0, (1 << 64) - 1)

Priority = Annotated[int, typer.Option(metavar="N", parser=whole_int32, help="Higher goes first.")]
Prompt = Annotated[
    str, typer.Option(metavar="TEXT", help="Text to continue; it follows --prefix-id.")
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="N", parser=whole_uint32, help="Tokens to generate at most.")
]
Samples = Annotated[
    int, typer.Option("--n", metavar="N", parser=whole_uint32, help="Samples over the one prompt.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The contexts and items of a Score call as they were typed."""

    query: str
    contexts: tuple[str, ...]
    prefix_ids: tuple[str, ...]
    items: tuple[str, ...]
    item_first: bool = False

    def request(self) -> inference_pb2.ScoreRequest:
        """Every item with every context: all items of the first, then of the second, ..."""
        if not self.items:
            raise typer.BadParameter("give items with --items FILE or --item TEXT")
        tail = "" if self.item_first else self.query
        contexts = [
            *(inference_pb2.Context(prefix_id=name, text=tail) for name in self.prefix_ids),
            *(inference_pb2.Context(text=text + tail) for text in self.contexts),
        ]
        if not contexts:
            return inference_pb2.ScoreRequest(
                query=self.query, items=self.items, item_first=self.item_first
            )
        numbers = [number for number in range(len(contexts)) for _ in self.items]
        return inference_pb2.ScoreRequest(
            query=self.query if self.item_first else "",
            contexts=contexts,
            items=self.items * len(contexts),
            item_context=numbers if len(contexts) > 1 else (),
            item_first=self.item_first,
        )


def read_items(file: str | None, items: list[str] | None) -> tuple[str, ...]:
    """Of the file first; its blank lines are skipped, spaces around an item are kept."""
    if file is None:
        return tuple(items or ())
    # Not splitlines: a form feed or a Unicode line separator belongs to its item.
    lines = [line for line in read_text("--items", file).split("\n") if line.strip()]
    if not lines and not items:
        raise typer.BadParameter(f"--items {file} holds no items")
    return (*lines, *(items or ()))


def read_text(option: str, file: str) -> str:
    """A UTF-8 file, or standard input for "-"; line ends become newlines, a BOM is dropped."""
    if file == "-" and sys.stdin is None:
        raise typer.BadParameter(f"cannot read {option} -: standard input is closed")
    try:
        # Not as text: what standard input takes for its encoding and line ends may be another.
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"cannot read {option} {file}: it is not UTF-8 text") from error
    except OSError as error:
        raise typer.BadParameter(f"cannot read {option} {file}: {error.strerror}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def kernel_value(name: str | None) -> inference_pb2.Kernel.ValueType:
    if name is None:
        return inference_pb2.KERNEL_UNSPECIFIED
    if name not in KERNELS:
        raise typer.BadParameter(f"kernel {name!r} is not one of {', '.join(KERNELS)}")
    return inference_pb2.Kernel.Value(f"KERNEL_{name.upper()}")


def kernel_name(kernel: inference_pb2.Kernel.ValueType) -> str:
    return inference_pb2.Kernel.Name(kernel).removeprefix("KERNEL_").lower()


def read_labels(text: str) -> list[str]:
    labels = text.split(",")
    if not all(labels):
        raise typer.BadParameter(f"--labels {text!r} holds an empty label")
    return labels
