"""The Python client: `from specd import Client`. docs/client.md explains it with examples."""

from __future__ import annotations

from specd.client.async_client import AsyncClient
from specd.client.async_session import AsyncClientSession
from specd.client.async_stream import AsyncStream
from specd.client.client import Client
from specd.client.events import Completion, CompletionToken, Delta, Event, Finished, Loading, Retrying, RoundSummary
from specd.client.options import GenerationOptions
from specd.client.protocol.errors import CallError
from specd.client.protocol.service import ModelStatus, ServiceDescription, TokenCount
from specd.client.resuming.retries import DEFAULT_RETRIES, NO_RETRIES, RetryPolicy
from specd.client.session import ClientSession
from specd.client.statistics import GenerationStatistics, RoundMeans
from specd.client.stream import Stream
from specd.grammar import Grammar, GrammarKind
from specd.rpc.credentials import ClientCredentials

__all__ = [
    "DEFAULT_RETRIES",
    "NO_RETRIES",
    "AsyncClient",
    "AsyncClientSession",
    "AsyncStream",
    "CallError",
    "Client",
    "ClientCredentials",
    "ClientSession",
    "Completion",
    "CompletionToken",
    "Delta",
    "Event",
    "Finished",
    "GenerationOptions",
    "GenerationStatistics",
    "Grammar",
    "GrammarKind",
    "Loading",
    "ModelStatus",
    "RetryPolicy",
    "Retrying",
    "RoundMeans",
    "RoundSummary",
    "ServiceDescription",
    "Stream",
    "TokenCount",
]
