"""The command that generates text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stemserve.proto.v1 import inference_pb2, inference_pb2_grpc
from stemserve.service.client.routing import route
from stemserve.service.commands.beam_options import beam_search
from stemserve.service.commands.call import (
    SERVER,
    TIMEOUT_S,
    AsJson,
    Channel,
    Server,
    Timeout,
    call,
)
from stemserve.service.commands.chat import Chat, ChatKwargs, ChatOptions, ContinueFinal, Tools
from stemserve.service.commands.joined_samples import JoinedSamples
from stemserve.service.commands.options import (
    Kernel,
    MaxNewTokens,
    Priority,
    Prompt,
    Samples,
    kernel_value,
    read_text,
    whole_uint32,
    whole_uint64,
)
from stemserve.service.commands.plain_json import print_json
from stemserve.service.commands.usage import usage_line

PrefixId = Annotated[str, typer.Option(metavar="ID", help="A registered prefix before the prompt.")]
Temperature = Annotated[
    float | None, typer.Option(metavar="X", help="0: the likeliest token; without: 1.")
]
AllowToken = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", parser=whole_uint32, help="Only such tokens may come; given often."),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole_uint32, help="Draw from the N likeliest tokens; 0: off."
    ),
]
TopP = Annotated[
    float | None, typer.Option(metavar="X", help="Draw from the likeliest tokens of mass X.")
]
MinP = Annotated[
    float, typer.Option(metavar="X", help="Drop tokens below X times the likeliest; 0: off.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Divides logits of tokens of the prompt and the text so far; without: 1."
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Taken off the logits of tokens of the text so far.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(metavar="X", help="The same, once for each time that a token came.")
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole_uint64, help="Same seed, same text; else random."),
]
MinNewTokens = Annotated[
    int, typer.Option(metavar="N", parser=whole_uint32, help="Tokens to generate at least.")
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; also often.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
]
StreamInterval = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole_uint32, help="Tokens a message; 0: as the server's load has it."
    ),
]
Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="With --json: the log-probability of each token.")
]
TopLogprobs = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole_uint32, help="With --json: the N likeliest tokens at each place."
    ),
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="TEXT", help="Generate one of these texts; given often."),
]
Regex = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Generate a text that the pattern matches.")
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Generate JSON of this file's schema."),
]
Grammar = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Generate a text of this file's Lark grammar."),
]
Trie = Annotated[
    str, typer.Option(metavar="ID", help="Generate a sequence of this trie; see stemserve tries.")
]

LogprobToken = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", parser=whole_uint32, help="With --json: its log-probability at each place."
    ),
]

PromptLogprobs = Annotated[
    bool, typer.Option("--prompt-logprobs", help="With --json: those of the prompt's tokens too.")
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole_uint32,
        help="Guess up to N tokens ahead from what repeats, and verify them; without: as served.",
    ),
]
Beams = Annotated[
    int,
    typer.Option(
        metavar="N", parser=whole_uint32, help="Search with N beams for the --n likeliest; 0: draw."
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="A score is log-probability / tokens ** X; without: 1."),
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="When a search ends: heuristic (without it), first, never."),
]


def generate(
    prompt: Prompt = "",
    prefix_id: PrefixId = "",
    chat: Chat = None,
    tools: Tools = None,
    chat_kwargs: ChatKwargs = None,
    continue_final: ContinueFinal = False,
    max_new_tokens: MaxNewTokens = 128,
    n: Samples = 1,
    temperature: Temperature = None,
    allow_token: AllowToken = None,
    top_k: TopK = 0,
    top_p: TopP = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    min_new_tokens: MinNewTokens = 0,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = False,
    top_logprobs: TopLogprobs = 0,
    logprob_token: LogprobToken = None,
    choice: Choice = None,
    regex: Regex = None,
    json_schema: JsonSchema = None,
    grammar: Grammar = None,
    trie: Trie = "",
    prompt_logprobs: PromptLogprobs = False,
    beams: Beams = 0,
    length_penalty: LengthPenalty = None,
    early_stopping: EarlyStopping = None,
    stream_interval: StreamInterval = 0,
    draft_tokens: DraftTokens = None,
    priority: Priority = 0,
    kernel: Kernel = None,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt or a chat, once or with several samples that share it.

    The text is printed as it comes; several samples are printed one after the other, each when it
    is done.

    \b
    Examples:
      stemserve generate --prompt "Once upon a time" --max-new-tokens 40
      stemserve generate --chat "Name three rivers." --n 4
      stemserve generate --prompt "The capital of France is" --temperature 0 --json
      stemserve generate --prompt "Is fire hot? " --choice yes --choice no
      stemserve generate --prompt "The capital of France is" --beams 4 --n 2
      stemserve generate --prompt "Best read:" --trie titles --beams 8 --n 3
    """
    messages = ChatOptions(
        chat=chat, tools=tools, kwargs=chat_kwargs, continue_final=continue_final
    ).request()
    if messages is not None and (prompt or prefix_id):
        raise typer.BadParameter("--chat cannot be given with --prompt or --prefix-id")
    context = inference_pb2.Context(prefix_id=prefix_id, text=prompt)
    request = inference_pb2.GenerateRequest(
        prompt=context if messages is None else None,
        chat=messages,
        sampling=inference_pb2.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            allowed_token_ids=allow_token or (),
        ),
        n=n,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logprob_token_ids=logprob_token or (),
        prompt_logprobs=prompt_logprobs,
        stream_interval=stream_interval,
        priority=priority,
        kernel=kernel_value(kernel),
        beam_search=beam_search(beams, length_penalty, early_stopping),
        draft_tokens=draft_tokens,
    )
    _constrain(request, choice or (), regex, json_schema, grammar, trie)
    call(server, lambda channel: _generate(channel, request, timeout, as_json))


def _constrain(
    request: inference_pb2.GenerateRequest,
    choice: Sequence[str],
    regex: str | None,
    json_schema: Path | None,
    grammar: Path | None,
    trie: str,
) -> None:
    asked = (bool(choice), regex is not None, bool(json_schema), bool(grammar), bool(trie))
    if sum(asked) > 1:
        raise typer.BadParameter(
            "give one of --choice, --regex, --json-schema, --grammar and --trie"
        )
    if choice:
        request.choice.texts.extend(choice)
    if regex is not None:
        request.regex = regex
    if json_schema is not None:
        request.json_schema = read_text("--json-schema", str(json_schema))
    if trie:
        request.trie_id = trie
    if grammar is not None:
        request.grammar = read_text("--grammar", str(grammar))


async def _generate(
    channel: Channel, request: inference_pb2.GenerateRequest, timeout_s: float, json_wanted: bool
) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    samples = JoinedSamples(request.n)
    async for message in stub.Generate(request, timeout=timeout_s, metadata=route(request)):
        samples.add(message)
        if not json_wanted:
            _print_news(message, samples)
    joined = samples.message()
    if json_wanted:
        print_json(joined)
    else:
        line = usage_line(joined.usage, joined.timing)
        Console().print(line, style="dim", markup=False, soft_wrap=True)


def _print_news(message: inference_pb2.GenerateResponse, samples: JoinedSamples) -> None:
    """One sample is printed as it grows, several when each is whole."""
    for row, sample in enumerate(message.sample_index):
        if samples.count == 1 and not message.beam_scores:
            print(message.text[row], end="", flush=True)
        elif message.finish_reason[row] == inference_pb2.FINISH_REASON_NONE_LEFT:
            print(f"--- sample {sample}: no sequence is left", flush=True)
        elif message.finish_reason[row]:
            score = f", score {message.beam_scores[row]:.4f}" if message.beam_scores else ""
            print(f"--- sample {sample}{score}\n{samples.text(sample)}", flush=True)
    if samples.count == 1 and not message.beam_scores and message.HasField("usage"):
        print()
