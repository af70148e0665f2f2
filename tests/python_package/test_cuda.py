"""What only a GPU can show: streams, memory, graphs, no waiting; skipped without one."""
import pytest
import torch

import scope_attn

if not (torch.cuda.is_available() and scope_attn.supports("cuda", "bfloat16", 64)):
    pytest.skip("there is no GPU that the library can use", allow_module_level=True)

SETTINGS = dict(rope=(24, 20, 20), target_density=0.3)


@pytest.fixture
def on_gpu():
    return list(torch.randn(3, 2, 3, 280, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16))


def test_does_not_wait(on_gpu):
    """No synchronisation and no copy once the state is made."""
    state = scope_attn.State()
    scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = {event.key for event in profile.key_averages()}
    assert not any("Memcpy" in name or "StreamSynchronize" in name for name in names), names


def test_streams(on_gpu):
    """Results on side streams equal those of the default one, while memory goes back and forth between them."""
    expected = scope_attn.attention(*on_gpu, **SETTINGS)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            outs.append(scope_attn.attention(*on_gpu, **SETTINGS))
            torch.full((1 << 22,), float("nan"), device="cuda")  # what a freed workspace is given to
    torch.cuda.synchronize()
    assert all((out == expected).all() for out in outs)


def test_state_on_another_stream(on_gpu):
    """A state's memory stays its own until the last stream that used it is done."""
    state = scope_attn.State()
    scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    expected = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    state.reset()
    scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        out = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    del state
    noise = [torch.full((1 << 18,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert noise and (out == expected).all()


def test_graph(on_gpu):
    state = scope_attn.State()
    first = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    second = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    assert (first != second).any()
    saved = state.save()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    state.load(saved)
    third = scope_attn.attention(*on_gpu, state=state, **SETTINGS)
    state.load(saved)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == third).all()


def test_found_later(on_gpu):
    q, k, v = on_gpu
    q[0, 0, 0, 0] = float("nan")
    stats = scope_attn.Stats()
    scope_attn.attention(q, k, v, stats=stats, **SETTINGS)
    with pytest.raises(scope_attn.ScopeValueError, match="NaN"):
        stats.read()


def test_refusals(on_gpu):
    q, k, v = on_gpu
    with pytest.raises(ValueError, match="k: it is on cpu"):
        scope_attn.attention(q, k.cpu(), v, **SETTINGS)
    with pytest.raises(ValueError, match="k_lengths: it is on a GPU"):
        scope_attn.attention(q, k, v, k_lengths=torch.tensor([280, 270], device="cuda"), **SETTINGS)
    with pytest.raises(scope_attn.ScopeRuntimeError, match="f32"):
        scope_attn.attention(q.float(), k.float(), v.float(), **SETTINGS)
    with pytest.raises(scope_attn.ScopeValueError, match="multiple"):
        scope_attn.attention(*(torch.zeros(2, 3, 280, 68, device="cuda", dtype=x.dtype)[..., 2:66] for x in on_gpu), **SETTINGS)
    state = scope_attn.State()
    scope_attn.attention(*(x.cpu() for x in on_gpu), state=state, **SETTINGS)
    with pytest.raises(ValueError, match="state: it is on cpu"):
        scope_attn.attention(*on_gpu, state=state, **SETTINGS)
