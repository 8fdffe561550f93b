"""Every key, its default and its documentation, as dataclasses."""

from strop.config.schema.roots import ROOTS

__all__ = ["ROOTS"]
