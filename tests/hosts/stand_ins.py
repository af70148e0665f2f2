"""Stand-ins for what the hosts import and a CPU cannot have. All else in these tests is the hosts' real code.

1. torchvision's operators `torchvision::nms` and `torchvision::qnms`. torchvision registers their shapes when it is imported, and the
   library that defines them needs CUDA.
2. vLLM's modules. vllm-omni is built on vLLM, which has no wheel for a CPU and brings a PyTorch of its own. Only the names that
   vllm-omni's diffusion attention imports are here: IMPORTED, of which nothing is called, and CALLED, which does what vLLM's does.
   A name that a newer vllm-omni asks for is an ImportError that names it.
3. A CPU platform for vllm-omni, which has none: CpuPlatform, in tests/hosts/cpu_platform.py, found as any platform plug-in is.
   Its default backend is vllm-omni's SDPA by its code for CUDA (tests/hosts/cpu_sdpa.py).
"""
from __future__ import annotations

import dataclasses
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import pkgutil
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypedDict

# Each is an empty dataclass: a base class, an annotation or an argument that is never used in a call.
IMPORTED = {
    # vllm_omni's __init__ imports its configurations, and those its schedulers, connectors and metrics.
    "vllm.compilation.cuda_graph": "CUDAGraphStat",
    "vllm.config": "CUDAGraphMode CacheConfig CompilationConfig KVTransferConfig LoadConfig ParallelConfig ProfilerConfig SchedulerConfig "
                   "VllmConfig set_current_vllm_config",
    "vllm.config.lora": "LoRAConfig MaxLoRARanks",
    "vllm.distributed.kv_events": "KVEventBatch",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorStats",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.entrypoints.serve.exception_handling.error_response": "create_error_response",
    "vllm.inputs": "PromptType",
    "vllm.inputs.engine": "TokensInput",
    "vllm.model_executor.models.registry": "_resolve_module_name",
    "vllm.outputs": "CompletionOutput RequestOutput",
    "vllm.pooling_params": "PoolingParams",
    "vllm.sampling_params": "SamplingParams",
    "vllm.transformers_utils.config": "MistralConfigParser _download_mistral_config_file get_hf_text_config thinker_uses_mrope",
    "vllm.transformers_utils.model_arch_config_convertor": "ModelArchConfigConvertorBase",
    "vllm.v1.core.kv_cache_manager": "KVCacheBlocks KVCacheManager",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.interface": "PauseState",
    "vllm.v1.core.sched.output": "CachedRequestData KVConnectorBlockState NewRequestData SchedulerOutput",
    "vllm.v1.core.sched.request_queue": "RequestQueue create_request_queue",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.sched.utils": "remove_all",
    "vllm.v1.engine": "EngineCoreEventType EngineCoreOutput EngineCoreOutputs EngineCoreRequest FinishReason",
    "vllm.v1.metrics.perf": "PerfStats",
    "vllm.v1.metrics.stats": "PrefillStats SchedulerStats",
    "vllm.v1.outputs": "ModelRunnerOutput RoutedExpertsLists",
    "vllm.v1.request": "Request RequestStatus StreamingUpdate",
    "vllm.v1.spec_decode.metrics": "SpecDecodingStats",
    "vllm.v1.utils": "ConstantList",
    # The diffusion configuration knows quantised and LoRA layers.
    "vllm.lora.layers": "BaseLayerWithLoRA",
    "vllm.lora.layers.base_linear": "BaseLinearLayerWithLoRA",
    "vllm.lora.layers.column_parallel_linear": "ColumnParallelLinearWithLoRA MergedColumnParallelLinearWithLoRA "
                                               "MergedQKVParallelLinearWithLoRA QKVParallelLinearWithLoRA",
    "vllm.lora.layers.replicated_linear": "ReplicatedLinearWithLoRA",
    "vllm.lora.layers.row_parallel_linear": "RowParallelLinearWithLoRA",
    "vllm.lora.lora_model": "LoRAModel",
    "vllm.lora.lora_weights": "LoRALayerWeights PackedLoRALayerWeights",
    "vllm.lora.peft_helper": "PEFTHelper",
    "vllm.lora.request": "LoRARequest",
    "vllm.lora.utils": "get_adapter_absolute_path get_supported_lora_modules replace_submodule",
    "vllm.model_executor.layers.linear": "LinearMethodBase MergedColumnParallelLinear QKVParallelLinear",
    "vllm.model_executor.layers.quantization": "get_quantization_config",
    "vllm.model_executor.layers.quantization.base_config": "QuantizationConfig",
    "vllm.model_executor.layers.quantization.inc": "INCConfig",
    "vllm.model_executor.models.utils": "WeightsMapper",
    "vllm.model_executor.parameter": "ModelWeightParameter",
    "vllm.model_executor.utils": "get_packed_modules_mapping replace_parameter",
    "vllm.transformers_utils.repo_utils": "get_model_path",
    # The platform, the forward context and the attention layer.
    "vllm.distributed.parallel_state": "GroupCoordinator get_tensor_model_parallel_rank get_tensor_model_parallel_world_size",
    "vllm.forward_context": "BatchDescriptor",
    "vllm.ir": "",
    "vllm.platforms": "Platform",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheSpec KVCacheTensor compute_layout_strides",
    "vllm.vllm_flash_attn": "flash_attn_varlen_func",
}


class Registered:
    """A row or the table of vLLM's language models: vllm-omni adds its own when it is imported."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass


def config(cls: type | None = None, *, config: dict | None = None, **kwargs: Any) -> Any:
    """vLLM's decorator of configurations: a pydantic dataclass."""
    from pydantic.dataclasses import dataclass
    decorate = dataclass(config={"arbitrary_types_allowed": True, **(config or {})}, **kwargs)
    return decorate if cls is None else decorate(cls)


def init_logger(name: str) -> logging.Logger:
    """A logger with vLLM's two additions."""
    logger = logging.getLogger(name)
    vars(logger).update(info_once=logger.info, warning_once=logger.warning)
    return logger


def import_pynvml():
    raise ImportError("pynvml: there is no GPU")


def extract_layer_index(name: str) -> int:
    """The one number in a layer's dotted name."""
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"\d+", part)]
    assert len(numbers) == 1, f"layer name {name} should contain one integer"
    return numbers[0]


CALLED = {
    "vllm": {"__version__": "0.0.dev0", "__version_tuple__": (0, 0, "dev0")},  # vllm-omni compares no versions with 0.0
    "vllm.config": {"ModelConfig": config(type("ModelConfig", (), {}))},
    "vllm.config.utils": {"config": config},
    "vllm.envs": {"VLLM_PLUGINS": None},  # every plug-in is loaded
    "vllm.inputs": {name: TypedDict(name, {}, total=False)  # type: ignore[operator]
                    for name in ("EmbedsPrompt", "TextPrompt", "TokensPrompt")},
    "vllm.logger": {"init_logger": init_logger},
    "vllm.model_executor.layers.quantization": {"QUANTIZATION_METHODS": []},
    "vllm.model_executor.models.registry": {"_VLLM_MODELS": {}, "_LazyRegisteredModel": Registered, "_ModelRegistry": Registered},
    "vllm.model_executor.models.utils": {"extract_layer_index": extract_layer_index},
    "vllm.platforms.interface": {"PlatformEnum": enum.Enum("PlatformEnum", "CUDA ROCM TPU XPU CPU OOT UNSPECIFIED")},
    "vllm.plugins": {"load_general_plugins": lambda: None},  # vLLM's own
    "vllm.transformers_utils.config": {"_CONFIG_FORMAT_TO_CONFIG_PARSER": {}},
    "vllm.utils.import_utils": {"import_pynvml": import_pynvml, "resolve_obj_by_qualname": pkgutil.resolve_name},
    "vllm.utils.network_utils": {"get_open_port": lambda: 29500},  # a configuration's port; nothing listens there
    "vllm.v1.kv_cache_layout": {"KVCacheLayout": enum.Enum("KVCacheLayout", "LBNHC BLNHC")},
}


class Vllm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the two lists. For any other, vLLM is not installed: vllm-omni then leaves its patches of vLLM out."""

    packages: ClassVar = {".".join(name.split(".")[:depth]) for name in (*IMPORTED, *CALLED) for depth in range(1, name.count(".") + 2)}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        parent = name.rpartition(".")[0]
        if parent in IMPORTED or parent in CALLED or not name.startswith("vllm."):
            return None
        raise ModuleNotFoundError(f"No module named '{name}'", name="vllm")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType):
        for name in IMPORTED.get(module.__name__, "").split():
            setattr(module, name, dataclasses.dataclass(type(name, (), {"__module__": module.__name__})))
        vars(module).update(CALLED.get(module.__name__, {}))


def vllm():
    """vLLM's modules, for the rest of the process."""
    if importlib.util.find_spec("vllm") is None:
        sys.meta_path.insert(0, Vllm())


KEPT = []  # libraries, whose operators live as long as they do, and folders


def torchvision():
    """torchvision's operators, for the rest of the process. None of them can be called."""
    import torch
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)


def announce(group: str, name: str, value: str):
    """An entry point, as an installed package has it, for the rest of the process."""
    folder = tempfile.TemporaryDirectory()
    KEPT.append(folder)
    about = Path(folder.name) / f"announce_{name}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: announce_{name}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    sys.path.append(folder.name)
