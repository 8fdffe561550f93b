"""A token gets the same bits from a product whatever the other rows are."""

from __future__ import annotations

import pytest
import torch

from strop.models.projections.divided import DividedLinear, divides
from strop.models.residual import add_product


@pytest.mark.parametrize(
    ("inner", "divided"), [(576, False), (1536, False), (2048, True), (2056, False), (8960, True)]
)
def test_long_products_are_divided(inner: int, divided: bool) -> None:
    assert divides(inner) is divided  # halves begin at multiples of 16 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("inner, outer", [(4864, 896), (8960, 1536), (3584, 3584), (1536, 1536)])
def test_few_rows_have_the_bits_of_many(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    states = torch.randn(6000, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    stream = torch.randn(6000, outer, device="cuda")
    together = add_product(stream, states, weight)
    exact = stream.double() + states.double() @ weight.double().t()
    torch.testing.assert_close(together.double(), exact, rtol=1e-5, atol=1e-4)
    for count in (1, 2, 7, 8, 16, 33, 64, 100, 160, 256, 300, 512, 513, 1024, 4096):
        some = torch.randperm(6000, device="cuda")[:count]
        assert torch.equal(add_product(stream[some], states[some], weight), together[some]), count
        given = stream[some]
        assert add_product(given, states[some], weight, in_place=True).data_ptr() == given.data_ptr()
        assert torch.equal(given, together[some]), count


@pytest.mark.gpu
def test_gradients_of_a_divided_product() -> None:
    torch.manual_seed(0)
    given = [
        torch.randn(40, 96, device="cuda"),
        torch.randn(40, 4096, device="cuda", dtype=torch.bfloat16),
        torch.randn(96, 4096, device="cuda", dtype=torch.bfloat16) / 64,
    ]
    above = torch.randn(40, 96, device="cuda").bfloat16().float()
    leaves = [x.clone().requires_grad_() for x in given]
    found = torch.autograd.grad(add_product(*leaves), leaves, above)
    exact = [above.double(), above.double() @ given[2].double(), above.double().t() @ given[1].double()]
    for gradient, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("inner, outer", [(3420, 1280), (5120, 2048), (4096, 1024)])
def test_a_divided_layer_has_the_same_bits_for_any_number_of_rows(inner: int, outer: int) -> None:
    """3,420, of Qwen2.5-VL's tower, is filled up with zeros."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(inner, outer, device="cuda", dtype=torch.bfloat16)
    layer.__class__ = DividedLinear
    states = torch.randn(16384, inner, device="cuda", dtype=torch.bfloat16)
    together = layer(states)
    exact = layer.double()(states.double())
    layer.bfloat16()
    torch.testing.assert_close(together.double(), exact, rtol=1e-2, atol=1e-2)
    for count in (1, 64, 256, 512, 513, 1024, 1536, 4096, 8192):
        assert torch.equal(layer(states[-count:]), together[-count:]), count
    rows = states[:300].clone().requires_grad_()
    above = torch.randn(300, outer, device="cuda", dtype=torch.bfloat16)
    found = torch.autograd.grad(layer(rows), (rows, layer.weight, layer.bias), above)
    wide = above.double()
    expected = (wide @ layer.weight.double(), wide.t() @ rows.double(), wide.sum(0))
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient.double() - wanted).norm() < 1e-2 * wanted.norm()
