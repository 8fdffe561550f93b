"""A seller and a buyer agree on a price: each names a digit, and the price is the mean of both.

The program has nothing of Strop. It reads a game per line and writes the scores of both players when it is
over. Both players read the same text, so one policy cannot play both well. The seller is called by its key,
the buyer by the name of its model; either way works for both.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

GAMES_AT_ONCE = 16
writing = threading.Lock()


def ask(game: dict[str, Any], key: str, model: str) -> str:
    """The answer of a player."""
    body = json.dumps({"model": model, "messages": game["messages"]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{game['base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def play(game: dict[str, Any]) -> None:
    """Play a game and write its result, or why it failed."""
    result: dict[str, Any] = {"id": game["id"]}
    try:
        seller = ask(game, game["api_keys"]["seller"], "gpt-5")
        buyer = ask(game, game["api_key"], "buyer")
        result["scores"] = scores(seller, buyer)
    except (OSError, ValueError, LookupError) as problem:  # a refused call, a run without policies
        result["error"] = f"{type(problem).__name__}: {problem}"
    with writing:
        print(json.dumps(result), flush=True)


def scores(seller: str, buyer: str) -> dict[str, float]:
    """Who names no digit loses 1 and spoils the game."""
    names_digit = {"seller": seller[:1].isdigit(), "buyer": buyer[:1].isdigit()}
    if not all(names_digit.values()):
        return {name: 0.0 if good else -1.0 for name, good in names_digit.items()}
    price = (int(seller[:1]) + int(buyer[:1])) / 18
    return {"seller": price, "buyer": 1 - price}


if __name__ == "__main__":
    with ThreadPoolExecutor(GAMES_AT_ONCE) as players:
        for line in sys.stdin:
            players.submit(play, json.loads(line))
