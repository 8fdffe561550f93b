"""Every key, its default and its documentation, as dataclasses."""

from strop.config.schema.roots import ROOTS, DpoTrainer, Evaluation, Generation, PpoTrainer, RmTrainer, SftTrainer

__all__ = ["ROOTS", "DpoTrainer", "Evaluation", "Generation", "PpoTrainer", "RmTrainer", "SftTrainer"]
