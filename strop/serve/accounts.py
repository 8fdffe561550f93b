"""Who may use the service: tokens of users, from a file or from the environment."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

from strop.rewards.server_requests import RequestRefused

TOKENS_VARIABLE = "STROP_SERVE_TOKENS"
ANYONE = "local"
"""The user of a service without tokens."""
PREFIX = "tml-"
"""The client refuses keys that begin otherwise."""
MIN_TOKEN_LENGTH = 20
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


class Accounts:
    """Token -> user. Without tokens every request that carries a key at all belongs to one user."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = dict(users)

    @property
    def are_required(self) -> bool:
        return bool(self._users)

    def user_of(self, token: str) -> str:
        """The user with this token; RequestRefused (401) if there is none."""
        if not token:
            raise RequestRefused(401, "The request has no key. Set TINKER_API_KEY, or send X-API-Key.")
        if not self._users:
            return ANYONE
        found = None
        for known, user in self._users.items():  # all of them: the time tells nothing about a token
            if hmac.compare_digest(known.encode(), token.encode()):
                found = user
        if found is None:
            raise RequestRefused(401, "The key is not known to this service.")
        return found


def load_accounts(tokens_file: str | None, host: str) -> Accounts:
    """The tokens of the file, or of the environment. An address that other machines reach needs them."""
    if tokens_file is not None:
        path = Path(tokens_file)
        if not path.is_file():
            raise ValueError(f"server.tokens_file={tokens_file}: there is no such file.")
        users = parse_tokens(path.read_text().splitlines(), f"server.tokens_file={tokens_file}")
    else:
        users = parse_tokens(os.environ.get(TOKENS_VARIABLE, "").split(","), TOKENS_VARIABLE)
    if not users and not is_this_machine(host):
        raise ValueError(
            f"server.host={host} lets other machines in, so the service needs tokens: set server.tokens_file "
            f"to a file of lines `USER TOKEN`, or {TOKENS_VARIABLE}=USER:TOKEN,USER:TOKEN. A token is "
            f"{PREFIX}$(openssl rand -hex 16)."
        )
    return Accounts(users)


def parse_tokens(lines: list[str], where: str) -> dict[str, str]:
    """`USER TOKEN` or `USER:TOKEN` per line; empty lines and lines that begin with # are skipped."""
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        user, _, token = text.replace(":", " ", 1).partition(" ")
        token = token.strip()
        # The token itself stays out of the message: it is a secret.
        if _USER.fullmatch(user) is None:
            raise ValueError(f"{where} entry {number}: the user is not 1 to 64 letters, digits, '_' or '-'.")
        is_long = len(token) >= MIN_TOKEN_LENGTH
        if not token.startswith(PREFIX) or not is_long or _TOKEN.fullmatch(token) is None:
            raise ValueError(
                f"{where} entry {number}: the token of {user} must begin with {PREFIX} and have at least "
                f"{MIN_TOKEN_LENGTH} letters, digits, '_' or '-': {PREFIX}$(openssl rand -hex 16)."
            )
        if token in users:
            raise ValueError(f"{where} entry {number}: {users[token]} and {user} have the same token.")
        users[token] = user
    return users


def is_this_machine(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
