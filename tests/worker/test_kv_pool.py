"""Pages of the KV cache: written, copied, poisoned."""

import numpy as np
import pytest
import torch

from stemserve.worker.memory.kv_pool import KvPool, KvShape

SHAPE = KvShape(layers=3, pages=8, page_size=4, kv_heads=2, head_dim=6, dtype=torch.float32)


def filled_pool(seed: int) -> KvPool:
    generator = torch.Generator().manual_seed(seed)
    pool = KvPool(SHAPE, torch.device("cpu"))
    for layer in range(SHAPE.layers):
        pool.k_pages(layer).normal_(generator=generator)
        pool.v_pages(layer).normal_(generator=generator)
    return pool


def test_a_new_pool_holds_zeros() -> None:
    pool = KvPool(SHAPE, torch.device("cpu"))
    assert all(pool.k_pages(layer).count_nonzero() == 0 for layer in range(SHAPE.layers))
    assert all(pool.v_pages(layer).count_nonzero() == 0 for layer in range(SHAPE.layers))


@pytest.mark.parametrize("seed", range(3))
def test_write_puts_rows_into_their_slots_of_one_layer(seed: int) -> None:
    pool, untouched = filled_pool(seed), filled_pool(seed)
    slots = torch.tensor([30, 5, 4])
    k, v = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    pool.write(1, slots, k, v)
    for row, slot in enumerate(slots.numpy().tolist()):
        assert torch.equal(pool.k_pages(1)[slot // 4, slot % 4], k[row])
        assert torch.equal(pool.v_pages(1)[slot // 4, slot % 4], v[row])
    others = torch.ones(8, 4, dtype=torch.bool)
    others.view(-1)[slots] = False
    assert torch.equal(pool.k_pages(1)[:8][others], untouched.k_pages(1)[:8][others])
    for layer in (0, 2):
        assert torch.equal(pool.k_pages(layer), untouched.k_pages(layer))
        assert torch.equal(pool.v_pages(layer), untouched.v_pages(layer))


@pytest.mark.parametrize("seed", range(3))
def test_copy_moves_the_first_tokens_of_pages_in_all_layers(seed: int) -> None:
    pool, expected = filled_pool(seed), filled_pool(seed)
    copies = np.array([[0, 5, 3], [0, 6, 1], [7, 2, 4]], np.int32)
    pool.copy(copies)
    for layer in range(SHAPE.layers):
        for source, destination, tokens in copies.tolist():
            for pages in (expected.k_pages(layer), expected.v_pages(layer)):
                pages[destination, :tokens] = pages[source, :tokens]
        assert torch.equal(pool.k_pages(layer), expected.k_pages(layer))
        assert torch.equal(pool.v_pages(layer), expected.v_pages(layer))


def test_no_copies_change_nothing() -> None:
    pool = filled_pool(0)
    pool.copy(np.empty((0, 3), np.int32))
    assert torch.equal(pool.k_pages(0), filled_pool(0).k_pages(0))


def test_poisoned_pages_are_nan_in_all_layers_and_others_are_not() -> None:
    pool = filled_pool(0)
    pool.poison(np.array([1, 6], np.int32))
    for layer in range(SHAPE.layers):
        for pages in (pool.k_pages(layer), pool.v_pages(layer)):
            is_nan = pages.isnan().flatten(1)
            assert is_nan.all(1).numpy().tolist() == is_nan.any(1).numpy().tolist()
            assert is_nan.any(1).nonzero().flatten().numpy().tolist() == [1, 6]


def test_bytes_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == 2 * 3 * 2 * 6 * 4
    assert SHAPE.total_bytes == SHAPE.bytes_per_token * 8 * 4


@pytest.mark.parametrize("pages", [0, -1, 2**29])
def test_a_pool_that_int32_slots_cannot_number_is_refused(pages: int) -> None:
    with pytest.raises(ValueError, match="page"):
        KvShape(layers=1, pages=pages, page_size=4, kv_heads=1, head_dim=1, dtype=torch.float32)
