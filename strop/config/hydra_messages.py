"""Errors of Hydra in the words of a command line."""

from __future__ import annotations


def explain_hydra(error: Exception) -> str:
    """What an error of Hydra or OmegaConf means, and what to write instead."""
    override = getattr(error, "override", None)
    text = one_line(error).partition(" See https")[0].partition(" Config search path:")[0]
    if not text:
        return (
            "A value does not parse. Interpolations are written ${section.key}; quote text that holds a "
            "dollar sign."
        )
    if "must be a DictConfig" in text:
        return (
            f"{text.partition(' must')[0]} holds a list; a configuration holds keys and values (data: ...)."
        )
    if "Ambiguous value" in text:
        return (
            f"{text.partition(' 1.')[0]}. A value with commas is a list: write key=[a,b], or quote it: "
            "'key=\"a,b\"'."
        )
    if "Could not find" in text:
        return f"{text}. A key of a section is written section.key=value, for instance model.path=DIR."
    if override is None:
        return text
    return f"{override.lstrip('+')}: {text}. Quote values with special characters: 'key=\"...\"'."


def one_line(error: Exception) -> str:
    """The beginning of an error's text on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])
