"""The part of the preflight that looks at agents: loops, tools, interactions, and a template fit for several turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from strop.agents.build import Cast
from strop.agents.parsers import parser_for
from strop.agents.rendering import Rendering
from strop.config.rules import Finding, error, warning
from strop.data.prompts import ToolListing, chat_of

ROLLOUT = "actor_rollout_ref.rollout"
UNUSED = (
    "tools are configured, but no row names an agent_name that uses them, so single_turn_agent answers and no tool is called. "
    "Add agent_name=tool_agent to the rows, or set rollout.agent.default_agent_loop=tool_agent."
)


class AgentCheck:
    """Reads what the configuration names; whatever is wrong is a finding."""

    def __init__(self, config: Any, tokenizer: Any | None) -> None:
        self.config, self.settings = config, config.actor_rollout_ref.rollout
        self.findings: list[Finding] = []
        template = config.actor_rollout_ref.model.custom_chat_template
        self.cast = None if tokenizer is None else Cast(self.settings, chat_of(config.data, tokenizer, template))
        self.named: set[str | None] = set()
        """Agents that some row asks for; None where a row asks for none."""
        if self.cast is not None:
            agent, turns = f"{ROLLOUT}.agent", f"{ROLLOUT}.multi_turn"
            self._try(f"{agent}.agent_loop_config_path", lambda: self.cast and self.cast.loops)
            self._try(f"{agent}.default_agent_loop", lambda: self.cast and self.cast.loops.get(None))
            self._try(f"{turns}.interaction_config_path", lambda: self.cast and self.cast.interactions)
            self._try(f"{turns}.tool_config_path", lambda: self.cast and self.cast.toolbox)
            if self.ok and self.cast.toolbox.schemas:
                self._try(f"{turns}.format", lambda: parser_for(self.settings.multi_turn.format, tokenizer))

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def listing(self) -> ToolListing | None:
        return self.cast.listing() if self.cast is not None and self.ok else None

    def rows(self, key: str, agents: Mapping[str, int], rows: int, examples: Iterable[Any]) -> None:
        """Look at the agents that rows of `data.<key>` name, and at one row of each data source."""
        named: set[str | None] = {*agents, *([None] if sum(agents.values()) < rows else [])}
        self.named |= named
        only_answers = {name or self.settings.agent.default_agent_loop for name in named} <= {"single_turn_agent"}
        if self.settings.multi_turn.tool_config_path and only_answers:
            self.findings.append(warning(f"data.{key}", UNUSED))
        if self.cast is None or not self.ok:
            return
        for name in sorted(name for name in named if name):
            self._try(f"data.{key}", lambda name=name: self.cast and self.cast.loops.get(name))
        for row in examples:
            asked = row.extra_info.get("interaction_kwargs")
            self._try(f"data.{key}", lambda asked=asked: self.cast and self.cast.interactions.choose(asked))

    def close(self, report: Any) -> None:
        """The template, where any row has several turns; how rewards add up; and let go of the tools."""
        if self.cast is None or not self.ok:
            return
        if not all(self.cast.loops.batched(name) for name in self.named):
            self._try("chat template", self._render)
            weights = self.settings.multi_turn.reward_weights
            report.data["reward"] = f"{weights.score:g} x score + {weights.turn:g} x turns + {weights.tool:g} x tools"
        self.cast.toolbox.close()

    def _render(self) -> None:
        assert self.cast is not None
        rendering = Rendering.of(self.cast.chat, tools=self.cast.toolbox.schemas or None)
        self.findings += [warning("chat template", notice) for notice in rendering.notices]

    def _try(self, key: str, look: Any) -> None:
        if not self.ok:
            return
        try:
            look()
        except (ValueError, ImportError) as problem:
            self.findings.append(error(key, str(problem)))
