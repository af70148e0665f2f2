// scope attend: one call on q, k, v from a file.
#include <fmt/format.h>

#include <cstring>
#include <filesystem>
#include <optional>

#include "common.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "methods/models.h"

namespace scope::cli {

namespace {

struct Options {
  std::string input, q, k, v, output, stats, state, grid, rope, subspaces;
  int64_t layer = -1, step = -1, steps = 0, text = 0, quality = 0;
  bool dump = false, lse = false;
  MethodFlags method;
  MachineFlags machine;
};

template <class T>
io::Array to_array(io::ElementType type, std::vector<int64_t> shape, const T* data, size_t count) {
  io::Array array{type, std::move(shape), std::vector<std::byte>(count * sizeof(T))};
  if (count > 0) std::memcpy(array.data.data(), data, count * sizeof(T));
  return array;
}

// Optional per-sample inputs that a file may carry beside q, k, v.
struct Extras {
  std::vector<int64_t> q_lengths, k_lengths;
  std::vector<uint32_t> keep, dense_queries;
};

template <class T>
std::vector<T> take(io::SafeTensors& file, const char* name, io::ElementType type, const std::vector<int64_t>& shape) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) return {};
  const io::Array& array = found->second;
  require(array.type == type && array.shape == shape, Status::shape, "{}: got {} [{}], expected {} [{}]", name,
          io::element_name(array.type), fmt::join(array.shape, ", "), io::element_name(type), fmt::join(shape, ", "));
  std::vector<T> values(array.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), array.data.data(), array.data.size());
  return values;
}

io::Array take_tensor(io::SafeTensors& file, const std::string& path, const char* name) {
  auto node = file.tensors.extract(name);
  require(!node.empty(), Status::format, "{}: there is no tensor \"{}\"; expected q, k and v", path, name);
  return std::move(node.mapped());
}

Qkv read_input(const Options& options, io::SafeTensors& file) {
  if (options.input.empty()) {
    require(!options.q.empty() && !options.k.empty() && !options.v.empty(), Status::invalid_argument,
            "input: expected a .safetensors file, or --q, --k and --v as .npy files");
    return make_qkv_input(io::read_npy(options.q), io::read_npy(options.k), io::read_npy(options.v));
  }
  file = io::read_safetensors(options.input);
  io::Array q = take_tensor(file, options.input, "q");
  io::Array k = take_tensor(file, options.input, "k");
  return make_qkv_input(std::move(q), std::move(k), take_tensor(file, options.input, "v"));
}

// A flag wins over the file's metadata.
std::string flag_or_metadata(const std::string& flag, const io::SafeTensors& file, const char* name) {
  if (!flag.empty()) return flag;
  const auto found = file.metadata.find(name);
  return found == file.metadata.end() ? "" : found->second;
}

void describe(const Options& options, const io::SafeTensors& file, Qkv& qkv) {
  require(options.text <= std::min(qkv.q_tokens, qkv.k_tokens), Status::shape, "--text: got {}, expected at most {} tokens",
          options.text, std::min(qkv.q_tokens, qkv.k_tokens));
  const std::string grid = flag_or_metadata(options.grid, file, "grid");
  if (!grid.empty()) {
    int64_t tokens = options.text;
    int64_t product = 1;
    for (const int64_t n : parse_list("grid", grid, 'x')) {
      require(n <= qkv.q_tokens && product <= qkv.q_tokens, Status::shape, "grid: got {}, expected the {} tokens of q", grid,
              qkv.q_tokens);
      product *= n;
    }
    tokens += product;
    require(tokens == qkv.q_tokens, Status::shape, "grid: {} has {} tokens, with {} of text {}, and q has {}", grid, product,
            options.text, tokens, qkv.q_tokens);
  }
  const std::string subspaces = flag_or_metadata(options.subspaces, file, "subspaces");
  std::string rope = flag_or_metadata(options.rope, file, "rope");
  if (rope.empty() && !options.method.model.empty())
    rope = fmt::format("{}", fmt::join(find_model(options.method.model).rope, ","));
  if (!rope.empty()) qkv.rope = parse_list("rope", rope, ',');
  if (!subspaces.empty()) qkv.subspaces = parse_subspaces(subspaces);
}

// The last `text` tokens are text: every query sees them, and they see everything.
std::vector<uint32_t> last_tokens(int64_t text, int64_t batch, int64_t tokens) {
  std::vector<uint32_t> bits(static_cast<size_t>(batch * mask_words(tokens)));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = tokens - text; i < tokens; ++i) set_mask_bit(bits.data() + b * mask_words(tokens), i);
  }
  return bits;
}

Extras read_extras(const Options& options, io::SafeTensors& file, const Qkv& qkv) {
  Extras extras{take<int64_t>(file, "q_lengths", io::ElementType::i64, {qkv.batch}),
                take<int64_t>(file, "k_lengths", io::ElementType::i64, {qkv.batch}),
                take<uint32_t>(file, "keep", io::ElementType::u32, {qkv.batch, mask_words(qkv.k_tokens)}),
                take<uint32_t>(file, "dense_queries", io::ElementType::u32, {qkv.batch, mask_words(qkv.q_tokens)})};
  if (options.text > 0) {
    extras.keep = last_tokens(options.text, qkv.batch, qkv.k_tokens);
    extras.dense_queries = last_tokens(options.text, qkv.batch, qkv.q_tokens);
  }
  return extras;
}

void add_dump(const Runner& runner, const Qkv& qkv, io::SafeTensors& out) {
  const Plan& plan = runner.plan();
  const int64_t b = qkv.batch, h = qkv.heads, g = plan.selection_groups, words = mask_words(qkv.k_tokens), heads = b * h;
  const auto i32 = io::ElementType::i32;
  out.tensors["labels"] = to_array(i32, {b, h, qkv.q_tokens}, runner.labels.data(), runner.labels.size());
  out.tensors["sizes"] = to_array(i32, {b, h, g}, runner.sizes.data(), runner.sizes.size());
  out.tensors["counts"] = to_array(i32, {b, h, g}, runner.counts.data(), runner.counts.size());
  out.tensors["mask"] = to_array(io::ElementType::u32, {b, h, g, words}, runner.mask.data(), runner.mask.size());
  if (std::any_of(runner.keep.begin(), runner.keep.end(), [](uint32_t word) { return word != 0; })) {
    out.tensors["keep"] = to_array(io::ElementType::u32, {b, words}, runner.keep.data(), runner.keep.size());
  }
  out.tensors["q_centroids"] =
      to_array(io::ElementType::f32, {b, h, plan.groups, qkv.dim}, runner.centroids.data(), runner.centroids.size());
  int64_t at = 0;
  nlohmann::json sets = nlohmann::json::array();
  for (size_t m = 0; m < plan.partition.size(); ++m) {
    const auto depth = static_cast<int64_t>(plan.partition[m].size()), count = heads * plan.codes * depth;
    out.tensors[fmt::format("codebook.{}", m)] =
        to_array(io::ElementType::f32, {b, h, plan.codes, depth}, runner.codebooks.data() + at, static_cast<size_t>(count));
    at += count;
    const int64_t each = heads * qkv.k_tokens;
    out.tensors[fmt::format("codes.{}", m)] =
        to_array(i32, {b, h, qkv.k_tokens}, runner.codes.data() + static_cast<int64_t>(m) * each, static_cast<size_t>(each));
    sets.push_back(plan.partition[m]);
  }
  if (!plan.partition.empty()) out.metadata["subspaces"] = sets.dump();
}

void run(const Options& options) {
  const Settings settings = options.method.settings();
  require(!options.dump || !settings.dense, Status::invalid_argument, "--dump: method dense has no selection");
  require(options.state.empty() || !settings.dense, Status::invalid_argument, "--state: method dense keeps none");
  require((options.step < 0) == (options.steps == 0), Status::invalid_argument,
          "--step: needs --steps, and --steps needs --step");
  const bool npy = options.output.ends_with(".npy");
  require(!npy || (!options.dump && !options.lse), Status::invalid_argument,
          "--output: a .npy file holds one array; --dump and --lse need .safetensors");
  const Context context = options.machine.context();
  auto progress = std::make_unique<Progress>("attend", options.quality > 0 ? 4 : 3);
  io::SafeTensors file;
  Qkv qkv = read_input(options, file);
  progress->step("read");
  describe(options, file, qkv);
  const Extras extras = read_extras(options, file, qkv);
  require(options.quality == 0 || (extras.q_lengths.empty() && extras.k_lengths.empty()), Status::invalid_argument,
          "--quality: not on padded input (the file has q_lengths or k_lengths)");
  Runner runner(context, settings,
                {.batch = qkv.batch,
                 .heads = qkv.heads,
                 .q_tokens = qkv.q_tokens,
                 .k_tokens = qkv.k_tokens,
                 .dim = qkv.dim,
                 .dtype = qkv.dtype,
                 .rope = qkv.rope,
                 .subspaces = qkv.subspaces,
                 .dense_queries = !extras.dense_queries.empty()});
  if (!settings.dense) runner.want_selection();
  if (!options.state.empty()) {
    runner.init_state();
    if (std::filesystem::exists(options.state)) {
      const auto saved = io::read_file(options.state, runner.plan().state_bytes);
      require(saved.size() == runner.state().size(), Status::format, "{}: has {} bytes, a state of this shape has {}",
              options.state, saved.size(), runner.state().size());
      runner.state() = saved;
      try {
        check_state(runner.plan(), runner.state().data());
      } catch (const Error& error) {
        fail(Status::format, "{}: {}", options.state, error.what());
      }
    }
  }
  std::vector<float> lse(options.lse ? static_cast<size_t>(qkv.batch * qkv.heads * qkv.q_tokens) : 0);
  const auto pointer = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
  CallArgs args;
  args.q = qkv.view(qkv.q, qkv.q_tokens);
  args.k = qkv.view(qkv.k, qkv.k_tokens);
  args.v = qkv.view(qkv.v, qkv.k_tokens);
  args.lse = options.lse ? lse.data() : nullptr;
  args.q_lengths = pointer(extras.q_lengths);
  args.k_lengths = pointer(extras.k_lengths);
  args.keep = pointer(extras.keep);
  args.dense_queries = pointer(extras.dense_queries);
  args.place = {options.layer, options.step, options.steps};
  runner.run(args);
  progress->step("attended");

  std::vector<int64_t> shape{qkv.heads, qkv.q_tokens, qkv.dim};
  if (qkv.batched) shape.insert(shape.begin(), qkv.batch);
  const io::Array out{qkv.q.type, shape, runner.out};
  if (npy) {
    io::write_npy(options.output, out);
  } else {
    io::SafeTensors result;
    result.tensors["out"] = out;
    result.metadata["settings"] = settings_json(settings).dump();
    if (options.lse) {
      result.tensors["lse"] = to_array(io::ElementType::f32, {qkv.batch, qkv.heads, qkv.q_tokens}, lse.data(), lse.size());
    }
    if (options.dump) add_dump(runner, qkv, result);
    io::write_safetensors(options.output, result);
  }
  if (!options.state.empty()) {
    const std::span<const std::byte> part = runner.state();
    io::write_file(options.state, {&part, 1});
  }
  progress->step("written");
  auto stats = stats_json(runner);
  stats["settings"] = settings_json(settings);
  const bool ran_sparse = runner.stats.reason == Reason::sparse;
  if (options.quality > 0) {
    const Quality quality = measure(context, qkv, runner, !ran_sparse, options.quality);
    progress.reset();
    stats["quality"] = {{"queries", quality.queries},
                        {"mass_recall", quality.mass_recall},
                        {"mass_interval", quality.mass_interval},
                        {"oracle_recall", quality.oracle_recall},
                        {"retention", quality.retention},
                        {"top_10_percent_mass", quality.top_mass},
                        {"error", quality.error},
                        {"cosine", quality.cosine}};
    fmt::print(
        "mass recall {:.4f} ± {:.4f}, oracle recall {:.4f}, error {:.5f} over {} queries; exact top 10 % hold {:.3f}\n",
        quality.mass_recall, quality.mass_interval, quality.oracle_recall, quality.error, quality.queries, quality.top_mass);
  }
  progress.reset();
  if (!options.stats.empty()) write_json(options.stats, stats);
  fmt::print("{}: {}, density {:.4f}, {:.1f} ms ({} threads, {})\n", options.output, reason_text(runner.stats.reason),
             runner.stats.density, 1e3 * runner.stats.total, context.threads(), context.instruction_set());
}

}  // namespace

void add_attend(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "attend",
      "Attend over q, k, v from a file: tensors q, k, v as [batch, heads, tokens, dim] or [heads, tokens, dim] in f32, f16 "
      "or\n"
      "bf16; metadata grid (13x30x52), rope (44,42,42) or subspaces (JSON index lists), or the flags of those names.\n"
      "Optional tensors: q_lengths, k_lengths (i64 [batch]); keep, dense_queries (u32 bitmasks [batch, words]).\n"
      "It is one sparse call; the schedule applies only with --layer and --step.\n\n"
      "  scope attend qkv.safetensors -o out.safetensors --method scope --set rho=0.9 --set alpha=0.1 --stats stats.json "
      "--dump\n"
      "  scope attend --q q.npy --k k.npy --v v.npy --rope 44,42,42 -o out.npy");
  command->add_option("input", options->input, "a .safetensors file with q, k and v");
  command->add_option("--q", options->q, "q as .npy, instead of the input file");
  command->add_option("--k", options->k, "k as .npy");
  command->add_option("--v", options->v, "v as .npy");
  command->add_option("-o,--output", options->output, "file to write: .safetensors, or .npy for the output alone")
      ->required();
  options->method.add(*command);
  command->add_option("--grid", options->grid, "tokens along T, H and W, as TxHxW");
  command->add_option("--rope", options->rope, "channels along T, H and W, as T,H,W");
  command->add_option("--subspaces", options->subspaces, "channel sets as JSON lists; wins over the setting partition");
  command->add_option("--text", options->text, "the last N tokens are text: always kept as keys, dense as queries")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--layer", options->layer, "this call's layer, for the schedule")->check(CLI::NonNegativeNumber);
  command->add_option("--step", options->step, "this call's denoising step, for the schedule")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--steps", options->steps, "how many denoising steps there are")->check(CLI::PositiveNumber);
  command->add_option("--state", options->state, "warm-start file: read if it exists, written after the call");
  command->add_option("--stats", options->stats, "write the call's statistics as JSON");
  command->add_option("--quality", options->quality, "measure recall and error on N sampled queries per head, in float64")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--dump", options->dump, "add the selection, centroids, codebooks and codes to the output file");
  command->add_flag("--lse", options->lse, "add the log-sum-exp to the output file");
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
