// Checks a shape against a method and sizes everything a call needs.
#include "pipeline/plan.h"

#include <algorithm>

#include "core/numeric.h"
#include "cpu/kernels.h"
#include "cuda/clock.h"
#include "cuda/device.h"
#include "methods/partition.h"
#include "pipeline/state.h"

namespace scope {

namespace {

constexpr int64_t kMostThreads = 1024;

int checked_threads(int threads) {
  require(threads >= 0 && threads <= kMostThreads, Status::invalid_argument, "threads: got {}, expected 0 (all cores) to {}",
          threads, kMostThreads);
  return threads;
}

void check_shape(const Shape& shape) {
  const auto positive = [](const char* name, int64_t value, int64_t most) {
    require(value >= 1 && value <= most, Status::shape, "{}: got {}, expected 1..{}", name, value, most);
  };
  const auto tokens = [](const char* name, int64_t value) {
    // Token positions are 32-bit in the selection format.
    require(value >= 0 && value <= (int64_t{1} << 31) - 64, value < 0 ? Status::shape : Status::size_limit,
            "{}: got {}, expected 0..2147483584", name, value);
  };
  positive("batch", shape.batch, int64_t{1} << 31);
  positive("heads", shape.heads, int64_t{1} << 31);
  tokens("q_tokens", shape.q_tokens);
  tokens("k_tokens", shape.k_tokens);
  require(shape.dim >= 1, Status::shape, "dim: got {}, expected 1..256", shape.dim);
  require(shape.dim <= 256, Status::unsupported, "dim: got {}, expected 1..256", shape.dim);
  const int64_t heads = checked_mul(shape.batch, shape.heads, "batch x heads");
  checked_mul(checked_mul(heads, std::max(shape.q_tokens, shape.k_tokens), "heads x tokens"), shape.dim * 8,
              "q, k, v bytes");
}

}  // namespace

Context::Context(int threads, std::string_view instruction_set)
    : backend_(cpu_backend()), pool_(std::make_unique<ThreadPool>(checked_threads(threads))) {
  std::string names = "auto";
  for (const auto& set : cpu::instruction_sets()) {
    names += fmt::format(", {}", set.name);
    if (exec_.kernels == nullptr && (instruction_set == "auto" || instruction_set == set.name)) {
      exec_.pool = pool_.get();
      exec_.kernels = set.kernels;
      exec_.attend_kernels = set.attend;
      instruction_set_ = set.name;
    }
  }
  require(exec_.kernels != nullptr, Status::unsupported, "instruction_set: got \"{}\", this machine has {}", instruction_set,
          names);
  if (instruction_set_ == "avx512") exec_.attend_kernels_bf16 = cpu::bf16_dot_kernels();
}

Context Context::on_gpu(int index, int threads) {
  require(cuda::built(), Status::unsupported, "backend: this build has no CUDA");
  const auto found = cuda::devices();
  require(!found.empty(), Status::unsupported, "backend: there is no GPU, or no driver for it");
  const auto at = std::find_if(found.begin(), found.end(), [&](const cuda::Device& x) { return x.index == index; });
  require(at != found.end(), Status::invalid_argument, "device: got {}, expected 0..{}", index, found.back().index);
  const cuda::Device& device = *at;
  require(device.major >= 8, Status::unsupported, "device: {} is sm_{}{}, expected sm_80 or later", device.name,
          device.major, device.minor);
  Context context(threads);
  context.backend_ = cuda_backend();
  context.device_ = std::make_shared<const cuda::Device>(device);
  context.clock_ = cuda::make_clock(device.index);
  context.exec_.device = context.device_.get();
  context.exec_.clock = context.clock_.get();
  context.instruction_set_ = fmt::format("sm_{}{}", device.major, device.minor);
  return context;
}

void Plan::check_device() const {
  const cuda::Device* device = context.device();
  if (device == nullptr) {
    require(settings.kernel == KernelChoice::automatic, Status::unsupported,
            "kernel: {} is a CUDA kernel, and this context runs on the CPU", get_setting(settings, "kernel"));
    return;
  }
  require(shape.dtype != DType::f32, Status::unsupported, "dtype: got f32, CUDA takes f16 and bf16");
  require(shape.dim <= 128 && shape.dim % 8 == 0, Status::unsupported, "dim: got {}, CUDA takes multiples of 8 up to 128",
          shape.dim);
  const auto fits = [](const char* name, int64_t value, int64_t most) {
    require(value <= most, Status::size_limit, "{}: got {}, CUDA takes up to {}", name, value, most);
  };
  fits("q_tokens", shape.q_tokens, (int64_t{1} << 31) - 70000);
  fits("k_tokens", shape.k_tokens, settings.dense ? (int64_t{1} << 31) - 70000 : (int64_t{1} << 26) - 1);
  require(settings.kernel != KernelChoice::wgmma || device->major == 9, Status::unsupported,
          "kernel: wgmma needs sm_90, {} is sm_{}{}", device->name, device->major, device->minor);
}

// Whole codes are those of one subspace, and the blocks rules need to know how alike the rows of a block are.
void Plan::check_codes() const {
  const std::string rule = get_setting(settings, "rule");
  require(settings.proxy == ProxyKind::codes && partition.size() == 1, Status::invalid_argument,
          "rule: {} keeps whole codes, and needs proxy codes and a partition with one subspace such as even:1", rule);
  require(settings.tail != Tail::first_order, Status::invalid_argument,
          "tail: got first_order, and rule {} takes none or centroids", rule);
  require(settings.rule == Rule::clusters || settings.rule == Rule::error_aware ||
              (settings.group == Grouping::blocks && settings.encode == Encoding::blocks),
          Status::invalid_argument, "rule: {} needs group blocks and encode blocks", rule);
  require(exec.device == nullptr || codes <= cuda::kMostRankedCodes, Status::size_limit,
          "codes: got {}, rule {} takes up to {} on CUDA", codes, rule, cuda::kMostRankedCodes);
}

// What stands for a cluster is its mean key and value, over all channels in order; a block's code is not its mean key.
void Plan::check_compensation() const {
  require(keeps_codes(settings.rule), Status::invalid_argument,
          "tail: got centroids, which stand for whole clusters, and rule {} drops single keys",
          get_setting(settings, "rule"));
  require(settings.encode != Encoding::blocks && partition == make_partition("even:1", shape.dim, {}, 0),
          Status::invalid_argument, "rule, tail: {} and {} need clusters over partition even:1, got encode {} over {}",
          get_setting(settings, "rule"), get_setting(settings, "tail"), get_setting(settings, "encode"), settings.partition);
  require(backend->compensate != nullptr, Status::unsupported, "rule, tail: CUDA has no error_aware and no centroids");
}

// Queries and keys are clustered as one, over all channels in order.
void Plan::check_cocluster() const {
  require(settings.group == Grouping::cocluster && settings.encode == Encoding::cocluster, Status::invalid_argument,
          "group, encode: got {} and {}, and cocluster is for both or neither", get_setting(settings, "group"),
          get_setting(settings, "encode"));
  require(settings.proxy == ProxyKind::codes && partition == make_partition("even:1", shape.dim, {}, 0),
          Status::invalid_argument, "group: cocluster needs proxy codes and partition even:1, got {} and {}",
          get_setting(settings, "proxy"), settings.partition);
  require(backend->cocluster != nullptr, Status::unsupported, "group: CUDA has no cocluster");
}

void Plan::check_reuse() const {
  require(settings.group != Grouping::raster && settings.group != Grouping::blocks && settings.encode != Encoding::blocks,
          Status::invalid_argument, "reuse_interval: got {}, and group {} with encode {} has no clusters to reuse",
          settings.reuse_interval, get_setting(settings, "group"), get_setting(settings, "encode"));
  require(exec.device == nullptr, Status::unsupported, "reuse_interval: got {}, CUDA takes 1", settings.reuse_interval);
}

void Plan::check_profile() const {
  require(settings.rule == Rule::clusters || settings.rule == Rule::error_aware, Status::invalid_argument,
          "profile: got one, and rule {} takes none", get_setting(settings, "rule"));
  require(settings.profile_low <= settings.profile_high, Status::invalid_argument,
          "profile_low: got {}, expected at most profile_high, {}", settings.profile_low, settings.profile_high);
  require(exec.device == nullptr, Status::unsupported, "profile: CUDA takes none");
  scope::check_profile(*settings.profile, shape.heads, settings.layers, settings.dense_layers);
}

Plan::Plan(const Context& context_, const Settings& settings_, const Shape& shape_)
    : context(context_), settings(settings_), shape(shape_), backend(&context_.backend()), exec(context_.exec()) {
  check_shape(shape);
  require(!settings.dense || settings.target_density == 0, Status::invalid_argument,
          "target_density: got {}, and method dense keeps everything", settings.target_density);
  if (settings.target_density > 0 &&
      (settings.rule == Rule::fixed || settings.rule == Rule::online || settings.rule == Rule::target)) {
    // These meet a density by themselves, on every backend.
    if (settings.rule == Rule::online) settings.rule = Rule::target;
    settings.density = settings.target_density;
    settings.target_density = 0;
  }
  check_device();
  exec.wgmma = exec.device != nullptr && exec.device->major == 9 && settings.kernel != KernelChoice::portable;
  if (!shape.subspaces.empty()) check_partition(shape.subspaces, shape.dim);
  if (!shape.rope.empty())
    make_partition("rope", shape.dim, shape.rope, 0);  // refuses ranges that do not cover the channels
  if (!settings.dense) {
    groups = effective_groups(settings, shape.q_tokens);
    selection_groups = groups + (shape.dense_queries ? 1 : 0);
    if (settings.proxy == ProxyKind::codes) {
      codes = effective_codes(settings, shape.k_tokens);
      if (!keeps_codes(settings.rule)) partition = shape.subspaces;
      if (partition.empty()) partition = make_partition(settings.partition, shape.dim, shape.rope, settings.seed);
      check_partition(partition, shape.dim);
    }
    if (keeps_codes(settings.rule)) check_codes();
    if (compensates()) check_compensation();
    if (settings.group == Grouping::cocluster || settings.encode == Encoding::cocluster) check_cocluster();
    if (reuses()) check_reuse();
    if (settings.profile != nullptr) check_profile();
    state_bytes = StateLayout(*this).bytes;
  }
  const auto bytes = [&](int64_t heads) {
    Arena arena;
    cut(arena, heads);
    return checked_add(arena.used(), Arena::kAlignment, "workspace bytes");
  };
  if (exec.device != nullptr) {
    // As few chunks as fit the limit, and these of equal size.
    const int64_t limit = settings.workspace_limit << 20, one = bytes(1), most = std::min(shape.heads, kMostChunk);
    require(one <= limit, Status::invalid_argument, "workspace_limit: got {} MiB, one head needs {} MiB",
            settings.workspace_limit, ceil_div(one, 1 << 20));
    chunk = most;
    while (chunk > 1 && bytes(chunk) > limit) --chunk;
    chunk = ceil_div(shape.heads, ceil_div(shape.heads, chunk));
  }
  workspace_bytes = bytes(chunk);
}

const char* Plan::kernel() const {
  if (exec.device == nullptr) return exec.kernels->name;
  return exec.wgmma ? "wgmma" : "portable";
}

Workspace Plan::cut(Arena& arena, int64_t n) const {
  const int64_t words = mask_words(shape.k_tokens), dim = shape.dim;
  const auto subspaces = static_cast<int64_t>(partition.size());
  Workspace at{};
  at.status = arena.take<uint32_t>(1);
  at.report = arena.take<HeadStats>(shape.batch * shape.heads);
  at.all_queries = arena.take<int64_t>(2);
  at.q_rows = arena.take<int32_t>(shape.q_tokens);
  at.k_rows = arena.take<int32_t>(shape.k_tokens);
  at.valid = arena.take<uint32_t>(words);
  at.keep = arena.take<uint32_t>(words);
  at.labels = arena.take<int32_t>(n * shape.q_tokens);
  at.sizes = arena.take<int32_t>(n * (groups + 1));
  at.counts = arena.take<int32_t>(n * (groups + 1));
  at.top_p = arena.take<int32_t>(n * (groups + 1));
  at.order = arena.take<int32_t>(n * shape.q_tokens);
  at.offsets = arena.take<int64_t>(n * (groups + 2));
  at.centroids = arena.take<float>(n * groups * dim);
  at.codebooks = arena.take<float>(n * codes * dim);
  at.codes = arena.take<int32_t>(n * subspaces * shape.k_tokens);
  at.empty = arena.take<int64_t>(n * subspaces);
  if (settings.rule == Rule::blocks_topk || settings.rule == Rule::blocks_cdf) {
    at.q_similarity = arena.take<float>(n * groups);
    at.k_similarity = arena.take<float>(n * codes);
  }
  at.tables = arena.take<float>(n * groups * subspaces * codes);
  at.mask = arena.take<uint32_t>(n * (groups + 1) * words);
  if (has_tail(Tail::first_order)) {
    at.tail_k = arena.take<float>(n * groups * dim);
    at.tail_v = arena.take<float>(n * groups * dim);
    at.tail_bias = arena.take<float>(n * groups);
    at.tail_mask = arena.take<uint32_t>(n * (groups + 1) * mask_words(groups));
  }
  if (compensates()) {
    at.tail_v = arena.take<float>(n * codes * dim);
    at.tail_bias = arena.take<float>(n * codes);
    if (settings.rule == Rule::error_aware) at.errors = arena.take<float>(n * groups * codes);
    if (settings.tail == Tail::centroids) at.tail_mask = arena.take<uint32_t>(n * (groups + 1) * mask_words(codes));
  }
  at.scratch.bytes = backend->attend_scratch(exec, shape.q_tokens, shape.k_tokens, dim, groups + 1);
  if (!settings.dense) {
    const bool together = settings.group == Grouping::cocluster;
    at.scratch.bytes =
        std::max({at.scratch.bytes, together ? 0 : backend->group_scratch(exec, shape.q_tokens, dim, groups),
                  together ? 0 : backend->encode_scratch(exec, shape.k_tokens, dim, codes),
                  together ? backend->cocluster_scratch(exec, shape.q_tokens, shape.k_tokens, dim, groups, codes) : 0,
                  compensates() ? backend->compensate_scratch(exec, shape.k_tokens, dim, groups, codes) : 0,
                  backend->select_scratch(exec, shape.k_tokens, dim, groups, keeps_codes(settings.rule) ? codes : 0)});
  }
  at.scratch.bytes *= n;
  at.scratch.data = arena.take<std::byte>(at.scratch.bytes);
  return at;
}

Workspace Plan::layout(void* memory, int64_t bytes) const {
  require(bytes >= workspace_bytes, Status::workspace, "workspace_bytes: got {}, this plan needs {}", bytes,
          workspace_bytes);
  require(memory != nullptr, Status::invalid_argument, "workspace: got null, expected {} bytes", workspace_bytes);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto shift = static_cast<int64_t>(round_up(static_cast<int64_t>(address % Arena::kAlignment), Arena::kAlignment)) -
                     static_cast<int64_t>(address % Arena::kAlignment);
  Arena arena(static_cast<std::byte*>(memory) + shift, bytes - shift);
  return cut(arena, chunk);
}

}  // namespace scope
