"""What the options of a beam search ask for."""

import typer

from stemserve.proto.v1 import inference_pb2

MODES = {
    "heuristic": inference_pb2.EARLY_STOPPING_HEURISTIC,
    "first": inference_pb2.EARLY_STOPPING_FIRST,
    "never": inference_pb2.EARLY_STOPPING_NEVER,
}


def beam_search(
    beams: int, length_penalty: float | None, early_stopping: str | None
) -> inference_pb2.BeamSearch | None:
    if early_stopping is not None and early_stopping not in MODES:
        raise typer.BadParameter(f"{early_stopping!r} is not one of {', '.join(MODES)}")
    if beams:
        mode = MODES[early_stopping or "heuristic"]
        return inference_pb2.BeamSearch(
            width=beams, length_penalty=length_penalty, early_stopping=mode
        )
    if length_penalty is not None or early_stopping is not None:
        raise typer.BadParameter("--length-penalty and --early-stopping need --beams")
    return None
