"""The command that scores items."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client.routing import route
from stemserve.service.commands.call import (
    SERVER,
    TIMEOUT_S,
    AsJson,
    Channel,
    Server,
    Timeout,
    call,
)
from stemserve.service.commands.chat import Chat, ChatKwargs, ChatOptions, Tools
from stemserve.service.commands.options import (
    Contexts,
    Items,
    ItemsFile,
    Kernel,
    Labels,
    PrefixIds,
    Priority,
    Query,
    Sequences,
    kernel_value,
    read_items,
    whole_uint32,
)
from stemserve.service.commands.plain_json import print_json
from stemserve.service.commands.score_mode import ScoreMode
from stemserve.service.commands.usage import usage_line

SHOWN_CHARACTERS = 120

ItemMarker = Annotated[
    str, typer.Option(metavar="TEXT", help="With --chat: where in a message the items stand.")
]
ItemFirst = Annotated[
    bool,
    typer.Option(
        "--item-first", help="Sequences are context, item, query instead of context, query, item."
    ),
]
Classify = Annotated[bool, typer.Option("--classify", help="Use the model's classification head.")]
Softmax = Annotated[
    bool,
    typer.Option("--apply-softmax", help="Probabilities over the labels only, or the classes."),
]
Temperature = Annotated[float, typer.Option(metavar="X", help="Of the labels' softmax; 0 means 1.")]
TokenLogprobs = Annotated[
    bool, typer.Option("--token-logprobs", help="With --json: a value for each token too.")
]
Normalized = Annotated[
    bool, typer.Option("--length-normalized", help="Divide a log-likelihood by its tokens.")
]
Truncate = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole_uint32,
        help="Cut items after N tokens instead of refusing longer ones.",
    ),
]
TopN = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole_uint32,
        help="Only the best N items, best first; 0: all, in order.",
    ),
]


def score(
    query: Query = "",
    context: Contexts = None,
    prefix_id: PrefixIds = None,
    items: ItemsFile = None,
    item: Items = None,
    labels: Labels = None,
    classify: Classify = False,
    item_first: ItemFirst = False,
    chat: Chat = None,
    tools: Tools = None,
    chat_kwargs: ChatKwargs = None,
    item_marker: ItemMarker = "",
    apply_softmax: Softmax = False,
    temperature: Temperature = 0.0,
    token_logprobs: TokenLogprobs = False,
    length_normalized: Normalized = False,
    truncate_item_tokens: Truncate = None,
    top_n: TopN = 0,
    priority: Priority = 0,
    kernel: Kernel = None,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Score many items that continue one text, or several.

    With --labels: the probability of each label after the item. Without: the log-likelihood of the
    item itself. Several contexts: every item is scored with each of them. With --chat the items
    continue a chat, or stand in a message of it, where --item-marker does.

    The exit code is 1 if no item could be scored.

    \b
    Examples:
      stemserve score --query "The capital of France is" --item " Paris" --item " Rome"
      stemserve score --query "Is it a fruit? " --items words.txt --labels " yes, no" --json
    """
    mode = ScoreMode(
        labels=labels,
        classify=classify,
        apply_softmax=apply_softmax,
        temperature=temperature,
        token_logprobs=token_logprobs,
        length_normalized=length_normalized,
    )
    sequences = Sequences(
        query=query,
        contexts=tuple(context or ()),
        prefix_ids=tuple(prefix_id or ()),
        items=read_items(items, item),
        item_first=item_first,
    )
    request = sequences.request()
    messages = ChatOptions(chat=chat, tools=tools, kwargs=chat_kwargs).request()
    if messages is not None:
        request.chat.CopyFrom(messages)
    request.item_marker = item_marker
    mode.write(request)
    if truncate_item_tokens is not None:
        request.truncate_item_tokens = truncate_item_tokens
    request.top_n = top_n
    request.priority = priority
    request.kernel = kernel_value(kernel)
    response = call(server, lambda channel: _score(channel, request, timeout))
    _print(request, response, as_json)
    if len(response.errors) == len(request.items):
        raise typer.Exit(1)


async def _score(
    channel: Channel, request: inference_pb2.ScoreRequest, timeout_s: float
) -> inference_pb2.ScoreResponse:
    return await inference_pb2_grpc.InferenceStub(channel).Score(
        request, timeout=timeout_s, metadata=route(request)
    )


def _print(
    request: inference_pb2.ScoreRequest, response: inference_pb2.ScoreResponse, json_wanted: bool
) -> None:
    if json_wanted:
        print_json(response)
        return
    console = Console()
    console.print(_table(request, response))
    for error in response.errors:
        console.print(f"item {error.index}: {error.message}", style="red", markup=False)
    console.print(
        usage_line(response.usage, response.timing), style="dim", markup=False, soft_wrap=True
    )


def _table(request: inference_pb2.ScoreRequest, response: inference_pb2.ScoreResponse) -> Table:
    width = response.shape[1] if len(response.shape) > 1 else 1
    table = Table(box=None, pad_edge=False)
    table.add_column("item", overflow="fold")
    if len(request.contexts) > 1:
        table.add_column("context", justify="right")
    for name in _columns(request, width):
        table.add_column(name, justify="right")
    if response.label_mass:
        table.add_column("label mass", justify="right")
    rows = len(response.scores) // width if width else 0
    for row, index in enumerate(response.item_index or range(rows)):
        cells = [shown_item(request.items[index])]
        if len(request.contexts) > 1:
            cells.append(str(request.item_context[index]))
        cells += [f"{score:.4f}" for score in response.scores[row * width : (row + 1) * width]]
        if response.label_mass:
            cells.append(f"{response.label_mass[row]:.4f}")
        table.add_row(*cells)
    return table


def shown_item(item: str) -> str:
    """The item in quotes; of a document its beginning."""
    return repr(item if len(item) <= SHOWN_CHARACTERS else f"{item[:SHOWN_CHARACTERS]}...")


def _columns(request: inference_pb2.ScoreRequest, width: int) -> list[str]:
    match request.WhichOneof("mode"):
        case "label_probabilities":
            return [repr(label) for label in request.label_probabilities.labels]
        case "log_likelihood":
            return ["log-likelihood"]
        case _:
            return [f"class {number}" for number in range(width)]
