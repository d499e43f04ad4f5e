"""The async client library: what a program that calls a stemserve server imports."""

from stemserve.service.client.channel import PLAINTEXT, Access
from stemserve.service.client.chat_request import chat_request
from stemserve.service.client.client import Client, token_blob
from stemserve.service.client.errors import ClientError
from stemserve.service.client.modes import Mode
from stemserve.service.client.results import (
    GenerateStep,
    ItemError,
    Prefix,
    SampleNews,
    Scores,
    Timing,
    Trie,
    Usage,
)

__all__ = [
    "PLAINTEXT",
    "Access",
    "Client",
    "ClientError",
    "GenerateStep",
    "ItemError",
    "Mode",
    "Prefix",
    "SampleNews",
    "Scores",
    "Timing",
    "Trie",
    "Usage",
    "chat_request",
    "token_blob",
]
