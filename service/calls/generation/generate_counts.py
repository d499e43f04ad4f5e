"""What a Generate request asks for where it leaves a count out."""

from stemserve.proto.v1 import inference_pb2

DEFAULT_NEW_TOKENS = 128


def new_tokens(request: inference_pb2.GenerateRequest) -> int:
    return request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS


def sample_count(request: inference_pb2.GenerateRequest) -> int:
    return request.n if request.HasField("n") else 1
