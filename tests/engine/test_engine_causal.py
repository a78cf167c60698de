"""The CPU's attention against its definition: every position sees itself and what is before it."""

import pytest

torch = pytest.importorskip("torch")

from polarnode.engine.embedded import causal  # noqa: E402 - torch first, or there is nothing to test
from polarnode.engine.embedded.causal import extend  # noqa: E402


def by_definition(
    queries: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", scale: float
) -> "torch.Tensor":
    heads, count, _ = queries.shape
    prefix = keys.shape[1] - count
    group = heads // keys.shape[0]
    rows = []
    for head in range(heads):
        for place in range(count):
            seen = prefix + place + 1
            weights = torch.softmax(keys[head // group, :seen] @ queries[head, place] * scale, dim=0)
            rows.append(weights @ values[head // group, :seen])
    return torch.stack(rows).reshape(queries.shape)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (6, 6), (1, 9), (5, 9), (7, 8), (3, 40)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_attention_is_causal(
    count: int, length: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(causal, "QUERIES", 3)  # several blocks
    queries, keys, values = (
        torch.randn(heads, count, 8),
        torch.randn(kv_heads, length, 8),
        torch.randn(kv_heads, length, 8),
    )
    found = extend(queries, keys, values, scale=0.3, grouped=heads != kv_heads)
    assert torch.allclose(found, by_definition(queries, keys, values, 0.3), atol=1e-5)
