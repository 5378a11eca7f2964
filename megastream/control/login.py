"""User and password of the control plane: kept out of everything that a run writes or logs."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

LOGIN = "MEGASTREAM_CONTROL_LOGIN"
"""Environment variable `user:password` (the user may be empty) for control plane URLs that carry neither."""


def split_login(url: str) -> tuple[str, str]:
    """The URL without user and password, and both as LOGIN holds them; empty when the URL names neither."""
    parts = urlsplit(url)
    userinfo, _, host = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in userinfo.partition(":"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    user, password = query.pop("username", user), query.pop("password", password)
    if not (user or password):
        return url, ""
    rest = parts._replace(scheme="", netloc="", query=urlencode(query)).geturl()
    return f"{parts.scheme}://{host}{rest}", f"{user}:{password}"


def login_arguments() -> dict[str, str]:
    """`username` and `password` for redis.Redis from LOGIN; what the URL names itself counts before them."""
    user, _, password = os.environ.get(LOGIN, "").partition(":")
    return {name: value for name, value in (("username", user), ("password", password)) if value}
