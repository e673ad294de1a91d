"""Which requests' blocks are checked, how workers hear of them, and which memory is read for them."""

from __future__ import annotations

import numpy as np
import pytest

from instrumented_connectors.block_memory import BlockMemory, regions
from instrumented_connectors.block_news import NEWS_ATTRIBUTE, BlockNews, News
from instrumented_connectors.sampling import Sampling
from tests import connector_doubles as doubles


def test_both_sides_choose_the_same_requests_whatever_their_suffixes() -> None:
    sampling = Sampling(0.25)
    taken = [sampling.takes(f"cmpl-{number}-0-aaaaaaaa") for number in range(4000)]

    assert taken == [sampling.takes(f"cmpl-{number}-0-{number:08x}") for number in range(4000)]
    assert taken == [sampling.takes(f"1_cmpl-{number}-0-{number:08x}") for number in range(4000)]
    assert 900 < sum(taken) < 1100
    assert all(Sampling(1.0).takes(str(number)) for number in range(100))
    assert not any(Sampling(0.0).takes(str(number)) for number in range(100))


@pytest.mark.parametrize(("text", "rate"), [("0.1", 0.1), ("", 0), ("x", 0), ("nan", 0), ("7", 1), ("-1", 0)])
def test_the_rate_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, rate: float) -> None:
    monkeypatch.setenv("KVTRACE_VERIFY_KV", text)

    assert Sampling.from_environment().rate == rate


def test_the_scheduler_tells_workers_what_p_keeps_and_what_is_given_up() -> None:
    tracer, connector = doubles.Memory(), doubles.Connector()
    BlockNews(tracer, Sampling(1.0)).attach(connector)
    kept, flat, own = (doubles.request(name, {"do_remote_decode": True}) for name in ("kept", "flat", "own"))
    connector.request_finished_all_groups(kept, ([1, 2], [3]))
    connector.request_finished(flat, [4, 5])
    connector.returns["request_finished"] = (False, None)
    connector.request_finished(own, [6])
    carrying, empty = doubles.metadata(), doubles.metadata()
    connector.returns["build_connector_meta"] = carrying
    connector.build_connector_meta(doubles.output({}, preempted={"r"}))
    connector.returns["build_connector_meta"] = empty
    connector.build_connector_meta(doubles.output({}))

    assert getattr(carrying, NEWS_ATTRIBUTE) == News({"kept": [[1, 2], [3]], "flat": [[4, 5]]}, ["own", "r"])
    assert not hasattr(empty, NEWS_ATTRIBUTE)


def test_descriptors_of_another_shape_tell_no_regions() -> None:
    rows = np.array([(1000 + 64 * at, 64, 0) for at in range(12)])
    uneven, gap = rows.copy(), rows.copy()
    uneven[3, 1] = 32
    gap[5:, 0] += 64

    assert [tuple(region) for region in regions(rows, 4) or ()] == [(1000, 64, 64), (1256, 64, 64), (1512, 64, 64)]
    assert (
        regions(uneven, 4) is regions(gap, 4) is regions(rows, 5) is regions(rows, 0) is regions([(1, 2, 3)], 1) is None
    )


def test_memory_that_nobody_registered_is_not_read() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(256, dtype=torch.uint8)
    inside = regions(np.array([(tensor.data_ptr() + 64 * at, 64, 0) for at in range(4)]), 4)
    beyond = regions(np.array([(tensor.data_ptr() + 64 * at, 64, 0) for at in range(5)]), 5)

    assert BlockMemory.of(inside or (), [tensor], 4) is not None
    assert BlockMemory.of(beyond or (), [tensor], 5) is None
