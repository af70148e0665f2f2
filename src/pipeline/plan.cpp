// Checks a shape against a method and sizes everything a call needs.
#include "pipeline/plan.h"

#include <algorithm>

#include "core/numeric.h"
#include "methods/partition.h"
#include "pipeline/state.h"
#include "stages/backends.h"

namespace scope {

namespace {

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

Context::Context(const ContextOptions& options)
    : backend_(&find_backend(options.backend)),
      pool_(std::make_unique<ThreadPool>(options.threads, options.foreign)),
      machine_(backend_->open(options, *pool_)) {}

Context::Context(int threads, std::string_view instruction_set)
    : Context(ContextOptions{.threads = threads, .instruction_set = std::string(instruction_set)}) {}

// Everything that is refused because the backend lacks it, by name.
void Plan::check_backend() const {
  const Capabilities& can = backend->can;
  const char* name = backend->name;
  require(can.dtypes.has(shape.dtype), Status::unsupported, "dtype: {} has no {}", name, dtype_name(shape.dtype));
  require(shape.dim <= can.most_dim && shape.dim % can.dim_multiple == 0, Status::unsupported,
          "dim: got {}, {} takes multiples of {} up to {}", shape.dim, name, can.dim_multiple, can.most_dim);
  const auto fits = [&](const char* what, int64_t value, int64_t most) {
    require(value <= most, Status::size_limit, "{}: got {}, {} takes up to {}", what, value, name, most);
  };
  fits("q_tokens", shape.q_tokens, can.most_tokens);
  fits("k_tokens", shape.k_tokens, settings.dense ? can.most_tokens : can.most_selected_keys);
  const auto has = [&](const char* setting, const auto& choices, auto choice) {
    require(choices.has(choice), Status::unsupported, "{}: {} has no {}", setting, name, row(choice).name);
  };
  has("products", can.products, settings.products);
  if (settings.dense) return;
  has("group", can.groupings, settings.group);
  has("encode", can.encodings, settings.encode);
  has("proxy", can.proxies, settings.proxy);
  has("rule", can.rules, settings.rule);
  has("target_scope", can.target_scopes, settings.target_scope);
  has("tail", can.tails, settings.tail);
  require(settings.profile == nullptr || can.profiles, Status::unsupported, "profile: {} takes none", name);
  if (rule().whole_codes) fits("codes", codes, can.most_whole_codes);
}

// Whole codes are those of one subspace, and some rules need to know how alike the rows of a block are.
void Plan::check_codes() const {
  require(row(settings.proxy).codes && partition.size() == 1, Status::invalid_argument,
          "rule: {} keeps whole codes, and needs proxy codes and a partition with one subspace such as even:1", rule().name);
  require(!tail().per_group, Status::invalid_argument, "tail: got {}, and rule {} drops whole codes", tail().name,
          rule().name);
  require(!rule().similarity || (row(settings.group).blocks && row(settings.encode).blocks), Status::invalid_argument,
          "rule: {} needs group blocks and encode blocks", rule().name);
  require(!rule().diagonal ||
              (row(settings.group).blocks && row(settings.encode).blocks && settings.q_block == settings.k_block),
          Status::invalid_argument, "rule: {} needs group blocks, encode blocks or means, and a q_block that is the k_block",
          rule().name);
}

// What stands for a cluster is its mean key and value, over all channels in order.
void Plan::check_compensation() const {
  require(rule().whole_codes, Status::invalid_argument,
          "tail: got {}, which stands for whole clusters, and rule {} drops single keys", tail().name, rule().name);
  require(row(settings.encode).means && partition == make_partition("even:1", shape.dim, {}, 0), Status::invalid_argument,
          "rule, tail: {} and {} need clusters over partition even:1, got encode {} over {}", rule().name, tail().name,
          row(settings.encode).name, settings.partition);
}

// Queries and keys are clustered as one, over all channels in order.
void Plan::check_cocluster() const {
  const GroupingRow& group = row(settings.group);
  const EncodingRow& encode = row(settings.encode);
  require(group.with_keys && encode.with_queries, Status::invalid_argument,
          "group, encode: got {} and {}, and {} is for both or neither", group.name, encode.name,
          group.with_keys ? group.name : encode.name);
  require(row(settings.proxy).codes && partition == make_partition("even:1", shape.dim, {}, 0), Status::invalid_argument,
          "group: {} needs proxy codes and partition even:1, got {} and {}", group.name, row(settings.proxy).name,
          settings.partition);
}

void Plan::check_reuse() const {
  const GroupingRow& group = row(settings.group);
  const EncodingRow& encode = row(settings.encode);
  require(group.reusable && (encode.reusable || codes == 0), Status::invalid_argument,
          "reuse_interval: got {}, and group {} with encode {} has no clusters to reuse", settings.reuse_interval,
          group.name, encode.name);
}

void Plan::check_profile() const {
  require(rule().profile, Status::invalid_argument, "profile: got one, and rule {} takes none", rule().name);
  require(settings.profile_low <= settings.profile_high, Status::invalid_argument,
          "profile_low: got {}, expected at most profile_high, {}", settings.profile_low, settings.profile_high);
  scope::check_profile(*settings.profile, shape.heads, settings.layers, settings.dense_layers);
}

Plan::Plan(const Context& context_, const Settings& settings_, const Shape& shape_)
    : context(context_), settings(settings_), shape(shape_), backend(&context_.backend()), exec(context_.exec()) {
  check_shape(shape);
  require(!settings.dense || settings.target_density == 0, Status::invalid_argument,
          "target_density: got {}, and method dense keeps everything", settings.target_density);
  if (!settings.density_steps.empty()) {
    require(!settings.dense, Status::invalid_argument, "density_steps: got {}, and method dense keeps everything",
            get_setting(settings, "density_steps"));
    require(settings.target_density == 0, Status::invalid_argument,
            "density_steps: got {} beside target_density {}, expected one of the two",
            get_setting(settings, "density_steps"), settings.target_density);
    settings.target_density = settings.density_steps.back().density;  // calls take their own
  }
  if (settings.target_density > 0 && rule().meets != Meets::by_bound) {
    if (rule().meets == Meets::as_target) settings.rule = Rule::target;
    settings.density = settings.target_density;
    settings.target_density = 0;
  }
  backend->configure(exec, get_setting(settings, "kernel"), shape.dtype, settings.products);
  if (!shape.subspaces.empty()) check_partition(shape.subspaces, shape.dim);
  if (!shape.rope.empty())
    make_partition("rope", shape.dim, shape.rope, 0);  // refuses ranges that do not cover the channels
  if (!settings.dense) {
    groups = effective_groups(settings, shape.q_tokens);
    selection_groups = groups + (shape.dense_queries ? 1 : 0);
    if (row(settings.proxy).codes) {
      codes = effective_codes(settings, shape.k_tokens);
      if (!rule().whole_codes) partition = shape.subspaces;
      if (partition.empty()) partition = make_partition(settings.partition, shape.dim, shape.rope, settings.seed);
      check_partition(partition, shape.dim);
    }
    if (rule().whole_codes) check_codes();
    if (compensates()) check_compensation();
    if (row(settings.group).with_keys || row(settings.encode).with_queries) check_cocluster();
    if (reuses()) check_reuse();
    if (settings.profile != nullptr) check_profile();
  }
  check_backend();
  if (!settings.dense) state_bytes = StateLayout(*this).bytes;
  report_bytes = ReportLayout::bytes(shape);
  const auto bytes = [&](int64_t heads) {
    Arena arena;
    cut(arena, heads);
    return checked_add(arena.used(), Arena::kAlignment, "workspace bytes");
  };
  // auto leaves room for chunks beside what all heads of a sample keep where one rho is solved for them, and takes a
  // hundredth of a large device, since every chunk costs launches. 8-bit products make bytes for four times what a head
  // needs otherwise.
  const int64_t some = std::max(int64_t{400} << 20, exec.memory_bytes / 100);
  const int64_t enough = settings.products == Products::bf16 ? some : 4 * some;
  const int64_t limit = settings.workspace_limit != 0 ? settings.workspace_limit << 20
                                                      : std::max(enough, checked_mul(bytes(1) / 2, 3, "workspace bytes"));
  chunk = backend->chunk(shape.heads, limit, bytes);
  if (settings.profile != nullptr) chunk = 1;  // whose floors are each head's own
  workspace_bytes = bytes(chunk);
  alphas.assign(static_cast<size_t>(chunk), settings.alpha);
}

Sizes Plan::sizes(int64_t heads) const {
  return {.heads = heads,
          .q_tokens = shape.q_tokens,
          .k_tokens = shape.k_tokens,
          .dim = shape.dim,
          .groups = groups,
          .codes = codes,
          .whole_codes = !settings.dense && rule().whole_codes,
          .sampled = select_stride() > 1,
          .extra = settings.dense     ? 0
                   : tail().per_group ? groups
                   : tail().per_code  ? codes
                                      : 0,
          .parts = parts(),
          .part_stride = settings.tail_stride,
          .products = settings.products};
}

Workspace Plan::cut(Arena& arena, int64_t n, int64_t first) const {
  const int64_t words = mask_words(shape.k_tokens), dim = shape.dim;
  // What weigh leaves to keep, of all heads where these wait for one another.
  const int64_t kept = solves_sample() ? shape.heads : n, before = solves_sample() ? first : 0;
  const auto take = [&](auto*& array, int64_t each) {
    checked_mul(kept, each * 64, "workspace bytes");  // 8 for an element, and as many such arrays
    array = arena.take<std::remove_reference_t<decltype(*array)>>(kept * each);
    if (array != nullptr) array += before * each;
  };
  Workspace at{};
  at.report = arena.take<std::byte>(report_bytes);
  at.all_queries = arena.take<int64_t>(2);
  at.q_rows = arena.take<int32_t>(shape.q_tokens);
  at.k_rows = arena.take<int32_t>(shape.k_tokens);
  at.valid = arena.take<uint32_t>(words);
  at.keep = arena.take<uint32_t>(words);
  at.queries = arena.take<uint32_t>(mask_words(shape.q_tokens));
  take(at.labels, shape.q_tokens);
  take(at.sizes, groups + 1);
  at.counts = arena.take<int32_t>(n * (groups + 1));
  at.top_p = arena.take<int32_t>(n * (groups + 1));
  take(at.order, shape.q_tokens);
  take(at.offsets, groups + 2);
  take(at.centroids, groups * dim);
  take(at.codebooks, codes * dim);
  take(at.codes, subspaces() * shape.k_tokens);
  take(at.empty, subspaces());
  take(at.tables, groups * subspaces() * codes);
  at.mask = arena.take<uint32_t>(n * (groups + 1) * words);
  const Sizes all = sizes(n);
  at.scratch.bytes = backend->attend_scratch(exec, all);
  if (!settings.dense) {
    if (rule().similarity) {
      take(at.q_similarity, groups);
      take(at.k_similarity, codes);
    }
    if (tail().per_group) at.tail_k = arena.take<float>(n * groups * dim);
    if (tail().splits && !compensates()) {
      at.tail_v = arena.take<float>(n * tail_values() * dim);
    } else {
      take(at.tail_v, tail_values() * dim);  // of codes: made before the weights
      take(at.tail_bias, tail_values());
    }
    at.tail_mask = arena.take<uint32_t>(n * (groups + 1) * mask_words(all.extra));
    if (tail().mixes) at.tail_share = arena.take<float>(n * (groups + 1));
    if (tail().splits) {
      at.part_centroids = arena.take<float>(n * groups * parts() * dim);
      at.part_labels = arena.take<int32_t>(n * shape.q_tokens);
      at.part_sizes = arena.take<int32_t>(n * groups * parts());
      at.log_mass = arena.take<float>(n * groups);
    }
    if (rule().errors) at.errors = arena.take<float>(n * groups * codes);
    at.weights.bytes = checked_mul(kept, backend->weights_bytes(exec, sizes(1)), "workspace bytes");
    const auto room = [&](auto scratch, int64_t beside = 0) {
      at.scratch.bytes = std::max(at.scratch.bytes, beside + scratch(exec, all));
    };
    if (row(settings.group).with_keys) {
      room(backend->cocluster_scratch);
    } else {
      room(backend->group_scratch);
      room(backend->encode_scratch);
    }
    if (compensates()) room(backend->compensate_scratch);
    const int64_t weights_here = solves_sample() ? 0 : at.weights.bytes;  // from weigh to the end of keep
    room(backend->weigh_scratch, weights_here);
    if (tail().splits) room(backend->split_scratch, weights_here);
    if (solves_sample()) {
      at.rho = arena.take<double>(1);
      at.weights.data = arena.take<std::byte>(at.weights.bytes);
      at.scratch.bytes = std::max(at.scratch.bytes, backend->solve_scratch(exec, sizes(kept)));
    }
    if (settings.tail != Tail::none) room(backend->tail_scratch);
    if (reuses()) at.scratch.bytes = std::max(at.scratch.bytes, n * codes * 4);
  }
  std::byte* scratch = arena.take<std::byte>(at.scratch.bytes);  // null while bytes are counted
  at.scratch.data = scratch;
  if (solves_sample()) {
    at.beside_weights = at.scratch;
  } else {
    at.weights.data = scratch;
    at.beside_weights = {scratch == nullptr ? nullptr : scratch + at.weights.bytes, at.scratch.bytes - at.weights.bytes};
  }
  return at;
}

Workspace Plan::layout(void* memory, int64_t bytes, int64_t first) const {
  require(bytes >= workspace_bytes, Status::workspace, "workspace_bytes: got {}, this plan needs {}", bytes,
          workspace_bytes);
  require(memory != nullptr, Status::invalid_argument, "workspace: got null, expected {} bytes", workspace_bytes);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto shift = static_cast<int64_t>(round_up(static_cast<int64_t>(address % Arena::kAlignment), Arena::kAlignment)) -
                     static_cast<int64_t>(address % Arena::kAlignment);
  Arena arena(static_cast<std::byte*>(memory) + shift, bytes - shift);
  return cut(arena, chunk, first);
}

}  // namespace scope
