"""The other player: it thinks of a number, and says whether that is higher or lower than a guess."""

from __future__ import annotations

from typing import Any

from strop.agents.interaction import BaseInteraction, Reply

FOUND, SENSELESS = 1.0, -0.5


class GuessingInteraction(BaseInteraction):
    """Rows have interaction_kwargs {name: guessing, secret: 5}.

    The right guess earns 1 and ends the game. A guess that the hints so far rule out, or that is no number,
    costs 0.5 at once: that is a reward for one turn, not for the game.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._possible: dict[str, set[int]] = {}

    async def start_interaction(self, instance_id: str, secret: int | None = None, **kwargs: Any) -> str:
        numbers = set(range(int(self.config["numbers"])))
        if secret not in numbers:
            raise ValueError(f"interaction_kwargs.secret={secret} is not one of 0 to {len(numbers) - 1}.")
        self._possible[instance_id] = numbers
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], secret: int = 0, **kwargs: Any
    ) -> Reply:
        said = messages[-1]["content"].strip()
        possible = self._possible[instance_id]
        if not said.isdigit() or int(said) not in possible:
            reward, guess = SENSELESS, int(said) if said.isdigit() else None
        else:
            reward, guess = FOUND if int(said) == secret else 0.0, int(said)
        if guess == secret:
            return True, "", reward, {"found": 1.0}
        if guess is None:
            return False, "?", reward, {"found": 0.0}
        higher = secret > guess
        self._possible[instance_id] = {n for n in possible if n != guess and (n > guess) == higher}
        return False, "higher" if higher else "lower", reward, {"found": 0.0}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._possible.pop(instance_id, None)
