"""What we know of each transformer class of diffusers: its layers, RoPE, and the text among its video tokens."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

import torch

from ..._selector import Grid
from .. import rotations
from . import processors


class Text(NamedTuple):
    """Tokens among the video's that are not the video's."""

    tokens: int  # of each sample
    masks: tuple[torch.Tensor, ...] = ()  # what says how many of them are valid; none: all are
    count: Any = None  # of the masks: so many in each sample
    tags: Optional[torch.Tensor] = None  # of each token, 0: the video's; None: the text stands behind or before them


class Family(NamedTuple):
    """One transformer class. To add one: a row in FAMILIES, and a tiny pipeline in tests/python_package/tiny_pipelines.py."""

    rows: str  # how the names of its models() begin
    rope: Callable[[Any], Any]  # of a transformer: how many channels it rotates along T, H and W, or which; None: it rotates none
    layers: Callable[[Any], list]  # of a transformer: its self-attentions, first to last
    text: Optional[Callable[[dict[str, Any]], Text]] = None  # of a pass's arguments by name; None: there is none
    text_first: bool = False  # it stands before the video's tokens
    depths: Optional[Callable[[Any], list[int]]] = None  # the layers of the schedule that its self-attentions count as; None: in order
    replaced: Mapping[str, type] = {}  # by the name of a layer's own processor, ours in its place; empty: its own, which dispatches
    splits: bool = False  # by diffusers' plan for context parallelism
    without_codes: str = ""  # why it takes no method with codebooks
    masks_are_dense: bool = False  # a call with a mask is the pipeline's own attention; otherwise it is refused
    without: Optional[Callable[[Any], str]] = None  # of a transformer: why this one cannot be sparse
    grid: Callable[[Any, dict[str, Any]], Grid] = lambda config, given: patches(config, given, (2, 3, 4))  # of a configuration and a pass

    def depths_of(self, model: Any) -> list[int]:
        return self.depths(model) if self.depths else list(range(len(self.layers(model))))

    def heads_of(self, model: Any) -> tuple[int, int]:
        """Heads and their channels."""
        layer = self.layers(model)[0]
        heads = getattr(layer, "heads", None) or layer.num_heads
        return heads, getattr(model.config, "attention_head_dim", None) or sum(model.config.axes_dims)


def patches(config: Any, given: dict[str, Any], axes: tuple[int, int, int]) -> Grid:
    """Frames, rows and columns of latents in tokens; axes: where the latents have them."""
    patch = config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    shape = given["hidden_states"].shape
    return shape[axes[0]] // patch[0], shape[axes[1]] // patch[1], shape[axes[2]] // patch[2]


def ltx_grid(config: Any, given: dict[str, Any]) -> Grid:
    """LTX's pipelines cut the patches, and say how many there are."""
    sizes = given.get("num_frames"), given.get("height"), given.get("width")
    return None if None in sizes else (int(sizes[0]), int(sizes[1]), int(sizes[2]))


def config_axes(name: str) -> Callable[[Any], tuple[int, ...]]:
    return lambda model: tuple(model.config[name])


def cog_rope(model: Any):
    """As get_3d_rotary_pos_embed of diffusers cuts the channels; CogVideoX-2b has none."""
    dim = model.config.attention_head_dim
    return (dim // 4, dim // 8 * 3, dim // 8 * 3) if model.config.use_rotary_positional_embeddings else None


def count_valid(*masks: torch.Tensor) -> list[int]:
    """diffusers counts them, wherever they stand, and so do we: in integers, since bf16 has no 257."""
    return sum(mask.sum(1, dtype=torch.int64) for mask in masks).tolist()


def hunyuan_text(given: dict[str, Any]) -> Text:
    return Text(given["encoder_hidden_states"].shape[1], (given["encoder_attention_mask"],), count_valid)


def framepack_text(given: dict[str, Any]) -> Text:
    """An image, always there, before the text."""
    image, text = given["image_embeds"].shape[1], hunyuan_text(given)
    return Text(image + text.tokens, text.masks, lambda *masks: [image + valid for valid in count_valid(*masks)])


def hunyuan15_text(given: dict[str, Any]) -> Text:
    """Two texts and an image, which is not there if it is nothing but zeros."""
    image = given["image_embeds"]

    def count(mask, mask_2, image):
        first = image.shape[1] if image.any() else 0
        return [first + valid for valid in count_valid(mask, mask_2)]

    tokens = given["encoder_hidden_states"].shape[1] + given["encoder_hidden_states_2"].shape[1] + image.shape[1]
    return Text(tokens, (given["encoder_attention_mask"], given["encoder_attention_mask_2"], image), count)


def minimax_text(given: dict[str, Any]) -> Text:
    """Text and audio, among the video's tokens."""
    return Text(given["encoder_hidden_states"].shape[1] + given["audio_hidden_states"].shape[1], tags=given["token_tags"])


def blocks(name: str, attention: str = "attn1") -> Callable[[Any], list]:
    return lambda model: [getattr(block, attention) for block in getattr(model, name)]


def hunyuan_layers(model: Any) -> list:
    return [block.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)]


def why_causal(model: Any) -> str:
    frames = getattr(model.config, "num_frame_per_block", 1)
    return f"it is causal here (num_frame_per_block is {frames}), expected 1" if frames > 1 else ""


def why_nabla(model: Any) -> str:
    kind = model.config.attention_type
    return "" if kind == "regular" else f'its attention_type is "{kind}", which is sparse already; expected "regular"'


WAN = Family("wan", lambda model: rotations.wan(model.config.attention_head_dim), blocks("blocks"))
HUNYUAN = Family("hunyuanvideo-13b", config_axes("rope_axes_dim"), hunyuan_layers, text=hunyuan_text)
FAMILIES = {
    "WanTransformer3DModel": WAN._replace(splits=True),
    # A VACE block gives its result to the block that it counts as.
    "WanVACETransformer3DModel": WAN._replace(layers=lambda model: [block.attn1 for block in (*model.blocks, *model.vace_blocks)],
                                              depths=lambda model: [*range(len(model.blocks)), *model.config.vace_layers]),
    "WanAnimateTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": WAN._replace(without=why_causal),
    "ChronoEditTransformer3DModel": WAN,
    "AnyFlowTransformer3DModel": WAN,
    "HunyuanVideoTransformer3DModel": HUNYUAN,
    "HunyuanVideoFramepackTransformer3DModel": HUNYUAN._replace(text=framepack_text),
    "HunyuanVideo15Transformer3DModel": Family(
        "hunyuanvideo-1.5", config_axes("rope_axes_dim"), blocks("transformer_blocks", "attn"), text=hunyuan15_text,
        replaced={"HunyuanVideo15AttnProcessor2_0": processors.HunyuanVideo15}),
    "CogVideoXTransformer3DModel": Family(
        "cogvideox", cog_rope, blocks("transformer_blocks"), text=lambda given: Text(given["encoder_hidden_states"].shape[1]),
        text_first=True, grid=lambda config, given: patches(config, given, (1, 3, 4)),
        replaced=dict.fromkeys(("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"), processors.CogVideoX)),
    "MiniMaxH3Transformer3DModel": Family(
        "minimax-h3", lambda model: rotations.minimax_h3(model.config.attention_head_dim, model.config.rope_freq_dim),
        blocks("transformer_blocks", "attn"), text=minimax_text, grid=lambda config, given: None),
    "LTXVideoTransformer3DModel": Family("ltx", lambda model: None, blocks("transformer_blocks"), without_codes=rotations.MIXED_IN_LTX,
                                         masks_are_dense=True, grid=ltx_grid),
    "LTX2VideoTransformer3DModel": Family("ltx-2", lambda model: None, blocks("transformer_blocks"), without_codes=rotations.MIXED_IN_LTX,
                                          masks_are_dense=True, grid=ltx_grid),
    "Kandinsky5Transformer3DModel": Family("wan", config_axes("axes_dims"), blocks("visual_transformer_blocks", "self_attention"),
                                           without=why_nabla, grid=lambda config, given: patches(config, given, (1, 2, 3))),
}
