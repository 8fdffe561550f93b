"""Images in a forward pass: each image is computed once, and its features go to all of its tokens.

A token of an image is known by a number of its own (`FIRST` and above): the row of its feature in the
features of all images of the pass. So sequences share a common prefix of a packed row exactly if its images
are the same, and a sampled image token, which stands for no image, is told apart from those of images. The
model runs through its own forward. For the time of a pass two of its methods are replaced: the one that
computes features gives them in the order of the tokens, and the one that finds the tokens of images gives
those of real images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from strop.models.lora import base_model
from strop.models.packing import NOTHING, Inputs, lay_out
from strop.models.vision.feature_cache import FeatureCache, Features
from strop.models.vision.positions import AxisRule, last_seen, three_axes
from strop.types import Batch, ImageInput, Images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST = 1 << 40
"""Ids from here on are rows of features."""

_BOTH_WAYS = ("gemma3",)
"""Models in which tokens of an image attend to each other in both directions, and all other attention is
causal."""


@dataclass(frozen=True)
class VisionPart:
    """The part of a model that puts features into the row."""

    module: nn.Module
    token_id: int
    """Stands for one vector of features in the ids of a prompt."""

    @property
    def has_axes(self) -> bool:
        """Whether positions have several axes: time, height and width."""
        return hasattr(self.module, "get_rope_index")

    @property
    def axes(self) -> AxisRule:
        """How positions are counted, where they have several axes."""
        vision = cast(Any, self.module.config).vision_config
        seconds = getattr(vision, "tokens_per_second", None)
        return AxisRule(self.token_id, int(vision.spatial_merge_size), seconds)

    @property
    def looks_both_ways(self) -> bool:
        """Whether tokens of an image attend to later tokens of the same image."""
        return cast(Any, self.module.config).model_type in _BOTH_WAYS

    @property
    def masks_by_other_rules(self) -> bool:
        """Whether the kinds of tokens decide what they attend to, in a way that is not known here."""
        given = inspect.signature(self.module.forward).parameters
        kinds = {"token_type_ids", "mm_token_type_ids"}
        return not kinds.isdisjoint(given) and not self.has_axes and not self.looks_both_ways


_parts: WeakKeyDictionary[nn.Module, VisionPart | None] = WeakKeyDictionary()


def find_vision_part(model: nn.Module) -> VisionPart | None:
    """The part of a model that takes images; None for a text model."""
    core = base_model(model)
    if core not in _parts:
        _parts[core] = _find(core)
    return _parts[core]


def _find(core: Any) -> VisionPart | None:
    if getattr(core.config, "vision_config", None) is None:
        return None
    for module in core.modules():
        if hasattr(module, "get_image_features") and _merger(module) is not None:
            return VisionPart(module, int(core.config.image_token_id))
    return None


def _merger(module: nn.Module) -> str | None:
    """The method that finds the tokens of images."""
    for name in ("get_placeholder_mask", "inputs_merger"):
        if hasattr(module, name):
            return name
    return None


def vision_part(model: nn.Module) -> VisionPart:
    """The same; ValueError for a text model."""
    found = find_vision_part(model)
    if found is None:
        name = type(base_model(model)).__name__
        raise ValueError(f"{name} takes no images, and the data has some. Remove them, or change model.path.")
    if found.masks_by_other_rules:
        raise ValueError(other_masks(model))
    return found


def other_masks(model: nn.Module) -> str:
    """Why images of a model with masks of its own are refused."""
    return (
        f"{type(base_model(model)).__name__} decides by the kinds of tokens what they attend to "
        f"(token_type_ids). With images this is known for {', '.join(_BOTH_WAYS)} only. Change model.path."
    )


_TOWERS = ("visual", "vision_tower", "vision_model")


def towers_of(model: nn.Module) -> list[nn.Module]:
    """The vision tower of a model; nothing for a text model."""
    part = find_vision_part(model)
    if part is None:
        return []
    return [getattr(part.module, name) for name in _TOWERS if hasattr(part.module, name)]


def freeze_tower(model: nn.Module) -> None:
    """The vision tower, and adapters in it, are not trained. A projector outside of the tower is."""
    towers = towers_of(model)
    if not towers:
        name = type(base_model(model)).__name__
        raise ValueError(f"freeze_vision_tower=true, but {name} has no vision tower. Take it out.")
    for tower in towers:
        tower.requires_grad_(False)


# --- layout -------------------------------------------------------------------------------------------------


def lay_out_images(
    model: nn.Module,
    table: Tensor,
    images: Sequence[Images],
    *,
    packed: bool,
    share: bool = True,
    device: torch.device | str = "cpu",
) -> Inputs:
    """`lay_out` for rows with images: ids from FIRST on are rows of the features of `Inputs.images`."""
    part = vision_part(model)
    known: dict[str, tuple[int, ImageInput]] = {}
    keyed = table.clone()
    for row, own in enumerate(images):
        if own:
            keyed[row] = number_image_tokens(table[row], own, part.token_id, known)
    inputs = lay_out(keyed, packed=packed, share=share, device=device)
    inputs = replace(inputs, images=tuple(image for _, image in known.values()))
    if part.looks_both_ways and inputs.packing is not None and known:
        inputs = replace(inputs, packing=replace(inputs.packing, reach=_reach(keyed, inputs).to(device)))
    if not part.has_axes:
        return inputs
    positions = torch.zeros(3, inputs.ids.numel(), dtype=torch.long)
    prefixes: dict[bytes, Tensor] = {}
    for row, own in enumerate(images):
        places = inputs.places[row]
        places = places[places != NOTHING]
        ids, numbered = table[row, : len(places)], keyed[row, : len(places)]
        positions[:, places] = axis_positions(part, ids, numbered, own, prefixes)
    return replace(inputs, positions=positions.view(3, *inputs.ids.shape).to(device))


def _reach(keyed: Tensor, inputs: Inputs) -> Tensor:
    """[N] `last_seen` of each token of a packed row. Sequences that share a token share its image."""
    real = inputs.places != NOTHING
    found = torch.empty(inputs.ids.numel(), dtype=torch.long)
    found[inputs.places[real]] = last_seen(keyed >= FIRST)[real]
    return found


def number_image_tokens(
    ids: Tensor, images: Images, token_id: int, known: dict[str, tuple[int, ImageInput]]
) -> Tensor:
    """Ids of a sequence in which tokens of images and videos are FIRST and the row of their feature. `known`
    has the first row of each image, by digest; new images are added."""
    numbers: dict[int, list[Tensor]] = {}
    for image in images:
        if image.digest not in known:
            start = 0
            if known:
                last, before = next(reversed(known.values()))
                start = last + before.num_tokens
            known[image.digest] = (start, image)
        if not image.unused:
            kind = image.token_id if image.video else token_id
            own = known[image.digest][0] + torch.arange(image.num_tokens)
            numbers.setdefault(kind, []).append(own)
    keyed = ids
    for kind, pieces in numbers.items():
        rows = torch.cat(pieces)
        places = (ids == kind).nonzero().flatten()
        if len(places) < len(rows):
            raise ValueError(
                f"A sequence has {len(places)} image tokens and images with {len(rows)}. Was its prompt cut?"
            )
        keyed = keyed.index_put((places[: len(rows)],), FIRST + rows)
    return keyed


def axis_positions(
    part: VisionPart, ids: Tensor, keyed: Tensor, images: Images, known: dict[bytes, Tensor]
) -> Tensor:
    """[3, L] positions of a sequence; `keyed` has its image tokens numbered. `known` keeps those of
    beginnings up to the last image token, which samples of a prompt share."""
    places = (keyed >= FIRST).nonzero().flatten()
    length = len(keyed)
    if not len(places):
        return torch.arange(length).expand(3, -1)
    end = int(places[-1]) + 1
    key = keyed[:end].numpy().tobytes()
    if key not in known:
        known[key] = three_axes(ids[:end], keyed[:end] >= FIRST, images, part.axes)
    begin = known[key]
    later = begin.max() + 1 + torch.arange(length - end)
    return torch.cat([begin, later.expand(3, -1)], dim=1)


def with_spare_image(piece: Batch, whole: Batch) -> Batch:
    """A piece of a batch with images has at least one image, used or not: sharded weights of the vision tower
    are gathered by all ranks or by none."""
    if not whole.images or not piece.images or any(piece.images):
        return piece
    spare = next(images[0] for images in whole.images if images)
    return piece.replace(images=[(replace(spare, unused=True),), *piece.images[1:]])


# --- features -----------------------------------------------------------------------------------------------


@contextmanager
def images_in(
    model: PreTrainedModel, inputs: Inputs, cache: FeatureCache | None = None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The ids of a pass, and the further arguments of the model's forward. Inside the block the model puts
    the features of `inputs.images` where they belong."""
    if not inputs.images:
        yield inputs.ids, {}
        return
    part = vision_part(model)
    chosen = inputs.ids >= FIRST
    take = inputs.ids[chosen] - FIRST
    ids = inputs.ids.where(~chosen, part.token_id)
    missing = [image for image in inputs.images if cache is None or image not in cache]
    weight = next(model.parameters())
    arguments = joined_tensors(missing or inputs.images[:1], weight.device, weight.dtype)
    if part.looks_both_ways:
        arguments["token_type_ids"] = chosen.long()
    with ExitStack() as stack:
        compute = _features_of(part, inputs.images, missing, cache, take)
        stack.enter_context(replaced_method(part.module, "get_image_features", compute))
        merger = _merger(part.module)
        assert merger is not None
        stack.enter_context(replaced_method(part.module, merger, _merging(part.module, merger, chosen)))
        yield ids, arguments


def joined_tensors(
    images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of several images as one call takes them."""
    found = {}
    for name in images[0].tensors:
        pieces = [image.tensors[name] for image in images]
        crops = "pixel_attention_mask" in images[0].tensors  # [1, crops, ...]
        whole = torch.cat(_same_size(pieces) if crops else pieces, dim=1 if crops else 0)
        found[name] = whole.to(device, dtype if whole.is_floating_point() else None)
    return found


def _same_size(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Crops padded to the height and width of the largest."""
    height = max(piece.shape[-2] for piece in pieces)
    width = max(piece.shape[-1] for piece in pieces)
    return [pad(piece, (0, width - piece.shape[-1], 0, height - piece.shape[-2])) for piece in pieces]


def _features_of(
    part: VisionPart,
    images: Images,
    missing: Sequence[ImageInput],
    cache: FeatureCache | None,
    take: Tensor,
) -> Callable[..., object]:
    """get_image_features that gives one row for each image token of the pass."""
    own = part.module.get_image_features
    assert callable(own)
    in_a_list = _merger(part.module) != "inputs_merger" and not part.looks_both_ways
    # transformers 5.18 and later also take the features of each layer in a list.
    layers_in_lists = "mm_encoder_outputs" in inspect.signature(part.module.forward).parameters

    def compute(*arguments: object, **options: object) -> object:
        for name in ("packing", "rollout"):  # how the language model attends
            options.pop(name, None)
        known: dict[str, Features] = {}
        for image in images:  # before new ones replace them in the cache
            if cache is not None and image in cache:
                known[image.digest] = cache.get(image)
        if missing:
            dtype = next(part.module.parameters()).dtype  # sharded weights are gathered in that of the pass
            cast_options = {name: _cast(value, dtype) for name, value in options.items()}
            output = own(*(_cast(value, dtype) for value in arguments), **cast_options)
            by_layer = getattr(output, "deepstack_features", None) or ()
            tables = [_flat(features) for features in (output.pooler_output, *by_layer)]
            sizes = [image.num_tokens for image in missing]
            _refuse_other_count(tables[0], sizes)
            split = [table.split(sizes) for table in tables]
            for image, features in zip(missing, zip(*split, strict=True), strict=True):
                known[image.digest] = features
                if cache is not None:
                    cache.put(image, features)
        by_image = [known[image.digest] for image in images]
        whole = [torch.cat(parts).index_select(0, take) for parts in zip(*by_image, strict=True)]
        features = (whole[0],) if in_a_list else whole[0]
        by_layer = [(table,) for table in whole[1:]] if layers_in_lists else whole[1:]
        return SimpleNamespace(pooler_output=features, deepstack_features=by_layer)

    return compute


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images as [tokens, H]."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([one.flatten(0, -2) for one in features])


def _refuse_other_count(table: Tensor, sizes: Sequence[int]) -> None:
    if len(table) != sum(sizes):
        raise ValueError(
            f"The vision tower gives {len(table)} features for images with {sum(sizes)} tokens. The "
            "processor (preprocessor_config.json) must belong to the model."
        )


def _merging(module: nn.Module, name: str, chosen: Tensor) -> Callable[..., object]:
    """The method that puts features where `chosen` is true."""
    if name == "inputs_merger":

        def merge(input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Tensor:
            return inputs_embeds.masked_scatter(chosen[..., None], image_hidden_states.to(inputs_embeds))

        return merge
    own = getattr(module, name)
    several = "video_features" in inspect.signature(own).parameters

    def mask(*_: object, **__: object) -> object:
        found = chosen[..., None]
        return (found, torch.zeros_like(found)) if several else found

    return mask


@contextmanager
def replaced_method(module: nn.Module, name: str, method: Callable[..., object]) -> Iterator[None]:
    """Inside the block `method` is the method `name` of `module`."""
    setattr(module, name, method)
    try:
        yield
    finally:
        delattr(module, name)
