"""Certificates that specd makes, and what it takes of others."""

from __future__ import annotations

import shutil
import ssl
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from specd.errors import StartupError
from specd.identity.authority import Authority, Leaf, client_leaf, standard_leaves
from specd.identity.certificates import CertificateFiles, Certificates, authority_of, name_of
from specd.identity.roles import Role

DAY = 86400.0
TARGET = Leaf("target-worker", "target-worker", Role.TARGET_WORKER)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an authority, with a certificate for each role."""
    directory = tmp_path_factory.mktemp("certs") / "made"
    authority = Authority.create(directory)
    for leaf in standard_leaves(["gpu.example.org", "10.1.2.3"]):
        authority.issue(leaf, days=30, replace=False)
    return directory


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def files_of(directory: Path, name: str = "target-worker") -> CertificateFiles:
    return CertificateFiles(directory / f"{name}.crt", directory / f"{name}.key", directory / "ca.crt")


def refusal(files: CertificateFiles, role: Role | None = Role.TARGET_WORKER, *, after_days: float = 0) -> str:
    with pytest.raises(StartupError) as raised:
        Certificates(files, role=role, clock=lambda: time.time() + after_days * DAY)
    return str(raised.value)


@pytest.mark.parametrize("role", Role)
def test_each_role_gets_a_certificate_that_is_good_for_it(made: Path, role: Role) -> None:
    certificates = Certificates(files_of(made, role.value), role=role)
    assert certificates.has_ca
    assert certificates.ssl_context().verify_mode is ssl.CERT_REQUIRED
    for other in set(Role) - {role}:
        assert f"is not for a {other}" in refusal(files_of(made, role.value), other)


def test_keys_are_for_their_owner_alone(made: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in made.glob("*.key")} == {0o600}
    assert len(list(made.glob("*.key"))) == len(Role) + 1


def test_only_what_clients_reach_can_be_found_by_its_host(made: Path) -> None:
    """Otherwise a worker could pose as the coordinator, to clients that look for the host."""
    hosts = {leaf.role: leaf.hosts for leaf in Authority(made).leaves()}
    for reached in (Role.COORDINATOR, Role.GATEWAY):
        assert set(hosts.pop(reached)) == {"localhost", "127.0.0.1", "::1", "gpu.example.org", "10.1.2.3"}
    assert set(hosts.values()) == {()}


def test_a_renewal_keeps_names_and_hosts_under_a_new_key(directory: Path) -> None:
    authority = Authority(directory)
    authority.issue(client_leaf("bob"), days=1, replace=False)
    before, old = authority.leaves(), {path.name: path.read_bytes() for path in directory.iterdir()}
    for leaf in before:
        authority.issue(leaf, days=30, replace=True)
    assert [(leaf.file, leaf.name, leaf.role, set(leaf.hosts)) for leaf in authority.leaves()] == [
        (leaf.file, leaf.name, leaf.role, set(leaf.hosts)) for leaf in before
    ]
    assert Leaf("client-bob", "bob", Role.CLIENT) in before
    assert {name for name, content in old.items() if (directory / name).read_bytes() == content} == {"ca.crt", "ca.key"}


def test_nothing_is_overwritten_without_being_told(directory: Path) -> None:
    key = (directory / "ca.key").read_bytes()
    with pytest.raises(StartupError, match=r"ca\.key exists already"):
        Authority.create(directory)
    with pytest.raises(StartupError, match=r"target-worker\.key exists already"):
        Authority(directory).issue(TARGET, days=30, replace=False)
    assert (directory / "ca.key").read_bytes() == key
    Certificates(files_of(directory), role=Role.TARGET_WORKER)


def test_no_certificate_outlives_its_authority(directory: Path) -> None:
    authority = Authority(directory)
    assert authority.issue(TARGET, days=100_000, replace=True) <= authority.ends_at


def test_what_cannot_be_used_is_named_with_the_file_and_what_to_do(directory: Path) -> None:
    files = files_of(directory)
    other = Authority.create(directory / "other")
    other.issue(TARGET, days=30, replace=False)
    strange = files_of(directory / "other")

    nowhere = directory / "nowhere.pem"
    assert refusal(CertificateFiles(nowhere, files.key)) == (
        f"cannot read {nowhere}: No such file or directory; name the file of a certificate in PEM form"
    )
    assert "cannot read" in refusal(CertificateFiles(files.cert, directory))
    for wrong, named in (
        (CertificateFiles(files.key, files.key), "certificate"),
        (CertificateFiles(files.cert, files.cert), "private key"),
    ):
        said = refusal(wrong)
        assert said == f"{wrong.key} has no {named} in PEM form: name a file with -----BEGIN {named.upper()}-----"
    assert f"key {strange.key} does not belong to the certificate {files.cert}" in refusal(
        CertificateFiles(files.cert, strange.key, files.ca)
    )
    assert "was not issued by the authority in" in refusal(CertificateFiles(files.cert, files.key, strange.ca))
    assert f"the certificate {files.cert} expired on" in refusal(files, after_days=31)
    assert f"the certificate {files.cert} is not valid before" in refusal(files, after_days=-1)
    # A process that is known by its host only can have another authority than its peers.
    Certificates(CertificateFiles(files.cert, files.key, strange.ca), role=None)


def test_a_key_with_a_password_is_refused(directory: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    files = files_of(directory)
    key = s.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    )
    assert "has a password" in refusal(files)


def test_new_files_are_taken_and_bad_ones_are_not(directory: Path) -> None:
    files = files_of(directory)
    certificates = Certificates(files, role=Role.TARGET_WORKER)
    first = certificates.pems
    certificates.refresh()
    assert (certificates.generation, certificates.pems) == (0, first)

    fresh = Authority(directory)
    key = files.key.read_bytes()
    fresh.issue(TARGET, days=60, replace=True)
    renewed = files.key.read_bytes()
    files.key.write_bytes(key)  # the certificate is new already, and the key not yet
    with capture_logs() as log:
        certificates.refresh()
        certificates.refresh()
    assert [entry["log_level"] for entry in log] == ["error"]
    assert (certificates.generation, certificates.pems) == (0, first)

    files.key.write_bytes(renewed)
    certificates.refresh()
    assert certificates.generation == 1
    assert certificates.pems.key == renewed
    certificates.ssl_context()

    files.cert.unlink()
    certificates.refresh()
    assert certificates.generation == 1
    assert certificates.pems.key == renewed


def test_an_end_that_comes_near_is_said_once(directory: Path) -> None:
    days = 0.0
    certificates = Certificates(files_of(directory), role=None, clock=lambda: time.time() + days * DAY)
    with capture_logs() as log:
        certificates.refresh()
        assert log == []
        days = 20.0
        certificates.refresh()
        certificates.refresh()
    assert [entry["event"] for entry in log] == ["a certificate expires soon"]


@pytest.mark.parametrize("role", Role)
def test_no_client_can_have_the_name_that_another_certificate_has(role: Role) -> None:
    with pytest.raises(StartupError, match="choose another"):
        client_leaf(role.value)


def test_an_authority_is_the_given_one_or_the_certificate_itself_or_unknown(made: Path, tmp_path: Path) -> None:
    leaf, ca = made / "coordinator.crt", made / "ca.crt"
    Authority.create(tmp_path)
    assert authority_of(leaf, ca) == ca
    assert authority_of(ca, None) == ca  # which signed itself
    for given in (None, tmp_path / "ca.crt", tmp_path / "missing.crt"):
        with pytest.raises(StartupError, match=r"coordinator\.crt was issued by an unknown authority: set --tls-ca"):
            authority_of(leaf, given)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", ""),
        ("localhost", ""),
        ("10.1.2.3", ""),
        ("gpu.example.org", ""),
        ("10.9.9.9", "coordinator.specd.internal"),
    ],
)
def test_a_name_is_looked_for_where_the_certificate_is_not_for_the_host(made: Path, host: str, name: str) -> None:
    assert name_of(made / "coordinator.crt", host) == name
