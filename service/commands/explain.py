"""The command that shows what a request would do, without running it."""

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from stemserve.proto.v1 import info_pb2, info_pb2_grpc
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
from stemserve.service.commands.options import (
    Contexts,
    Items,
    ItemsFile,
    Kernel,
    Labels,
    MaxNewTokens,
    PrefixIds,
    Prompt,
    Query,
    Samples,
    Sequences,
    kernel_name,
    kernel_value,
    read_items,
    read_labels,
)
from stemserve.service.commands.plain_json import print_json
from stemserve.service.commands.usage import readable_bytes

ROOT = -1


def explain(
    query: Query = "",
    context: Contexts = None,
    prefix_id: PrefixIds = None,
    items: ItemsFile = None,
    item: Items = None,
    labels: Labels = None,
    prompt: Prompt = "",
    n: Samples = 1,
    max_new_tokens: MaxNewTokens = 128,
    kernel: Kernel = None,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the prefix forest of a request and what each attention strategy would cost for it.

    With items it is a Score call, with --prompt a Generate call: its prefill and first decode step.
    Nothing is run.

    \b
    Examples:
      stemserve explain --query "The capital of France is" --item " Paris" --item " Rome"
      stemserve explain --prompt "Once upon a time" --n 16
    """
    given = read_items(items, item)
    if bool(given) == bool(prompt):
        raise typer.BadParameter("give items (a Score call) or --prompt (a Generate call)")
    request = info_pb2.ExplainRequest()
    if given:
        sequences = Sequences(
            query=query,
            contexts=tuple(context or ()),
            prefix_ids=tuple(prefix_id or ()),
            items=given,
        )
        request.score.CopyFrom(sequences.request())
        request.score.kernel = kernel_value(kernel)
        if labels is None:
            request.score.log_likelihood.SetInParent()
        else:
            request.score.label_probabilities.labels.extend(read_labels(labels))
    else:
        request.generate.n = n
        request.generate.max_new_tokens = max_new_tokens
        request.generate.kernel = kernel_value(kernel)
        request.generate.prompt.text = prompt
        request.generate.prompt.prefix_id = (prefix_id or [""])[0]
    _print(call(server, lambda channel: _explain(channel, request, timeout)), as_json)


async def _explain(
    channel: Channel, request: info_pb2.ExplainRequest, timeout_s: float
) -> info_pb2.ExplainResponse:
    return await info_pb2_grpc.InfoStub(channel).Explain(
        request, timeout=timeout_s, metadata=route(request)
    )


def _print(response: info_pb2.ExplainResponse, json_wanted: bool) -> None:
    if json_wanted:
        print_json(response)
        return
    console = Console()
    console.print(
        f"{counted(len(response.steps), 'step')}; {response.cached_tokens} tokens cached, "
        f"{response.computed_tokens} to compute"
    )
    for number, step in enumerate(response.steps, start=1):
        console.print(_forest(step, f"step {number}: {counted(step.rows, 'row')}"))
        for group in step.groups:
            console.print(_title(group), markup=False, soft_wrap=True)
            console.print(_strategies(group))


def _forest(step: info_pb2.ExplainedStep, title: str) -> Tree:
    tree = Tree(title)
    branches = {ROOT: tree}
    # Parents come before their children.
    for number, node in enumerate(step.nodes):
        cached = f", {node.cached_tokens} cached" if node.cached_tokens else ""
        text = f"{counted(node.kv_tokens, 'token')}{cached}, read by {counted(node.rows, 'row')}"
        branches[number] = branches[node.parent].add(text)
    return tree


def counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _title(group: info_pb2.AttentionGroup) -> str:
    return (
        f"{group.phase}: {counted(group.rows, 'row')} in {counted(group.segments, 'segment')}; "
        f"{kernel_name(group.chosen)} ({group.reason}), "
        f"{readable_bytes(group.kv_avoided_bytes)} of KV reads avoided"
    )


def _strategies(group: info_pb2.AttentionGroup) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("strategy")
    on_gpu = any(cost.device_seconds for cost in group.strategies)
    table.add_column("predicted", justify="right")
    if on_gpu:
        table.add_column("host", justify="right")
        table.add_column("device", justify="right")
    table.add_column("KV read", justify="right")
    table.add_column("cannot run because", overflow="fold")
    for cost in sorted(group.strategies, key=lambda cost: (cost.refusal, cost.predicted_seconds)):
        chosen = " *" if cost.kernel == group.chosen else ""
        seconds = [cost.predicted_seconds]
        if on_gpu:
            seconds += [cost.host_seconds, cost.device_seconds]
        numbers = [f"{s * 1e6:.1f} us" for s in seconds] + [readable_bytes(cost.kv_read_bytes)]
        if cost.refusal:
            numbers = [""] * len(numbers)
        table.add_row(kernel_name(cost.kernel) + chosen, *numbers, escape(cost.refusal))
    return table
