"""numpy arrays as the C ABI sees them."""
import numpy

from . import _c_api

KIND = "a numpy array"
DTYPES = {numpy.dtype(numpy.float32): _c_api.F32, numpy.dtype(numpy.float16): _c_api.F16}
empty_like = numpy.empty_like
int32 = numpy.int32


def dtype_of(x):
    """Its code, or None. bfloat16 is ml_dtypes', which numpy does not know by itself."""
    code = DTYPES.get(x.dtype)
    return _c_api.BF16 if code is None and x.dtype.name == "bfloat16" else code


def look(q, k, v):
    """Everything that describe and its caller judge by: arrays are accepted if others that look the same were."""
    return q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype


def describe(name, x):
    """Address, device index, dtype's code and strides in elements."""
    item = x.itemsize
    a, b, c, d = x.strides
    if (a | b | c | d) % item:
        raise ValueError(f"{name}: got strides of {x.strides} bytes, expected multiples of its elements' {item}")
    return address(x), -1, dtype_of(x), (a // item, b // item, c // item, d // item)


def index_of(x):
    return -1


def address(x):
    return x.__array_interface__["data"][0]  # twice as fast as x.ctypes.data


def empty_words(shape, like):
    return numpy.empty(shape, numpy.int32)


def empty_floats(shape, like):
    return numpy.empty(shape, numpy.float32)


def as_bits(x):
    return x.view(numpy.uint32)


def is_bool(x):
    return x.dtype == bool


def check_words(name, x, shape, index):
    """32-bit integers of this shape, one after the other."""
    if not hasattr(x, "__array_interface__"):
        raise TypeError(f"{name}: got {type(x).__name__}, expected {KIND}")
    if x.dtype not in (numpy.int32, numpy.uint32):
        raise TypeError(f"{name}: got {x.dtype}, expected 32-bit integers; scope_attn.pack_bits makes them of booleans")
    if x.shape != shape or not x.flags.c_contiguous:
        raise ValueError(f"{name}: got shape {list(x.shape)} with strides {x.strides}, expected {list(shape)}, contiguous")


def take_along(x, index):
    """x[..., index[..., i]] for every i."""
    return numpy.take_along_axis(x, index, -1)


def pack_bits(mask):
    pad = [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)]
    return numpy.packbits(numpy.pad(mask, pad), axis=-1, bitorder="little").view(numpy.uint32)


def unpack_bits(words, tokens):
    return numpy.unpackbits(words.view(numpy.uint8), axis=-1, count=tokens, bitorder="little").astype(bool)
