"""User and password of the control plane: kept out of everything that a run writes or logs."""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from megastream.protocol.control import ControlError

LOGIN = "MEGASTREAM_CONTROL_LOGIN"
"""Environment variable `user:password` (the user may be empty) for control plane URLs that carry neither."""

_SCHEME = re.compile(r"(redis|rediss|unix)://")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def split_login(url: str) -> tuple[str, str]:
    """The URL without user and password, and both as LOGIN holds them; empty when the URL names neither.

    ControlError when the URL can be read in more than one way; it says why, and repeats nothing of the URL: what looks
    like a host there can be half a password.
    """
    parts = _parts(url)
    userinfo, _, host = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in userinfo.partition(":"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    user, password = query.pop("username", user), query.pop("password", password)
    if not (user or password):
        return url, ""
    if ":" in user:
        raise ControlError("the control plane's URL has a user with a colon; use one without")
    rest = parts._replace(scheme="", netloc="", query=urlencode(query)).geturl()
    return f"{parts.scheme}://{host}{rest}", f"{user}:{password}"


def login_arguments() -> dict[str, str]:
    """`username` and `password` for redis.Redis from LOGIN; what the URL names itself counts before them."""
    user, _, password = os.environ.get(LOGIN, "").partition(":")
    return {name: value for name, value in (("username", user), ("password", password)) if value}


def _parts(url: str) -> SplitResult:
    if not _SCHEME.match(url):
        raise ControlError(
            "the control plane's URL is not a usable URL: it begins with no redis://, rediss:// or unix://"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port  # read only now, and refused when it is no number
    except ValueError:  # its text can hold the password
        raise ControlError(
            "the control plane's URL is not a usable URL: its host or port cannot be read; write "
            "redis://user:password@host:port/0, an IPv6 host in [], and special characters of the password "
            "percent-encoded (/ as %2F, # as %23, ? as %3F, @ as %40)"
        ) from None
    # Without a host nothing before an @ can be mistaken for one: unix:///tmp/a@b.sock is a path.
    if "#" in url or _CONTROL.search(url) or (parts.netloc and "@" in parts.path + parts.query):
        raise ControlError(
            "the control plane's URL can be read in several ways; percent-encode special characters of user and "
            "password (/ as %2F, # as %23, ? as %3F, @ as %40)"
        )
    return parts
