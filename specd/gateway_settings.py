"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator
from pydantic_settings import SettingsConfigDict

from specd.addresses import is_local
from specd.setting_types import Address, File, MetricsAddress, Seconds
from specd.settings import CertificateSettings


def _check_http_address(address: str) -> str:
    if not address:
        raise ValueError("'none' is not an address: write HOST:PORT")
    return address


def _names(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()] if names != "none" else []


HttpAddress = Annotated[MetricsAddress, AfterValidator(_check_http_address)]
NameList = Annotated[str, AfterValidator(lambda names: ", ".join(_names(names)) or "none")]


class GatewaySettings(CertificateSettings):
    """Settings of `specd gateway`."""

    table = "gateway"
    model_config = SettingsConfigDict(env_prefix="SPECD_GATEWAY_")

    coordinator: Address = Field("127.0.0.1:50051", description="Address of the coordinator.")
    coordinator_ca: File = Field(
        "",
        description="Authority of the coordinator's certificate, PEM, which turns on TLS; 'none' for plaintext.",
    )
    coordinator_cert: File = Field("", description="Certificate that the gateway shows the coordinator, PEM.")
    coordinator_key: File = Field("", description="Key of that certificate, PEM, without a password.")
    coordinator_name: str = Field(
        "", description="Name in the coordinator's certificate, if it is not the host of its address."
    )
    listen: HttpAddress = Field("127.0.0.1:8080", description="HTTP address for clients: HOST:PORT.")
    insecure: bool = Field(
        False,
        description="Accept and forward requests and tokens in plaintext, also from and to other machines, where "
        "something else keeps strangers out.",
    )
    allowed_hosts: NameList = Field(
        "none",
        description="Host names of this gateway, separated by commas, in addition to addresses and 'localhost'. "
        "Requests to other names are refused, because a foreign page can point its name at this address.",
    )
    cors_origins: NameList = Field(
        "none",
        description="Origins, such as https://chat.example.org and separated by commas, whose pages may call this "
        "gateway.",
    )
    default_max_tokens: int = Field(
        4096, ge=1, description="Most tokens of a reply whose request sets no limit, if the context has room for them."
    )
    cut_max_tokens: bool = Field(
        False,
        description="Where a request asks for more tokens than the context has room for, generate what fits and add a "
        "header. Without it such a request is refused, unless its field 'cut_max_tokens' is true.",
    )
    max_choices: int = Field(8, ge=1, description="Most choices (n) that a request may ask for.")
    max_body_bytes: ByteSize = Field(ByteSize(4 * 2**20), gt=0, description="Largest body of a request.")
    max_connections: int = Field(1024, ge=1, description="Maximum of connections; requests on others get 503.")
    shutdown_grace_seconds: Seconds = Field(12.0, description="Time that a stop waits for open responses.")

    @model_validator(mode="after")
    def _check_that_nobody_listens_in(self) -> Self:
        if self.insecure:
            return self
        if not (is_local(self.listen) or self.tls_cert):
            raise ValueError(
                f"other machines reach {self.listen}: set --tls-cert and --tls-key, and --tls-ca unless clients have "
                "tokens, or --insecure if something else keeps strangers out"
            )
        if not (self.coordinator_ca or is_local(self.coordinator)):
            raise ValueError(
                f"requests would go to the coordinator at {self.coordinator} in plaintext: set --coordinator-ca, or "
                "--insecure if something else keeps the connection secret"
            )
        return self

    @property
    def asks_for_tokens(self) -> bool:
        """Whether clients of this gateway need a token that the coordinator accepts."""
        return not (self.insecure or self.tls_ca or is_local(self.listen))

    @property
    def host_names(self) -> list[str]:
        """The names of `allowed_hosts`."""
        return _names(self.allowed_hosts)

    @property
    def origins(self) -> list[str]:
        """The origins of `cors_origins`."""
        return _names(self.cors_origins)
