"""The places of words in objects of torch and Python whose change shows that a tensor was replaced or moved.

Problem: asking a thousand tensors for their addresses, even in C, takes as long as a small step: each question
follows three pointers that are no longer in the cache.  Comparing words at known places follows none.

Design: no header promises the places, so they are found in this process: words are compared with what torch says
(`_cdata`, `data_ptr()`, `storage_offset()`), and before and after a change.  If anything is not where it is expected,
`find_places` returns None, and watch.py asks every tensor.  Reading stays inside objects: only as many words are read
as every build of torch and Python has there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["Places", "find_places"]

Places = dict[str, int]  # the fields of zk_places

_IMPL_WORDS = 22  # words that every TensorImpl has, at least
_FEW_WORDS = 8
_LEAST_ADDRESS = 1 << 16  # smaller words are numbers
_SHAPE, _STRIDES, _OFFSET = (3, 5), (1013, 149), 17  # numbers that are nothing else in a tensor
_DTYPE_BITS = 2**40 - 1  # of a word: dtype and device, as DTYPE_BITS of tensors.c
_KIND = (1, 2, 6, 7, 11, 12)  # words from the dims to these sizes and strides, the offset and the number of elements


def find_places() -> Places | None:
    """Return the places in this process; None if torch or Python are built in another way."""
    try:
        found = {**_tensor_places(), **_autograd_places(), **_container_places()}
        extras = _float32(2), torch.ones(4, 3, dtype=torch.bfloat16, device="cpu")[1:]
    except Exception:  # whatever another torch or Python, or a mode of torch, does here: the next reader needs less
        return None
    for extra in extras:  # the same in other tensors
        impl = _word(id(extra) + found["impl"])
        storage = _word(impl + found["storage"])
        expected = (extra._cdata, extra.untyped_storage()._cdata, extra.storage_offset())
        if (impl, storage, _word(impl + found["kind"] + 8 * _KIND[4])) != expected:
            return None
        if _word(storage + found["data"]) != extra.untyped_storage().data_ptr():
            return None
    return found


def _tensor_places() -> Places:
    """The implementation of a tensor object, its storage, and where the memory of that begins."""
    tensor = _float32(6000).as_strided(_SHAPE, _STRIDES, _OFFSET)
    storage = tensor.untyped_storage()
    foreign = torch.frombuffer(bytearray(16), dtype=torch.float32).untyped_storage()  # its owner is no second address
    impl_words = _words(tensor._cdata, _IMPL_WORDS)
    kind = _position(impl_words, _SHAPE[0]) - 8
    sizes, strides = ([_position(impl_words, value) for value in values] for values in (_SHAPE, _STRIDES))
    rest = [_position(impl_words, value) for value in (_OFFSET, tensor.numel())]
    if impl_words[kind // 8] != len(_SHAPE) or [*sizes, *strides, *rest] != [kind + 8 * k for k in _KIND]:
        raise LookupError("dims, sizes, strides, offset and number of elements do not follow one another")
    other, twin = tensor.to(torch.bfloat16), _float32(6000).as_strided(_SHAPE, _STRIDES, _OFFSET)
    others, plain = _words(other._cdata, _IMPL_WORDS), _words(twin._cdata, _IMPL_WORDS)
    elsewhere = _words(torch.empty(3, device="meta", dtype=torch.float32)._cdata, _IMPL_WORDS)
    own, of_dtype, of_device, equal = (
        words[rest[1] // 8 + 1] & _DTYPE_BITS for words in (impl_words, others, elsewhere, plain)
    )
    if own in (of_dtype, of_device) or own != equal:
        raise LookupError("dtype and device do not follow the number of elements")
    return {
        "impl": _position(_words(id(tensor), torch.Tensor.__basicsize__ // 8), tensor._cdata),
        "storage": _position(impl_words[:_FEW_WORDS], storage._cdata),
        "kind": kind,
        "data": _position(_words(foreign._cdata, _FEW_WORDS), foreign.data_ptr()),
    }


def _autograd_places() -> Places:
    """Autograd's record of a tensor, and the gradient in it."""
    tensor, grad = _float32(3), _float32(3)
    before = _words(tensor._cdata, _IMPL_WORDS)
    tensor.requires_grad_()
    changed = [k for k, word in enumerate(_words(tensor._cdata, _IMPL_WORDS)) if word != before[k]]
    (meta,) = [k for k in changed if before[k] == 0] if len(changed) == 1 else _missing("autograd's record")
    record = _word(tensor._cdata + 8 * meta)
    if record < _LEAST_ADDRESS or record % 8:
        _missing("autograd's record")
    empty = _words(record, _FEW_WORDS)
    tensor.grad = grad
    place = _position(_words(record, _FEW_WORDS), grad._cdata)
    return {"meta": 8 * meta, "grad": place, "no_grad": empty[place // 8]}


def _container_places() -> Places:
    """The length and the items of a list, the version of a dict."""
    items: list[object] = [torch.ones(()), "another", 3]
    words = _words(id(items), list.__basicsize__ // 8)
    length, array = 16, 24
    if words[length // 8] != len(items) or _words(words[array // 8], len(items)) != [id(item) for item in items]:
        _missing("the items of a list")
    watched: dict[str, object] = {"a": items[0]}
    place, versions = 24, set()
    for value in (items[1], items[2], items[0]):
        versions.add(_word(id(watched) + place))
        watched["a"] = value  # no other word of a dict changes here
    del watched["a"]
    another: dict[str, object] = {}
    versions |= {_word(id(watched) + place), _word(id(another) + place)}
    is_version = len(versions) == 5  # else the items of a dict are compared
    return {"length": length, "items": array, "version": place if is_version else 0}


def _float32(numel: int) -> torch.Tensor:
    """Return a tensor whose kind no default of torch changes."""
    return torch.ones(numel, dtype=torch.float32, device="cpu")


def _missing(what: str) -> Sequence[int]:
    raise LookupError(f"{what} has no known place")


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _position(words: list[int], value: int) -> int:
    """Return the offset in bytes of a value that occurs once."""
    if words.count(value) != 1:
        _missing(f"the word {value}")
    return 8 * words.index(value)
