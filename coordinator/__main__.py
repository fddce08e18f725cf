"""`python -m coordinator` is `specd coordinator`."""

from pathlib import Path

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from specd.coordinator_settings import CoordinatorSettings
from specd.identity.certificates import check_certificates
from specd.identity.tokens import read_tokens


def check_tokens(settings: CoordinatorSettings) -> None:
    """Raise StartupError if the file of tokens cannot be used."""
    if settings.tokens:
        read_tokens(Path(settings.tokens))


specd.launch.launch("coordinator", CoordinatorSettings, check_certificates, check_tokens)
