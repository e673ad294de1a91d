"""The receiver of profiles where there is no server: what it takes, refuses and keeps."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import httpx
import pytest

from kvtrace.profiles import folder, pprof
from kvtrace.profiles.messages import PushRequest
from kvtrace.profiles.receiver import PATH, Receiver
from tests.profile_pushes import HOSTILE, SECOND_NS, push
from tests.sample_store import START_NS
from tests.waiting import LONG_S

PROTO = {"Content-Type": "application/proto"}


def test_a_hostile_push_gets_no_file_outside_and_keeps_its_labels(tmp_path: Path) -> None:
    labels = {"role": "../../x\0", "process": "/etc", "engine": HOSTILE, "rank": "0", "secret": "no"}
    with Receiver(tmp_path / "profiles") as receiver:
        answer = httpx.post(
            receiver.url + PATH,
            content=push([(("f" * 10_000,), {"a\n": '"'}, 1)], **labels),
            headers=PROTO,
            timeout=LONG_S,
        )
    (path,) = tmp_path.rglob("*.pb.gz")
    (one,) = folder.files(tmp_path / "profiles")
    profile = pprof.parse(path.read_bytes())
    found = {profile.string_table[each.key]: profile.string_table[each.str] for each in profile.sample[0].label}

    assert answer.status_code == 200
    assert path == one.path
    assert (one.begin_ns, one.end_ns) == (START_NS, START_NS + SECOND_NS)
    assert found == {"a\n": '"', **{name: value for name, value in labels.items() if name != "secret"}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (PATH, b"\x1f\x8bnothing", 400),
        (PATH, b"\xff\xff\xff", 400),
        (PATH, gzip.compress(PushRequest(series=[{"samples": [{"rawProfile": b"\xff"}]}]).SerializeToString()), 400),
        (PATH, gzip.compress(bytes(pprof.BYTES_MOST + 1)), 400),
        ("/elsewhere", b"", 404),
    ],
    ids=["no gzip", "no push", "no profile", "too large", "elsewhere"],
)
def test_what_is_no_push_is_refused_and_the_next_one_taken(tmp_path: Path, path: str, body: bytes, status: int) -> None:
    with Receiver(tmp_path) as receiver:
        refused = httpx.post(receiver.url + path, content=body, headers=PROTO, timeout=LONG_S)
        taken = httpx.post(receiver.url + PATH, content=push([(("f",), {}, 1)]), headers=PROTO, timeout=LONG_S)

        assert (refused.status_code, taken.status_code, receiver.kept) == (status, 200, 1)
        assert bool(receiver.failure) == (status == 400)


def test_a_page_in_a_browser_cannot_push(tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
        answer = httpx.post(
            receiver.url + PATH, content=push([(("f",), {}, 1)]), headers={"Content-Type": "text/plain"}, timeout=LONG_S
        )

    assert (answer.status_code, receiver.kept) == (415, 0)


def test_past_its_budget_a_folder_takes_no_more(tmp_path: Path) -> None:
    keeper = folder.Keeper(tmp_path, budget_bytes=400)
    keeper.keep(push([(("f",), {}, 1)]))
    keeper.keep(push([(("f",), {}, 1)]))
    with pytest.raises(OSError, match="limit"):
        keeper.keep(push([((f"f{number}",), {}, number) for number in range(200)]))

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400
    assert keeper.kept == len(folder.files(tmp_path)) == 2


def test_a_full_disk_leaves_no_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), len(data))

    keeper = folder.Keeper(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            keeper.keep(push([(("f",), {}, 1)]))

    assert list(tmp_path.iterdir()) == []
    assert keeper.kept == 0
