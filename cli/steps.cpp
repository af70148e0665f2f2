// scope steps: how long a model takes on this machine, by passes with random weights, before anyone has the real ones.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bounds.h"
#include "checkpoint.h"
#include "commands.h"
#include "core/built_from.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "methods/methods.h"
#include "outputs.h"
#include "parse.h"
#include "runner.h"
#include "terminal.h"
#include "video/footprint.h"
#include "video/self_attention.h"
#include "video_run.h"

namespace scope::cli {

namespace {

constexpr int64_t kTextTokens = 512, kImageTokens = 257;  // as diffusers' pipelines for Wan encode a prompt and an image

struct StepsOptions {
  std::string model, variants = "dense,scope:target_density=0.2,scope:target_density=0.1,fast", grid, known, compute, json,
                     commit = scope::built_from();
  int64_t steps = 0, layers = 0;  // 0: the model's
  int64_t repeat = 2;
  uint64_t seed = 0;
  MachineFlags machine;
};

// Seconds of a pass, and what they are made of.
struct PassTime {
  double total = 0, dense_attention = 0, attend = 0, selection = 0, linear = 0;
  double clusters = 0;  // of selection: K-means, which a dense prefix may run too
  double density = 0;   // mean over the calls that ran sparse

  double rest() const { return total - dense_attention - attend - selection - linear; }
};

// The mean of the middle one or two, so that parts still add up.
PassTime median_pass(std::vector<PassTime> passes) {
  std::sort(passes.begin(), passes.end(), [](const PassTime& a, const PassTime& b) { return a.total < b.total; });
  const PassTime &a = passes[(passes.size() - 1) / 2], &b = passes[passes.size() / 2];
  PassTime out;
  for (double PassTime::*part : {&PassTime::total, &PassTime::dense_attention, &PassTime::attend, &PassTime::selection,
                                 &PassTime::linear, &PassTime::clusters, &PassTime::density}) {
    out.*part = (a.*part + b.*part) / 2;
  }
  return out;
}

// A method with its settings, and its steps by what their passes do.
struct StepsVariant {
  std::string name;
  Settings settings;
  int64_t dense = 0, clustering = 0, sparse = 0;  // clustering: dense too, and K-means runs beside them
  int64_t first_sparse = 0;
};

struct StepsCase {
  const StepsVariant* variant = nullptr;
  PassTime dense, first, warm;  // dense: without clustering
  int64_t peak_bytes = 0;
  std::string output;  // names the bits of the last pass
  double run = 0;
};

std::string gigabytes(int64_t bytes) { return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9); }

class StepsRun {
 public:
  explicit StepsRun(const StepsOptions& options) : options_(options), context_(options.machine.context()) {
    folder_ = find_model_folder(options.model, true);
    if (!io::exists(folder_ + "/config.json") && io::exists(folder_ + "/model_index.json")) folder_ += "/transformer";
    const video::Notes notes = video::read_notes(folder_);
    text_ = video::read_config(folder_, [](std::string_view json) {
      video::parse_model_config(json);
      return std::string(json);
    });
    config_ = video::parse_model_config(text_);
    model_layers_ = config_.layers;
    const std::string name = std::filesystem::path(folder_).filename().string();
    const bool is_row = std::ranges::any_of(models_table(), [&](const Model& row) { return row.name == name; });
    const Model* known = find_known(options.known.empty() && is_row ? name : options.known, config_);
    if (known != nullptr) known_ = known->name;
    if (options.layers > 0) {
      require(options.layers <= model_layers_, Status::invalid_argument, "--layers: got {}, this model has {}",
              options.layers, model_layers_);
      text_ = video::first_layers(text_, options.layers);
      config_ = video::parse_model_config(text_);
    }
    const bool noted = notes.grid[0] > 0;
    require(noted || known != nullptr || !options.grid.empty(), Status::invalid_argument,
            "--grid: this model needs one, as TxHxW in tokens, or --known NAME for that of a known model");
    grid_ = !options.grid.empty() ? parse_grid(options.grid)
            : noted               ? notes.grid
                                  : std::array{known->grid[0], known->grid[1], known->grid[2]};
    for (const int64_t n : grid_) {
      require(n <= config_.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
              io::join(grid_, "x"), config_.rope_max);
    }
    steps_ = options.steps > 0 ? options.steps : known != nullptr ? known->steps : noted ? notes.steps : 50;
    branches_ = config_.embeds_guidance ? 1 : 2;
    compute_ = checked_compute(context_, options.compute);
    make_variants();
  }

  // What the command reads.
  void declare(Outputs& outputs) const {
    outputs.reads_model(folder_);
    for (const StepsVariant& variant : variants_) outputs.reads(variant.settings);
  }

  void run() {
    engine_ = make_engine(context_, compute_);
    check_memory();
    used_before_ = engine_->memory().used;
    model_ = video::make_model(text_, video::drawn_tensors(options_.seed), *engine_);
    make_inputs();
    print_title();
    const int64_t repeat = options_.repeat, sparse = std::ssize(variants_) - 1;
    int64_t passes = 1 + sparse * (1 + repeat);
    for (const StepsVariant& variant : variants_) passes += has_own_dense(variant) ? repeat : 0;
    progress_ = std::make_unique<Progress>("steps", passes * config_.layers);
    for (const StepsVariant& variant : variants_) {
      start_pass(variant);
      if (cases_.empty()) warm_up();
      StepsCase made = measure(variant);
      made.output = check_output();
      cases_.push_back(made);
      print_case(made);
    }
    progress_.reset();
    pass_.reset();
    time_algorithms();
    print_linear();
  }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json out{{"commit", options_.commit},
                               {"machine", machine_json(context_)},
                               {"host", "native"},
                               {"model", std::filesystem::path(folder_).filename().string()},
                               {"config", nlohmann::ordered_json::parse(text_)},
                               {"layers", config_.layers},
                               {"model_layers", model_layers_},
                               {"known", known_.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(known_)},
                               {"grid", grid_},
                               {"tokens", grid_[0] * grid_[1] * grid_[2]},
                               {"text", text_tokens()},
                               {"branches", branches_},
                               {"steps", steps_},
                               {"seed", options_.seed},
                               {"dtype", compute_},
                               {"repeat", options_.repeat},
                               {"linear", linear_json()},
                               {"cases", nlohmann::ordered_json::array()}};
    for (const StepsCase& c : cases_) out["cases"].push_back(case_json(c));
    return out;
  }

 private:
  bool runs_sparse(const Settings& settings, int64_t step) const {
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      if (schedule(settings, {layer, step, steps_}) == Reason::sparse) return true;
    }
    return false;
  }

  // Dense first, whether it is asked for or not: all others are held against it, and their dense steps are its.
  void make_variants() {
    std::vector<std::string> names = split_methods(options_.variants);
    std::erase(names, "dense");
    names.insert(names.begin(), "dense");
    for (const std::string& name : names) {
      StepsVariant variant{.name = name, .settings = parse_method(name, known_)};
      const Settings& settings = variant.settings;
      check_effects(name, known_, {}, settings, {.device = options_.machine.on_device()});
      require(settings.density_steps.empty() && settings.reuse_interval == 1, Status::unsupported,
              "--variants: {} does not do the same in every sparse step, and one pass stands for all of them here; "
              "density_steps must be empty and reuse_interval 1",
              name);
      for (int64_t step = 0; step < steps_; ++step) {
        if (runs_sparse(settings, step)) {
          if (variant.sparse++ == 0) variant.first_sparse = step;
        } else if (clusters_in_prefix(settings, schedule(settings, {config_.layers - 1, step, steps_}))) {
          ++variant.clustering;
        } else {
          ++variant.dense;
        }
      }
      require(settings.dense || variant.sparse > 0, Status::invalid_argument,
              "--variants: {} is dense in all of {} steps and {} layers, as dense is", name, steps_, config_.layers);
      require(name == "dense" || !settings.dense, Status::invalid_argument, "--variants: got {}, and dense is there once",
              name);
      variants_.push_back(variant);
    }
  }

  // Where the dense calls of a schedule are not those of `dense`; its own are.
  bool has_own_dense(const StepsVariant& variant) const {
    const Settings &own = variant.settings, &dense = variants_[0].settings;
    const bool same = own.products == dense.products && own.kernel == dense.kernel;
    return own.dense || (variant.dense + variant.clustering > 0 && !same);
  }

  void check_memory() const {
    int64_t most = 0;
    for (const StepsVariant& variant : variants_) {
      most = std::max(most, video::SelfAttention::bytes(*engine_, config_, variant.settings, grid_, branches_));
    }
    const int64_t model = video::model_bytes(text_, *engine_, grid_, false), free = engine_->memory().free;
    require(model + most <= free, Status::out_of_memory,
            "memory: {} at {} needs {}, {} of it for weights and what goes through them, and {} are free; --layers and "
            "--grid make it smaller",
            options_.model, io::join(grid_, "x"), gigabytes(model + most), gigabytes(model), gigabytes(free));
  }

  int64_t text_tokens() const { return config_.text_tokens > 0 ? config_.text_tokens : kTextTokens; }

  void make_inputs() {
    const auto size = video::latent_size(config_, grid_);
    const int64_t volume = size[0] * size[1] * size[2];
    const auto draw = [&](uint32_t tensor, int64_t channels) {
      video::Buffer memory = engine_->allocate(std::max<int64_t>(channels, 1) * volume * 4);
      engine_->draw({.seed = options_.seed, .tensor = tensor, .purpose = 4}, 0, 1,
                    {memory.get(), DType::f32, channels, volume});
      return memory;
    };
    latent_ = draw(1, config_.latent_channels);
    condition_ = draw(2, config_.condition_channels);
    numbers_ = config_.latent_channels * volume;
    velocity_ = engine_->allocate(numbers_ * 4);
  }

  void start_pass(const StepsVariant& variant) {
    const bool morton = variant.settings.method->morton;
    if (pass_ != nullptr && morton == morton_) return;
    morton_ = morton;
    pass_.reset();
    pass_ = model_->start(grid_, morton);
    const auto noise = [&](int64_t tokens, int64_t columns) { return video::make_noise(options_.seed, tokens * columns); };
    video::Prompt prompt{noise(text_tokens(), config_.text_dim), {}, noise(1, config_.pooled_dim), 6};
    if (config_.image_dim > 0) {
      prompt.image = noise(config_.image_tokens > 0 ? config_.image_tokens : kImageTokens, config_.image_dim);
    }
    pass_->add_prompt(prompt);
    pass_->set_timesteps(video::noise_timesteps(video::Sampler::euler, steps_, video::Notes{}.shift));
  }

  void forward(int64_t step, const video::Attend& attend) {
    pass_->forward(step, 0, floats(latent_), floats(condition_), attend, floats(velocity_));
    engine_->wait();
  }

  // Libraries and kernels load with their first use: every linear layer runs once, and in the first layer each variant
  // attends twice, from no state and from one.
  void warm_up() {
    video::ModelConfig one_layer = config_;
    one_layer.layers = 1;
    forward(0, [&](int64_t layer, video::Matrix q, video::Matrix k, video::Matrix v, video::Matrix out,
                   const video::TextTokens& text) {
      for (const StepsVariant& variant : variants_) {
        if (layer > 0) break;
        Settings settings = variant.settings;
        settings.dense_layers = 0;
        video::SelfAttention attention(*engine_, one_layer, settings, grid_, 1);
        for (int i = 0; i < (settings.dense ? 1 : 2); ++i) {
          attention.run({0, variant.first_sparse, steps_}, 0, q, k, v, out, text);
          attention.take_reports();
        }
      }
      progress_->step("warming up");
    });
  }

  PassTime time_pass(video::SelfAttention& attention, int64_t step, const std::string& name) {
    PassTime time;
    int64_t sparse = 0;
    const auto take_reports = [&] {
      for (const video::CallReport& call : attention.take_reports()) {
        const CallStats& stats = call.stats;
        if (stats.reason == Reason::sparse) {
          time.attend += stats.attend;
          time.selection += stats.total - stats.attend;
          time.clusters += stats.group + stats.encode;
          time.density += stats.density;
          ++sparse;
        } else {
          time.dense_attention += stats.total;
        }
        progress_->step(name);
      }
    };
    engine_->time_linear(true);
    const double start = now_seconds();
    forward(step, [&](int64_t layer, video::Matrix q, video::Matrix k, video::Matrix v, video::Matrix out,
                      const video::TextTokens& text) {
      attention.run({layer, step, steps_}, 0, q, k, v, out, text);
      if (context_.host()) take_reports();
    });
    take_reports();  // of a device
    time.total = now_seconds() - start;
    engine_->time_linear(false);
    if (sparse > 0) time.density /= static_cast<double>(sparse);
    const video::LinearTimes linears = engine_->take_linear_times();
    for (const auto& item : linears) time.linear += item.second.seconds;
    if (cases_.empty()) linears_ = linears;  // of a dense pass
    return time;
  }

  StepsCase measure(const StepsVariant& variant) {
    StepsCase made;
    made.variant = &variant;
    const auto median_of = [&](video::SelfAttention& attention, const auto& step_of) {
      std::vector<PassTime> passes;
      for (int64_t i = 0; i < options_.repeat; ++i) passes.push_back(time_pass(attention, step_of(i), variant.name));
      made.peak_bytes = engine_->memory().used - used_before_;  // while everything is there
      return median_pass(passes);
    };
    if (has_own_dense(variant)) {
      Settings settings = variant.settings;
      settings.warm_prefix = false;  // K-means is added where the schedule has it
      video::SelfAttention attention(*engine_, config_, settings, grid_, branches_);
      made.dense = median_of(attention, [](int64_t) { return 0; });
    } else {
      made.dense = cases_[0].dense;
    }
    if (!variant.settings.dense) {
      video::SelfAttention attention(*engine_, config_, variant.settings, grid_, branches_);
      const int64_t first = variant.first_sparse, last = first + variant.sparse - 1;
      made.first = time_pass(attention, first, variant.name);
      made.warm = median_of(attention, [&](int64_t i) { return std::min(first + 1 + i, last); });
    }
    made.run = run_seconds(made);
    return made;
  }

  // Every pass of the schedule, by those that were measured. A state's first call takes longer, wherever it stands.
  double run_seconds(const StepsCase& c) const {
    const StepsVariant& v = *c.variant;
    const auto passes = [&](int64_t steps) { return static_cast<double>(steps * branches_); };
    const double states = v.settings.method->shares_branches ? 1 : static_cast<double>(branches_);
    const double dense = passes(v.dense + v.clustering) * c.dense.total + passes(v.sparse) * c.warm.total;
    if (v.sparse == 0) return dense;
    if (v.clustering == 0) return dense + states * (c.first.total - c.warm.total);
    return dense + passes(v.clustering) * c.warm.clusters + states * (c.first.clusters - c.warm.clusters);
  }

  // Refuses numbers that are none.
  std::string check_output() const {
    std::vector<float> numbers(static_cast<size_t>(numbers_));
    engine_->download(velocity_.get(), numbers.data(), numbers_ * 4);
    for (const float x : numbers) {
      require(std::isfinite(x), Status::non_finite, "a pass gave NaN or Inf: numbers of this size do not suit this model");
    }
    return hash_of({&numbers});
  }

  void time_algorithms() {
    for (const auto& [shape, time] : linears_) {
      const std::vector<double> seconds = engine_->time_algorithms(shape);
      if (!seconds.empty()) algorithms_[shape] = seconds;
    }
  }

  static double fastest(const std::vector<double>& seconds) { return *std::min_element(seconds.begin(), seconds.end()); }

  nlohmann::ordered_json linear_json() const {
    double flop = 0, seconds = 0, own = 0;
    auto shapes = nlohmann::ordered_json::array();
    for (const auto& [shape, time] : linears_) {
      const auto calls = static_cast<double>(time.calls);
      flop += calls * shape.flop();
      seconds += time.seconds;
      nlohmann::ordered_json row{{"rows", shape.rows},        {"in", shape.in},
                                 {"out", shape.out},          {"type", dtype_name(shape.type)},
                                 {"calls", time.calls},       {"seconds", time.seconds / calls},
                                 {"cublaslt_first", nullptr}, {"cublaslt_fastest", nullptr}};
      if (const auto found = algorithms_.find(shape); found != algorithms_.end()) {
        row["cublaslt_first"] = found->second[0];
        row["cublaslt_fastest"] = fastest(found->second);
        own += calls * fastest(found->second);
      }
      shapes.push_back(row);
    }
    nlohmann::ordered_json out{{"tflops", flop / seconds / 1e12}, {"cublaslt_tflops", nullptr}, {"share", nullptr}};
    if (own > 0) {
      out["cublaslt_tflops"] = flop / own / 1e12;
      out["share"] = own / seconds;
    }
    out["shapes"] = shapes;
    return out;
  }

  nlohmann::ordered_json case_json(const StepsCase& c) const {
    const StepsVariant& v = *c.variant;
    const bool sparse = v.sparse > 0;
    const auto seconds = [](bool there, double value) { return there ? nlohmann::ordered_json(value) : nullptr; };
    const PassTime& pass = sparse ? c.warm : c.dense;
    return {{"variant", v.name},
            {"settings", settings_json(v.settings)},
            {"density", seconds(v.settings.target_density > 0, v.settings.target_density)},
            {"measured_density", seconds(sparse, c.warm.density)},
            {"dense_pass_s", seconds(v.dense + v.clustering > 0, dense_pass(c))},
            {"first_pass_s", seconds(sparse, c.first.total)},
            {"warm_pass_s", seconds(sparse, c.warm.total)},
            {"parts",
             {{"dense_attention", pass.dense_attention},
              {"attend", pass.attend},
              {"selection", pass.selection},
              {"linear", pass.linear},
              {"rest", pass.rest()}}},
            {"run_s", c.run},
            {"times_faster", cases_[0].run / c.run},
            {"peak_bytes", c.peak_bytes},
            {"output", c.output}};
  }

  // Of the variant's schedule.
  static double dense_pass(const StepsCase& c) { return c.dense.total + (c.variant->clustering > 0 ? c.warm.clusters : 0); }

  void print_title() const {
    const std::string layers =
        config_.layers == model_layers_ ? "" : fmt::format(", the first {} of its {} layers", config_.layers, model_layers_);
    fmt::print("{}\n",
               bold(fmt::format(
                   "{} at {} with random weights{}{}: {} tokens, text of {}, {} steps of {} pass{}, {}; {}", options_.model,
                   io::join(grid_, "x"), layers, known_.empty() ? "" : ", known model " + known_,
                   grid_[0] * grid_[1] * grid_[2], text_tokens(), steps_, branches_, branches_ == 1 ? "" : "es", compute_,
                   context_.device().empty() ? fmt::format("{} threads, {}", context_.threads(), context_.instruction_set())
                                             : context_.device())));
    fmt::print("{:<{}}  {:>7}  {:>8} {:>8} {:>8} = {:>8} {:>8} {:>9} {:>8} {:>8}  {:>9} {:>7}  {:>8}\n", "", width(),
               "density", "dense s", "first s", "warm s", "dense", "attend", "selection", "linear", "rest", "run s",
               "faster", "memory");
    std::fflush(stdout);
  }

  size_t width() const {
    size_t most = 8;
    for (const StepsVariant& variant : variants_) most = std::max(most, variant.name.size());
    return most;
  }

  // A run of minutes shows what it has.
  void print_case(const StepsCase& c) const {
    const bool sparse = c.variant->sparse > 0;
    const PassTime& pass = sparse ? c.warm : c.dense;
    const auto seconds = [](bool there, double value) { return there ? fmt::format("{:.3f}", value) : ""; };
    if (isatty(STDERR_FILENO) == 1) tell("\r\x1b[K");
    fmt::print(
        "{:<{}}  {:>7}  {:>8} {:>8} {:>8} = {:>8.3f} {:>8.3f} {:>9.3f} {:>8.3f} {:>8.3f}  {:>9.1f} {:>6.2f}x  {:>8}\n",
        c.variant->name, width(), seconds(sparse, c.warm.density),
        seconds(c.variant->dense + c.variant->clustering > 0, dense_pass(c)), seconds(sparse, c.first.total),
        seconds(sparse, c.warm.total), pass.dense_attention, pass.attend, pass.selection, pass.linear, pass.rest(), c.run,
        cases_[0].run / c.run, gigabytes(c.peak_bytes));
    std::fflush(stdout);
  }

  void print_linear() const {
    fmt::print(
        "Seconds of a pass, one forward of one branch: dense, the first sparse one and a warm one, which is made of dense\n"
        "self-attention, attend and selection of sparse calls, linear layers and the rest. run: every pass of {} steps, by\n"
        "these; faster: than the dense run.\n",
        steps_);
    const auto linear = linear_json();
    fmt::print("linear layers of a dense pass: {:.4g} TFLOP/s", linear["tflops"].get<double>());
    if (!algorithms_.empty()) {
      fmt::print(", {:.1f} % of what cuBLASLt alone has with its fastest algorithms, {:.4g}",
                 100 * linear["share"].get<double>(), linear["cublaslt_tflops"].get<double>());
    }
    fmt::print("\n");
    for (const auto& [shape, seconds] : algorithms_) {
      const video::LinearTime& time = linears_.at(shape);
      fmt::print(
          "  {:>6} x {:>5} -> {:>5} {}: {:>4} calls of {:>9.3f} ms; cuBLASLt's first algorithm {:>9.3f}, fastest {:>9.3f}\n",
          shape.rows, shape.in, shape.out, dtype_name(shape.type), time.calls,
          1e3 * time.seconds / static_cast<double>(time.calls), 1e3 * seconds[0], 1e3 * fastest(seconds));
    }
  }

  static float* floats(const video::Buffer& memory) { return static_cast<float*>(memory.get()); }

  const StepsOptions& options_;
  const Context context_;
  std::string folder_, text_, compute_;  // text_: config.json of what runs
  std::string known_;                    // the known model's row; empty: none
  video::ModelConfig config_;
  int64_t model_layers_ = 0, steps_ = 0, branches_ = 1;
  std::array<int64_t, 3> grid_ = {};
  std::vector<StepsVariant> variants_;
  std::unique_ptr<video::Engine> engine_;
  std::unique_ptr<video::Model> model_;
  std::unique_ptr<video::Pass> pass_;
  bool morton_ = false;
  video::Buffer latent_, condition_, velocity_;
  int64_t numbers_ = 0;      // of a latent
  int64_t used_before_ = 0;  // of the engine's memory
  std::unique_ptr<Progress> progress_;
  std::vector<StepsCase> cases_;
  video::LinearTimes linears_;
  std::map<video::LinearShape, std::vector<double>> algorithms_;
};

void run(const StepsOptions& options) {
  StepsRun steps(options);
  Outputs outputs;
  steps.declare(outputs);
  outputs.writes("--json", options.json);
  steps.run();
  if (!options.json.empty()) write_json(outputs.open(options.json), steps.json());
  outputs.place();
}

}  // namespace

void add_steps(CLI::App& app) {
  auto options = std::make_shared<StepsOptions>();
  CLI::App* command = app.add_subcommand(
      "steps",
      "How long would this model take on this machine? Weights, prompt and latents are random numbers, drawn where they "
      "are\n"
      "needed from the model's config.json and a seed: no weights are read, and none need be there.\n"
      "A pass is one forward of the transformer for one branch of guidance; a step is one pass, or two with guidance. "
      "Timed\n"
      "are dense passes and, for each sparse variant, the first one (K-means from nothing) and warm ones, with what each "
      "is\n"
      "made of; the whole run is added up from them by the variant's schedule of dense and sparse steps.\n"
      "A model is a folder with a config.json in diffusers' format, or the name of a bundled shape: wan2.1-t2v-14b,\n"
      "wan2.1-i2v-14b, wan2.1-t2v-1.3b, hunyuanvideo.\n\n"
      "  scope steps --model wan2.1-t2v-14b --backend cuda\n"
      "  scope steps --model hunyuanvideo --backend cuda --variants dense,scope:target_density=0.2,fast --repeat 1\n"
      "  scope steps --model wan2.1-t2v-1.3b --grid 5x30x52 --layers 2        # on the CPU, two of its layers\n"
      "  scope steps --model my-wan/transformer --grid 21x45x80 --backend cuda --json steps.json");
  command->add_option("--model", options->model, "folder with a config.json, or the name of a bundled shape or model")
      ->required();
  command
      ->add_option("--variants", options->variants,
                   "methods with their settings, as scope:target_density=0.2+rho=0.8, separated by commas; dense is always "
                   "among them")
      ->capture_default_str();
  command->add_option("--grid", options->grid, "tokens along T, H and W, as 21x45x80; otherwise the known model's");
  command->add_option("--known", options->known,
                      "take grid, steps and schedule of a known model (see `scope methods`), or none; otherwise the one "
                      "of the model's name, or the first whose layers, heads and RoPE config.json has");
  command->add_option("--steps", options->steps, "sampling steps of the run; otherwise the known model's, or 50")
      ->check(whole(1, kMostSamplerSteps));
  command->add_option("--layers", options->layers, "run the first so many layers alone; the JSON says so")
      ->check(whole(1, kMostLayers));
  command->add_option("--repeat", options->repeat, "dense and warm passes of each variant, of which the median counts")
      ->check(whole(1, kMostRepeats))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "names weights and inputs")
      ->check(whole(0, kMostSeed))
      ->capture_default_str();
  command
      ->add_option("--compute", options->compute,
                   "f32 or bf16, for linear layers and attention; f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
  CLI::Option* json = command->add_option("--json", options->json, "write the figures here");
  command
      ->add_option("--commit", options->commit,
                   "recorded in the JSON; by default the commit that this command was built from")
      ->needs(json);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
