"""The bytes of a worker's KV blocks, wherever they lie, read without the engine's step waiting for it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Region(NamedTuple):
    """One run of equal blocks as NIXL was told of it: where the first begins, how far apart they are, their bytes."""

    base: int
    stride: int
    length: int


def regions(rows: Any, num_blocks: int) -> list[Region] | None:
    """Return the regions of a list of descriptors, (address, length, device) each, region by region.

    None where the list has another shape: then nobody can tell from it where a block lies.
    """
    if getattr(rows, "ndim", 0) != 2 or rows.shape[1] != 3 or num_blocks < 1 or not len(rows) or len(rows) % num_blocks:
        return None
    found = []
    for first in range(0, len(rows), num_blocks):
        part = rows[first : first + num_blocks]
        addresses, lengths = part[:, 0], part[:, 1]
        strides = addresses[1:] - addresses[:-1]
        if (lengths != lengths[0]).any() or (strides != strides[:1]).any():
            return None
        found.append(Region(int(addresses[0]), int(strides[0]) if len(strides) else 0, int(lengths[0])))
    return found


class _Place(NamedTuple):
    """A region in memory: the bytes of what holds it, and where in them its first block begins."""

    flat: Any
    offset: int
    stride: int
    length: int


class BlockMemory:
    """Reads blocks. It holds the memory that it reads, so that none is read after it was given back."""

    def __init__(self, places: list[_Place], device: Any) -> None:
        self._places = places
        self._device = device
        self._stream: Any = None

    @classmethod
    def of(cls, found: Iterable[Region], tensors: Iterable[Any], num_blocks: int) -> BlockMemory | None:
        """Return the memory of these regions inside these torch tensors; None where one lies in none of them."""
        import torch

        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = (tensor.device, storage)
        places, kinds, flats = [], set(), {}
        for region in found:
            last = region.base + region.stride * (num_blocks - 1) + region.length
            holds = (one for one in storages if one <= region.base and last <= one + storages[one][1].nbytes())
            base = next(holds, None)
            if base is None:
                return None
            device, storage = storages[base]
            kinds.add(device.type)
            if base not in flats:
                flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
                flats[base] = flat.numpy() if device.type == "cpu" else flat
            places.append(_Place(flats[base], region.base - base, region.stride, region.length))
        if len(kinds) != 1:
            return None
        kind = kinds.pop()
        return cls(places, None if kind == "cpu" else getattr(torch, kind))

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, over all regions."""
        return sum(place.length for place in self._places)

    def checksum(self, block: int) -> int:
        """Return the checksum of a block as it is now. On an accelerator a stream of its own copies it."""
        if self._device is None:
            return _crc(self._parts(block))
        with self._device.stream(self._own_stream()):
            return _crc([_joined(self._parts(block)).cpu().numpy()])

    def copied(self, block: int) -> Callable[[], int]:
        """Copy a block, behind what the calling thread has launched and ahead of what it launches next.

        Return what works out the copy's checksum later, on another thread.
        """
        if self._device is None:
            copy = b"".join(self._parts(block))
            return lambda: zlib.crc32(copy)
        joined = _joined(self._parts(block))
        event = self._device.Event()
        event.record()

        def later() -> int:
            event.synchronize()
            with self._device.stream(self._own_stream()):
                return _crc([joined.cpu().numpy()])

        return later

    def _own_stream(self) -> Any:
        if self._stream is None:
            self._stream = self._device.Stream()
        return self._stream

    def _parts(self, block: int) -> Iterator[Any]:
        for flat, offset, stride, length in self._places:
            at = offset + stride * block
            yield flat[at : at + length]


def _joined(parts: Iterable[Any]) -> Any:
    import torch

    return torch.cat(list(parts))


def _crc(parts: Iterable[Any]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
