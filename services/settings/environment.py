"""Which variables of the environment are ours: a misspelt one is refused, those of Kubernetes are passed over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from services.settings.base import RoleSettings

ENV_PREFIX = "OUTRIDER_"
NO_SETTINGS = ("ADDRESS", "API_KEY", "CONFIG", "HOME", "LAUNCHED", "TLS_CA", "URL")
"""Read elsewhere: by commands that are clients, to find models, and between the launcher and its children."""

_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set it because a Service is called outrider-...: NAME_PORT=tcp://..., NAME_SERVICE_HOST=..."""
    match = _LINK_NAME.search(name)
    return match is not None and (match.group(1) != "PORT" or _LINK_URL.match(value) is not None)


def unknown_variable(environment: Mapping[str, str], kinds: Iterable[type[RoleSettings]]) -> str | None:
    """What is wrong with the first variable that looks like ours and is nobody's; None if there is none."""
    known = set(NO_SETTINGS)
    for kind in kinds:
        fields = {field.upper() for field in kind.model_fields}
        known |= fields | {f"{kind.section.upper()}_{field}" for field in fields}
    for name, value in sorted(environment.items()):
        short = name.upper().removeprefix(ENV_PREFIX)
        if short == name.upper() or short in known or is_service_link(name.upper(), value):
            continue
        close = difflib.get_close_matches(short, known, n=1)
        hint = f"; did you mean {ENV_PREFIX}{close[0]}?" if close else "; `outrider config show` lists what there is"
        return f"{name} in the environment is no setting{hint}"
    return None
