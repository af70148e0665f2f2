"""PyTorch tensors as the C ABI sees them, and the operators scope_attn::attention, with and without a state and the log-sum-exp."""
import functools

import torch

from . import _c_api, _functions, _plan

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"scope_attn needs PyTorch 2.6 or newer for tensors, and this is {torch.__version__}")

KIND = "a PyTorch tensor"
DTYPES = {torch.float32: _c_api.F32, torch.float16: _c_api.F16, torch.bfloat16: _c_api.BF16}
empty_like = torch.empty_like
int32 = torch.int32


def look(q, k, v):
    """Everything that describe and its caller judge by: arrays are accepted if others that look the same were."""
    return (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad), q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device)


def describe(name, x):
    """Address, device index, dtype's code and strides in elements."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: it requires gradients, and sparse attention has no backward pass; use torch.no_grad() or detach()")
    return x.data_ptr(), -1 if x.is_cpu else index_of(x, name), DTYPES.get(x.dtype), x.stride()


def dtype_of(x):
    return DTYPES.get(x.dtype)


def index_of(x, name="q"):
    """-1: the CPU; else which GPU."""
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"{name}: it is on {x.device}, expected the CPU or a CUDA device")
    return x.get_device()


def address(x):
    return x.data_ptr()


def empty_words(shape, like):
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def empty_floats(shape, like):
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def as_bits(x):
    return x


def is_bool(x):
    return x.dtype == torch.bool


def check_words(name, x, shape, index):
    """32-bit integers of this shape on this device, one after the other."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected {KIND}")
    if x.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"{name}: got {x.dtype}, expected 32-bit integers; scope_attn.pack_bits makes them of booleans")
    if x.get_device() != index:
        raise ValueError(f"{name}: it is on {x.device}, expected {'cpu' if index < 0 else f'cuda:{index}'}")
    if x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name}: got shape {list(x.shape)} with strides {x.stride()}, expected {list(shape)}, contiguous")


def take_along(x, index):
    """x[..., index[..., i]] for every i."""
    return torch.take_along_dim(x, index.long(), -1)


def pack_bits(mask):
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 8)).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)  # made there: a copy from the host would wait for a GPU
    return (padded << places).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack_bits(words, tokens):
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.view(torch.int32)[..., None] >> shifts & 1).flatten(-2)[..., :tokens].bool()


# ---- memory and streams of a GPU

# The current stream's address. The public way makes an object first, which costs a third of all that Python adds to a call.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def device_memory(size, index):
    return _no_memory(index).new_empty(size)  # a tensor's own method reads neither a dtype nor a device


@functools.lru_cache
def _no_memory(index):
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))


def record_stream(memory, index):
    """The current stream uses it from now on."""
    memory.record_stream(torch.cuda.current_stream(index))


def settled_memory(size, index):
    """Device memory that no earlier work of the current stream still uses, and that stream: the library writes it on another."""
    memory = device_memory(size, index)
    torch.cuda.current_stream(index).synchronize()
    return memory, raw_stream(index)


class Report:
    """Device memory for what a call on the current stream finds."""

    def __init__(self, size, index):
        self.stream, self.memory = torch.cuda.current_stream(index), device_memory(size, index)
        self.address = self.memory.data_ptr()

    def on_host(self):
        """What keeps the copy alive, and its address; waits for the stream."""
        with torch.cuda.stream(self.stream):
            copy = self.memory.cpu()
        return copy, copy.data_ptr()


# ---- the operators
#
# A State is a side effect that torch.compile must neither drop, repeat nor reorder, and its memory must not move. So the
# second one takes a ticket, a tensor of one number that names the State, and says that it changes it: a ticket may be copied.

def ticket(number):
    with torch.inference_mode(False):
        return torch.tensor([number])


def state_of(ticket):
    try:
        return _plan.states[ticket.item()]
    except KeyError:
        raise RuntimeError("state: its State is gone; keep it as long as calls use it") from None


for _state in list(_plan.states.values()):  # made before this module was needed
    _state.ticket = ticket(_state.number)

# Step, lengths and whether a state is filled are the host's to decide, so a call cannot be replayed by a graph that does not know.
_tags = [getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _tags.append(torch.Tag.cudagraph_unsafe)
_library = torch.library.Library("scope_attn", "DEF")
# Each argument costs each call a tenth of a microsecond, so most of what no call changes is one text.
_rest = "str what, str? model, int[]? rope, float scale, SymInt layer, SymInt step, SymInt steps, Tensor[] tokens)"


def pack_what(method, settings, tokens_first, tokens):
    """An operator's `what`; `tokens` are the names of its tensors. No part of it has a NUL, since C's strings end there."""
    return "\0".join([method, "BNHD" if tokens_first else "BHND", ",".join(tokens), *settings])


@functools.lru_cache
def unpack_what(what):
    method, layout, tokens, *settings = what.split("\0")
    return method, settings, _plan.LAYOUTS[layout], tokens.split(",")


def define_operator(name, with_state, return_lse):
    state = ", Tensor(a!) state" if with_state else ""
    _library.define(f"{name}(Tensor q, Tensor k, Tensor v{state}, {_rest} -> {'(Tensor, Tensor)' if return_lse else 'Tensor'}", tags=_tags)

    def call(q, k, v, *rest):
        state, rest = (state_of(rest[0]), rest[1:]) if with_state else (None, rest)
        what, model, rope, scale, layer, step, steps, tensors = rest
        method, settings, tokens_first, names = unpack_what(what)
        return _functions.run(q, k, v, state, method, model, settings, rope, tokens_first, scale, layer, step, steps,
                              dict(zip(names, tensors)), None, return_lse)

    def fake(q, k, v, *rest):
        if not return_lse:
            return torch.empty_like(q)
        tokens_first = unpack_what(rest[with_state])[2]
        return torch.empty_like(q), empty_floats((q.shape[0], q.shape[2], q.shape[1]) if tokens_first else q.shape[:3], q)

    torch.library.impl(_library, name, "CompositeExplicitAutograd")(call)
    torch.library.register_fake(f"scope_attn::{name}", fake, lib=_library)
    return getattr(torch.ops.scope_attn, name).default


# By whether there is a state, and whether the log-sum-exp is asked for.
_operators = {(with_state, return_lse): define_operator("attention" + "_with_state" * with_state + "_and_lse" * return_lse, with_state,
                                                        return_lse)
              for with_state in (False, True) for return_lse in (False, True)}


def attention(q, k, v, state, method, model, settings, rope, tokens_first, scale, layer, step, steps, tokens, stats, return_lse):
    compiling = torch.compiler.is_compiling()
    if stats is not None and compiling:
        raise RuntimeError("stats: not under torch.compile, where nobody can look at them")
    if stats is not None or (type(q) is torch.Tensor and not compiling):
        # What the operators do, without the dispatcher's microseconds.
        return _functions.run(q, k, v, state, method, model, settings, rope, tokens_first, scale, layer, step, steps, tokens, stats,
                              return_lse)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("q, k, v: they require gradients, and sparse attention has no backward pass; use torch.no_grad() or detach()")
    tensors = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in tokens.values()]
    rest = pack_what(method, settings, tokens_first, tokens), model, rope, scale, layer, step, steps, tensors
    operator = _operators[state is not None, return_lse]
    return operator(q, k, v, *rest) if state is None else operator(q, k, v, state.ticket, *rest)
