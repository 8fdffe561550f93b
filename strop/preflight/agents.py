"""The preflight of agents: loops, tools, interactions, and a chat template for several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from strop.agents.build import AgentSetup
from strop.agents.parsers.base import parser_for
from strop.agents.rendering import Rendering
from strop.config.rules import ConfigFinding, error, warning
from strop.config.schema.ppo import PpoConfig
from strop.data.prompts import ToolListing, build_chat
from strop.data.schema import RowFields
from strop.preflight.report import PreflightReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLLOUT = "actor_rollout_ref.rollout"
UNUSED = (
    "tools are configured, but no row names an agent_name that uses them, so single_turn_agent answers and "
    "no tool is called. Add agent_name=tool_agent to the rows, or set "
    "rollout.agent.default_agent_loop=tool_agent."
)


class AgentCheck:
    """Reads what the configuration names; every problem becomes a finding."""

    def __init__(self, config: PpoConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.config = config
        self.settings = config.actor_rollout_ref.rollout
        self.findings: list[ConfigFinding] = []
        template = config.actor_rollout_ref.model.custom_chat_template
        self.agents: AgentSetup | None = None
        self.named: set[str | None] = set()
        """Agents that some row names; None if a row names none."""
        if tokenizer is not None:
            self.agents = AgentSetup(self.settings, build_chat(config.data, tokenizer, template))
            self._examine_setup(self.agents, tokenizer)

    def _examine_setup(self, agents: AgentSetup, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read every file that the configuration names."""
        self._try(f"{ROLLOUT}.agent.agent_loop_config_path", lambda: agents.loops)
        self._try(f"{ROLLOUT}.agent.default_agent_loop", lambda: agents.loops.get(None))
        self._try(f"{ROLLOUT}.multi_turn.interaction_config_path", lambda: agents.interactions)
        self._try(f"{ROLLOUT}.multi_turn.tool_config_path", lambda: agents.tools)
        if self.ok and agents.tools.schemas:
            name = self.settings.multi_turn.format
            self._try(f"{ROLLOUT}.multi_turn.format", lambda: parser_for(name, tokenizer))

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def listing(self) -> ToolListing | None:
        return self.agents.listing() if self.agents is not None and self.ok else None

    def rows(self, key: str, agents: Mapping[str, int], rows: int, examples: Iterable[RowFields]) -> None:
        """Check the agents that rows of `data.<key>` name, and one row of each data source."""
        named: set[str | None] = set(agents)
        if sum(agents.values()) < rows:
            named.add(None)
        self.named |= named
        used = {name or self.settings.agent.default_agent_loop for name in named}
        if self.settings.multi_turn.tool_config_path and used <= {"single_turn_agent"}:
            self.findings.append(warning(f"data.{key}", UNUSED))
        setup = self.agents
        if setup is None or not self.ok:
            return
        for name in sorted(name for name in named if name):
            self._try(f"data.{key}", partial(setup.loops.get, name))
        for row in examples:
            interaction = row.extra_info.get("interaction_kwargs")
            self._try(f"data.{key}", partial(setup.interactions.choose, interaction))

    def close(self, report: PreflightReport) -> None:
        """Check the template if any row has several turns, report how rewards add up, and close the tools."""
        if self.agents is None or not self.ok:
            return
        if not all(self.agents.loops.batched(name) for name in self.named):
            self._try("chat template", self._render)
            weights = self.settings.multi_turn.reward_weights
            report.data["reward"] = (
                f"{weights.score:g} x score + {weights.turn:g} x turns + {weights.tool:g} x tools"
            )
        self.agents.tools.close()

    def _render(self) -> None:
        assert self.agents is not None
        rendering = Rendering.of(self.agents.chat, tools=self.agents.tools.schemas or None)
        for notice in rendering.notices:
            self.findings.append(warning("chat template", notice))

    def _try(self, key: str, read: Callable[[], object]) -> None:
        if not self.ok:
            return
        try:
            read()
        except (ValueError, ImportError) as problem:
            self.findings.append(error(key, str(problem)))
