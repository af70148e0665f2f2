"""A ComfyUI node that makes video self-attention sparse.

Put this file, or the folder that it is in, into ComfyUI/custom_nodes.
"""
import sys

try:
    from comfy_api.latest import ComfyExtension, io
except ImportError as error:
    raise ImportError(f"SCOPE Attention needs ComfyUI 0.7.0 or newer, and this one has no node API as it is there: {error}") from error
try:
    import scope_attn
    from scope_attn.hosts import comfyui
except ImportError as error:
    raise ImportError("SCOPE Attention needs the package scope_attn, 0.3 or newer, in ComfyUI's own Python. In a checkout "
                      f'of SCOPE: "{sys.executable}" -m pip install . (or the name of a wheel made by `make wheel`)') from error

DESCRIPTION = """Sparse self-attention for Wan 2.1 and 2.2, HunyuanVideo and 1.5, MiniMax-H3, LTX-Video and LTX-2, without
training. At the end of each run ComfyUI's log says how many calls were sparse, and why others were dense."""
METHOD = "How keys are chosen. fast and quality are presets."
TARGET_DENSITY = """The share of keys that is kept. fast and quality have a density of their own, unless `density` says
otherwise. 0: what the method takes by itself."""
MIN_TOKENS = """Shorter videos attend densely, which is faster. 0: by device, 12,288 on a GPU and 4,096 on a CPU. 1: every
video is sparse."""
STRICT = "Stop with an error where sparse attention is impossible. Off: warn and attend densely."
SETTINGS = """Any setting of SCOPE by its own name, one name=value per line, such as dense_layers=1. model=NAME takes the
settings of a known model by name."""
DENSITY = """preset: fast and quality keep their own density, and other methods take target_density. target_density: it
counts for every method."""
SPARSE_FROM = "Attention is dense before this share of the steps. -1: the share of the known model, mostly 0.2. 0: none."
SPARSE_TO = "Attention is dense after this share of the steps."


def tip(text):
    return " ".join(text.split())


class ScopeAttention(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        methods = [method.name for method in scope_attn.methods() if not method.morton]
        share = dict(min=0.0, max=1.0, step=0.01)
        # Saved workflows hold values by position, and old ones have the first five: new inputs come last, and are optional.
        return io.Schema(
            node_id="ScopeAttention", display_name="SCOPE Attention", category="model_patches", description=tip(DESCRIPTION),
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("method", default="scope-mean", options=methods, tooltip=tip(METHOD)),
                io.Float.Input("target_density", default=comfyui.TARGET_DENSITY, tooltip=tip(TARGET_DENSITY), **share),
                io.Int.Input("min_tokens", default=0, min=0, max=1 << 30, tooltip=tip(MIN_TOKENS)),
                io.Boolean.Input("strict", default=True, tooltip=tip(STRICT)),
                io.String.Input("settings", default="", multiline=True, optional=True, tooltip=tip(SETTINGS)),
                io.Combo.Input("density", default="preset", options=["preset", "target_density"], optional=True,
                               tooltip=tip(DENSITY)),
                io.Float.Input("sparse_from", default=-1.0, optional=True, tooltip=tip(SPARSE_FROM), **{**share, "min": -1.0}),
                io.Float.Input("sparse_to", default=1.0, optional=True, tooltip=tip(SPARSE_TO), **share),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, **inputs) -> io.NodeOutput:
        return io.NodeOutput(comfyui.patch(model, **inputs))


class ScopeExtension(ComfyExtension):
    async def get_node_list(self):
        return [ScopeAttention]


async def comfy_entrypoint() -> ScopeExtension:
    return ScopeExtension()
