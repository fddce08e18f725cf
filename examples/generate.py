"""Stream a completion from a running specd: python examples/generate.py [ADDRESS]."""

import sys

import grpc

from specd.v1 import generation_pb2, generation_pb2_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with grpc.insecure_channel(address) as channel:
    service = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(text="def fibonacci(n):", max_tokens=64, num_draft_tokens=4)
    for response in service.Generate(request):
        print(response.text, end="", flush=True)

statistics = response.statistics
print(f"\n{statistics.accepted_tokens} of {statistics.proposed_tokens} proposed tokens were accepted")
