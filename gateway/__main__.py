"""`python -m gateway` is `specd gateway`."""

# Plain imports come first, and this one has to: it sets variables that gRPC reads when it is imported.
import specd.launch
from specd.gateway_settings import GatewaySettings
from specd.identity.certificates import check_certificates

specd.launch.launch("gateway", GatewaySettings, check_certificates)
