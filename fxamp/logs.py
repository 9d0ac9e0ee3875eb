"""FXAMP_LOG_LEVEL: followed where something is made that has lines to say, not at import, before logging is set up."""

import logging
import os

from fxamp.errors import nearest, warn

log = logging.getLogger("fxamp")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_configured: str | None = None


def configure_logging() -> None:
    """Follow FXAMP_LOG_LEVEL: set the level, and print to stderr where there is no logging yet."""
    global _configured
    wanted = os.environ.get("FXAMP_LOG_LEVEL", "").strip().upper()
    if not wanted or wanted == _configured:
        return
    _configured = wanted
    if wanted not in _LEVELS:
        hint = nearest(wanted, _LEVELS)
        warn(f"FXAMP_LOG_LEVEL={wanted} is no level.{hint} Allowed: {', '.join(_LEVELS)}.")
        return
    log.setLevel(wanted)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fxamp: %(message)s"))
        log.addHandler(handler)
