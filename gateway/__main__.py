"""`python -m gateway` is `specd gateway`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from gateway.main import run
from specd.gateway_settings import GatewaySettings

specd.launch.launch("gateway", GatewaySettings, run)
