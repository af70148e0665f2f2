"""Two gloo ranks with diffusers' context parallelism (Ulysses) against one: a Wan of four heads, and of three."""
import dataclasses
import warnings

import pytest
import torch

import scope_attn

pytest.importorskip("diffusers")
from diffusers import ContextParallelConfig

import tiny_pipelines as tiny

if tiny.DEVICE != "cpu":
    pytest.skip("two ranks take two GPUs", allow_module_level=True)

RANKS = 2
ANY_HEADS = "ulysses_anything" in {field.name for field in dataclasses.fields(ContextParallelConfig)}  # of newer diffusers
WHOLE_VIDEO = dict(min_tokens=256)  # which a rank's share of the tokens is below
CASES = {  # pipeline, options of enable()
    "rho": (dict(), dict(rho=0.8)),
    "head": (dict(), dict(target_density=0.2, target_scope="head")),
    "sample": (dict(), dict(target_density=0.2)),
    "experts": (dict(experts=2), dict(rho=0.8)),
    **({"three heads": (dict(heads=3), dict(rho=0.8))} if ANY_HEADS else {}),
}


def run(pipe):
    """Older diffusers splits the text: products of matrices with a few rows have other bits than with twice as many."""
    return tiny.make_wan(pipe, text_tokens=32)


def make(pipe, options, between=lambda: None, first=True):
    """A video's latents, and its receipt; `between` comes after enable(), or before it."""
    if not first:
        between()
    scope_attn.enable(pipe, **WHOLE_VIDEO, **options)
    if first:
        between()
    latents, receipt = run(pipe), scope_attn.receipt(pipe)
    scope_attn.disable(pipe)
    return latents, receipt


def split(pipe, **degrees):
    for transformer in (pipe.transformer, pipe.transformer_2):
        if transformer is not None:
            transformer.enable_parallelism(config=ContextParallelConfig(**degrees))


def work(rank, folder):
    """One rank: everything that the tests look at, in a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch._C._get_accelerator = lambda *given: torch.device("cpu")  # diffusers counts devices, and divides by 0 without a GPU
    torch.accelerator.device_count = lambda: RANKS
    said = {}
    for name, (config, options) in CASES.items():
        degrees = dict(ulysses_degree=RANKS, **({"ulysses_anything": True} if name == "three heads" else {}))
        for first in (True, False):
            pipe = tiny.wan(**dict(dict(heads=4), **config))
            latents, receipt = make(pipe, options, lambda: split(pipe, **degrees), first)
            said[name, first] = latents, str(receipt), receipt.to_dict(), [len(call.stats.heads) for call in receipt.calls if call.sparse]
    said["disabled"] = run(pipe)
    pipe = tiny.wan(heads=4)
    pipe.transformer.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said["lenient"], receipt = make(pipe, dict(strict=False), lambda: split(pipe, ulysses_degree=RANKS))
    assert not any(call.sparse for call in receipt.calls)
    for first in (True, False):
        pipe = tiny.wan(heads=4)
        with pytest.raises(RuntimeError) as error:
            make(pipe, {}, lambda: split(pipe, ring_degree=RANKS), first)
        said["ring", first] = str(error.value)
    torch.save(said, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def one_rank(name):
    config, options = CASES[name]
    return make(tiny.wan(**dict(dict(heads=4), **config)), options)


ORDERS = pytest.mark.parametrize("enabled_first", (True, False))


@ORDERS
@pytest.mark.parametrize("name", [name for name in CASES if name != "sample"])
def test_bits(ranks, name, enabled_first):
    """At a given rho, and at a density of each head, ranks give the bits of one, whichever of the two calls came first."""
    expected, receipt = one_rank(name)
    for rank, said in enumerate(ranks):
        latents, text, told, heads = said[name, enabled_first]
        assert (latents == expected).all()
        assert (told["ranks"], told["rank"], told["rho_of_each_rank"]) == (RANKS, rank, False)
        assert f"rank {rank} of 2, which attends with its own heads\n" in text
        assert set(heads) == ({(2, 1)[rank]} if name == "three heads" else {2})
        assert [call["why"] for call in told["calls"]] == [call.why for call in receipt.calls]
        assert any(call.sparse for call in receipt.calls)


@ORDERS
def test_density_of_each_rank(ranks, enabled_first):
    """target_scope=sample: each rank meets the density with its own heads, and says so."""
    expected, receipt = one_rank("sample")
    assert receipt.settings["ranks"] == 1 and "rank" not in str(receipt)
    for said in ranks:
        latents, text, told, _ = said["sample", enabled_first]
        assert (latents == ranks[0]["sample", enabled_first][0]).all() and (latents != expected).any()
        assert told["rho_of_each_rank"] and "each rank meets the density over its own (target_scope=head" in text
        assert all(abs(call["density"] - 0.2) < 0.03 for call in told["calls"] if call["sparse"])


def test_disabled(ranks):
    """The pipeline stays parallel, and dense."""
    expected = run(tiny.wan(heads=3 if ANY_HEADS else 4, experts=1 if ANY_HEADS else 2))
    assert all((said["disabled"] == expected).all() for said in ranks)


def test_lenient(ranks):
    """What cannot run sparse runs dense between the exchanges."""
    pipe = tiny.wan(heads=4)
    pipe.transformer.double()
    expected = run(pipe)
    assert all((said["lenient"] == expected).all() for said in ranks)


@ORDERS
def test_ring(ranks, enabled_first):
    for said in ranks:
        assert "context parallelism: got ring_degree=2, expected ulysses_degree alone" in said["ring", enabled_first]
