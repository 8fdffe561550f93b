"""Features of images that the engine keeps from one prefill pass to the next."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from strop.types import ImageInput

CACHED_IMAGES = 32
"""Images whose features an engine keeps: a prompt that is prefilled in chunks needs them several times."""

Features = tuple[Tensor, ...]
"""The features of an image [tokens, H], and those that further layers add, if the model has them."""


class FeatureCache:
    """Features of the images that were used last, under the same weights."""

    def __init__(self, limit: int = CACHED_IMAGES) -> None:
        self._limit = limit
        self._features: OrderedDict[str, Features] = OrderedDict()

    def __contains__(self, image: ImageInput) -> bool:
        return image.digest in self._features

    def get(self, image: ImageInput) -> Features:
        self._features.move_to_end(image.digest)
        return self._features[image.digest]

    def put(self, image: ImageInput, features: Features) -> None:
        self._features[image.digest] = features
        while len(self._features) > self._limit:
            self._features.popitem(last=False)

    def clear(self) -> None:
        """The weights have changed."""
        self._features.clear()
