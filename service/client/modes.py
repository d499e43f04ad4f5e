"""What a Score call asks of its items."""

from stemserve.proto.v1 import inference_pb2

Mode = inference_pb2.LabelProbabilities | inference_pb2.LogLikelihood | inference_pb2.Classification


def with_mode(
    request: inference_pb2.ScoreRequest,
    mode: Mode,
    options: inference_pb2.ScoreRequest | None,
) -> inference_pb2.ScoreRequest:
    match mode:
        case inference_pb2.LabelProbabilities():
            request.label_probabilities.CopyFrom(mode)
        case inference_pb2.LogLikelihood():
            request.log_likelihood.CopyFrom(mode)
        case inference_pb2.Classification():
            request.classification.CopyFrom(mode)
    if options is not None:
        request.MergeFrom(options)
    return request
