"""Certificates and tokens, as those meet them who set them up, use them, and are kept out by them."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.workers.connection import RENEW_SECONDS
from specd.errors import error_info
from specd.identity.roles import Role
from specd.rpc.credentials import ClientCredentials
from specd.v1.generation_pb2 import StopConditions
from tests.e2e.guarded import Guarded, credentials, expire, files_of, guarded, make_certificates, workers_of
from tests.e2e.processes import complaint, run_specd, start_specd
from tests.raw_client import RawClient

PROMPT = "def fibonacci(n):"


def specd(*arguments: str) -> str:
    """Run a command that ends well, and return what it prints."""
    done = run_specd(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def new_token(tokens: Path, *arguments: str) -> str:
    return specd("token", "new", *arguments, "--tokens", str(tokens)).strip()


@pytest.fixture(scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path_factory.mktemp("certs") / "ours") as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    new_token(path, "somebody")
    return path


@pytest.fixture(scope="module")
async def by_token(installation: Guarded, tokens: Path) -> AsyncIterator[str]:
    """The address of a coordinator that asks for tokens."""
    async with AsyncExitStack() as stack:
        options = [*workers_of(installation), "--tokens", str(tokens)]
        await installation.start(stack, Role.COORDINATOR, *options, name="by token")
        yield installation.address("by token")


# -- What people are told


def kept_out(address: str, *options: str, **variables: Path | str) -> str:
    """Return what `specd generate` says with these options and variables of SPECD_."""
    given: Any = {f"SPECD_{name.upper()}": str(value) for name, value in variables.items()}
    done = run_specd("generate", PROMPT, "-n", "3", "--address", address, *options, **given)
    assert done.returncode in {1, 2}
    assert done.stdout == ""
    return complaint(done.stderr)


def test_a_client_is_told_why_tls_keeps_it_out(installation: Guarded, tmp_path: Path) -> None:
    address, certs = installation.address("coordinator"), installation.certs
    theirs = make_certificates(tmp_path / "theirs")
    late = Path(shutil.copytree(certs, tmp_path / "late"))
    expire(late, "client")
    ours: Any = {"tls_ca": certs / "ca.crt", "tls_cert": certs / "client.crt", "tls_key": certs / "client.key"}
    options = [each for name, path in ours.items() for each in (f"--{name.replace('_', '-')}", str(path))]
    done = run_specd("generate", PROMPT, "-n", "3", "--address", address, *options)
    assert done.returncode == 0, done.stderr
    assert f"the process at {address} uses TLS: set --tls-ca" in kept_out(address)
    assert "needs a client's certificate: set --tls-cert" in kept_out(address, tls_ca=certs / "ca.crt")
    strange: Any = {"tls_cert": theirs / "client.crt", "tls_key": theirs / "client.key"}
    assert f"refuses the certificate {theirs}/client.crt" in kept_out(address, **{**ours, **strange})
    assert f"was not issued by the authority in {theirs}/ca.crt" in kept_out(
        address, **{**ours, "tls_ca": theirs / "ca.crt"}
    )
    expired: Any = {"tls_cert": late / "client.crt", "tls_key": late / "client.key"}
    assert f"the certificate {late}/client.crt expired on" in kept_out(address, **{**ours, **expired})
    assert "is not for other.example.org: set --tls-name" in kept_out(
        address, "--tls-name", "other.example.org", **ours
    )
    assert "PERMISSION_DENIED" in kept_out(
        address, tls_ca=certs / "ca.crt", tls_cert=certs / "monitoring.crt", tls_key=certs / "monitoring.key"
    )
    assert "go together" in kept_out(address, **{**ours, "tls_key": ""})


def test_a_client_is_told_what_is_wrong_with_its_token(by_token: str, installation: Guarded, tokens: Path) -> None:
    ca = installation.certs / "ca.crt"
    late = new_token(tokens, "late", "--expires", "2020-01-01T00:00Z")
    assert "UNAUTHENTICATED: this coordinator needs a token" in kept_out(by_token, tls_ca=ca)
    assert "UNAUTHENTICATED: the token is unknown" in kept_out(by_token, tls_ca=ca, token="specd_wrong")
    assert "UNAUTHENTICATED: the token of late expired" in kept_out(by_token, tls_ca=ca, token=late)
    assert "would go to 192.0.2.1:50051 in plaintext" in kept_out("192.0.2.1:50051", token=late)


def test_a_name_of_the_certificate_stands_in_for_the_address(installation: Guarded) -> None:
    """The certificates of workers are for no host."""
    address, certs = installation.address("target-worker"), installation.certs
    options = files_of(certs, Role.TARGET_WORKER)
    done = run_specd("health", address, *options)
    assert (done.returncode, "is not for 127.0.0.1" in done.stderr) == (1, True)
    assert "SERVING" in specd("health", address, *options, "--tls-name", "target-worker.specd.internal")


def test_health_needs_no_token(by_token: str, installation: Guarded) -> None:
    assert "SERVING" in specd("health", by_token, "--tls-ca", str(installation.certs / "ca.crt"))


@pytest.mark.parametrize("process", ["coordinator", "target-worker"])
def test_a_process_does_not_start_open_to_the_network(process: str) -> None:
    done = run_specd(process, "--listen", "0.0.0.0:0", "--metrics-listen", "none")
    assert done.returncode == 2
    assert "--tls-cert, --tls-key and --tls-ca" in complaint(done.stderr)
    assert "or --insecure" in complaint(done.stderr)


async def test_unless_it_is_told_to_be_insecure(tmp_path: Path) -> None:
    options = ("--listen", "0.0.0.0:0", "--metrics-listen", "none", "--target", f"unix:{tmp_path}/t", "--insecure")
    async with start_specd("coordinator", *options) as coordinator:
        await coordinator.next_event("waiting for a worker", worker="target")


def test_a_process_does_not_start_with_a_certificate_of_another_role(tmp_path: Path) -> None:
    certs = make_certificates(tmp_path / "certs")
    listen = ("--listen", f"unix:{tmp_path}/s", "--metrics-listen", "none")
    done = run_specd("target-worker", *files_of(certs, Role.DRAFT_WORKER), *listen)
    assert done.returncode == 2
    assert f"the certificate {certs}/draft-worker.crt is not for a target-worker" in complaint(done.stderr)
    (certs / "target-worker.key").unlink()
    done = run_specd("target-worker", *files_of(certs, Role.TARGET_WORKER), *listen)
    assert f"cannot read {certs}/target-worker.key" in complaint(done.stderr)


# -- Commands


def test_certs_makes_what_processes_take_and_says_what_is_for_whom(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    said = specd("certs", str(certs), "--host", "gpu.example.org", "--client", "bob", "--days", "7")
    made = {path.name for path in certs.iterdir()}
    stems = ("ca", "client", "client-bob", "coordinator", "draft-worker", "gateway", "monitoring", "target-worker")
    assert made == {f"{stem}.{ending}" for stem in stems for ending in ("crt", "key")}
    for stem in stems:
        assert f"{stem}.crt" in said
    assert "gpu.example.org" in said
    before = {path.name: path.read_bytes() for path in certs.iterdir()}

    again = run_specd("certs", str(certs))
    assert (again.returncode, "--renew" in complaint(again.stderr)) == (2, True)
    again = run_specd("certs", str(certs), "--client", "carol", "--client", "bob")
    assert (again.returncode, "has client-bob already" in complaint(again.stderr)) == (2, True)
    assert {path.name: path.read_bytes() for path in certs.iterdir()} == before

    assert "gpu.example.org" in specd("certs", str(certs), "--renew")
    changed = {path.name for path in certs.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == made - {"ca.crt", "ca.key"}
    specd("certs", str(certs), "--client", "carol")
    assert (certs / "client-carol.key").stat().st_mode & 0o777 == 0o600
    for name in ("../eve", "", "a b"):
        assert "a client's name is" in complaint(run_specd("certs", str(certs), "--client", name).stderr)


def test_tokens_are_listed_and_revoked_by_name_or_by_id(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    first = new_token(path, "alice", "--max-tokens", "5", "--sessions", "2", "--expires", "30d")
    second = new_token(path, "alice")
    new_token(path, "bob")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["alice", "alice", "bob"]
    listed = specd("token", "list", "--tokens", str(path))
    assert listed.count("alice") == 2
    assert not {first, second} & set(listed.split())
    identity = lines[0]["sha256"][:8]
    assert "revoked 1 of 3" in specd("token", "revoke", identity, "--tokens", str(path))
    assert identity not in specd("token", "list", "--tokens", str(path))
    assert "revoked 1 of 2" in specd("token", "revoke", "alice", "--tokens", str(path))
    done = run_specd("token", "revoke", "alice", "--tokens", str(path))
    assert (done.returncode, "has no token of 'alice'" in complaint(done.stderr)) == (2, True)
    done = run_specd("token", "new", "carol", "--expires", "soon", "--tokens", str(path))
    assert (done.returncode, "--expires is 'soon'" in complaint(done.stderr)) == (2, True)


# -- While processes run


async def test_a_token_opens_and_closes_the_door_of_a_running_coordinator(
    by_token: str, installation: Guarded, tokens: Path
) -> None:
    text = await asyncio.to_thread(new_token, tokens, "visitor")
    async with RawClient(by_token, credentials(installation.certs, token=text)) as client:
        running = aiter(client.generate(PROMPT, max_tokens=200))
        first = [await anext(running)]
        await asyncio.to_thread(specd, "token", "revoke", "visitor", "--tokens", str(tokens))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.model_info()
        assert error_info(raised.value).reason == "TOKEN_UNKNOWN"
        # The running generation continues.
        assert [*first, *[each async for each in running]][-1].statistics.generated_tokens == 200


def presented(address: str, given: ClientCredentials) -> str:
    """Return the certificate that a server presents to a client. Raises ssl.SSLError or OSError if it lets none in."""
    context = ssl.create_default_context(cafile=given.ca)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    assert given.cert is not None
    context.load_cert_chain(given.cert, given.key)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as plain, context.wrap_socket(plain) as secured:
        certificate = secured.getpeercert(binary_form=True)
        assert certificate is not None
        return ssl.DER_cert_to_PEM_cert(certificate)


@pytest.mark.thorough
async def test_another_authority_takes_over_while_a_session_runs(tmp_path: Path) -> None:
    """Every process gets new certificates, of an authority that does not know the old ones, and none restarts."""
    old, new = tmp_path / "old", make_certificates(tmp_path / "new")
    async with guarded(tmp_path / "installed") as running:
        shutil.copytree(running.certs, old)
        address = running.address("coordinator")
        pid = running.children["coordinator"].pid
        # Many tokens, each of which costs much, so that a session outlives both changes unless the machine is fast.
        fields: Any = {
            "max_tokens": 400,
            "num_draft_tokens": 0,
            "stop": StopConditions(ignore_eos=True),
            "top_log_probabilities": 20,
        }
        async with RawClient(address, credentials(old, Role.CLIENT)) as client:
            expected = [r async for r in client.generate(PROMPT, **fields)]
            for name, child in running.children.items():
                metrics = child.facts["metrics_address"]
                served = await asyncio.to_thread(presented, metrics, credentials(old, Role.MONITORING))
                assert served == (old / f"{name}.crt").read_text()
            call = aiter(client.generate(PROMPT, **fields))
            got = [await anext(call)]
            (running.certs / "coordinator.crt").touch()  # the first of two changes
            await asyncio.sleep(RENEW_SECONDS + 1)
            for path in sorted(new.iterdir(), reverse=True):
                shutil.copy(path, running.certs / path.name)
            monitoring = credentials(new, Role.MONITORING)
            for name, child in running.children.items():
                role = Role.CLIENT if name == "coordinator" else Role.COORDINATOR
                served = await asyncio.to_thread(presented, child.facts["address"], credentials(new, role))
                assert served == (new / f"{name}.crt").read_text()
                served = await asyncio.to_thread(presented, child.facts["metrics_address"], monitoring)
                assert served == (new / f"{name}.crt").read_text()
            await asyncio.sleep(RENEW_SECONDS + 1)  # by then the coordinator has connected to its workers again
            got += [each async for each in call]
            assert [t.id for r in got for t in r.tokens] == [t.id for r in expected for t in r.tokens]

        async with RawClient(address, credentials(old, Role.CLIENT)) as client:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await client.model_info()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        # Workers that trust the new authority alone take the coordinator's new certificate.
        for worker in ("target-worker", "draft-worker"):
            await running.children[worker].stop()
            await running.children[worker].start()
        async with RawClient(address, credentials(new, Role.CLIENT)) as client:
            got = [each async for each in client.generate(PROMPT, **fields)]
            assert [t.id for r in got for t in r.tokens] == [t.id for r in expected for t in r.tokens]
            assert (await client.model_info()).draft_fault == ""
        assert running.children["coordinator"].pid == pid


@pytest.mark.thorough
async def test_a_coordinator_with_a_certificate_that_workers_do_not_take_yet_keeps_the_old(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        running = Guarded(make_certificates(tmp_path / "workers"))
        for worker in (Role.TARGET_WORKER, Role.DRAFT_WORKER):
            await running.start(stack, worker)
        running.certs = Path(shutil.copytree(running.certs, tmp_path / "coordinator"))
        await running.start(stack, Role.COORDINATOR, *workers_of(running))
        address = running.address("coordinator")
        new = make_certificates(tmp_path / "new")
        shutil.copytree(new, running.certs, dirs_exist_ok=True)
        for change in ("coordinator alone", "workers"):
            await asyncio.sleep(RENEW_SECONDS + 1)
            async with RawClient(address, credentials(new, Role.CLIENT)) as client:
                got = [each async for each in client.generate(PROMPT, max_tokens=20)]
                assert got[-1].statistics.accepted_tokens > 0, change
            shutil.copytree(new, tmp_path / "workers", dirs_exist_ok=True)
        # Workers that trust the new authority alone are there for a coordinator that has come over.
        await running.children["target-worker"].stop()
        await running.children["target-worker"].start()
        async with RawClient(address, credentials(new, Role.CLIENT)) as client:
            got = [each async for each in client.generate(PROMPT, max_tokens=20)]
            assert got[-1].statistics.generated_tokens == 20
