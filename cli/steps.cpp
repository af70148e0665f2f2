// scope steps: how long a model takes on this machine, by passes with random weights, before anyone has the real ones.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
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
#include "step_times.h"
#include "terminal.h"
#include "video/footprint.h"
#include "video/self_attention.h"
#include "video_run.h"

namespace scope::cli {

namespace {

constexpr int64_t kTextTokens = 512, kImageTokens = 257;  // as diffusers' pipelines for Wan encode a prompt and an image

struct StepsOptions {
  std::string model, variants = "dense,scope:target_density=0.2,scope:target_density=0.1,fast", grid, known, compute,
                     linear = "plain", json, commit = scope::built_from();
  int64_t steps = 0, layers = 0;  // 0: the model's
  int64_t repeat = 2;
  uint64_t seed = 0;
  MachineFlags machine;
};

class StepsRun {
 public:
  explicit StepsRun(const StepsOptions& options) : options_(options), context_(options.machine.context()) {
    found_.model = options.model;
    found_.commit = options.commit;
    found_.seed = options.seed;
    found_.repeat = options.repeat;
    found_.folder = find_model_folder(options.model, true);
    if (!io::exists(found_.folder + "/config.json") && io::exists(found_.folder + "/model_index.json"))
      found_.folder += "/transformer";
    const video::Notes notes = video::read_notes(found_.folder);
    found_.config = video::read_config(found_.folder, [](std::string_view json) {
      video::parse_model_config(json);
      return std::string(json);
    });
    config_ = video::parse_model_config(found_.config);
    found_.model_layers = config_.layers;
    const std::string name = std::filesystem::path(found_.folder).filename().string();
    const bool is_row = std::ranges::any_of(models_table(), [&](const Model& row) { return row.name == name; });
    const Model* known = find_known(options.known.empty() && is_row ? name : options.known, config_);
    if (known != nullptr) found_.known = known->name;
    if (options.layers > 0) {
      require(options.layers <= found_.model_layers, Status::invalid_argument, "--layers: got {}, this model has {}",
              options.layers, found_.model_layers);
      found_.config = video::first_layers(found_.config, options.layers);
      config_ = video::parse_model_config(found_.config);
    }
    found_.layers = config_.layers;
    found_.text_tokens = config_.text_tokens > 0 ? config_.text_tokens : kTextTokens;
    const bool noted = notes.grid[0] > 0;
    require(noted || known != nullptr || !options.grid.empty(), Status::invalid_argument,
            "--grid: this model needs one, as TxHxW in tokens, or --known NAME for that of a known model");
    found_.grid = !options.grid.empty() ? parse_grid(options.grid)
                  : noted               ? notes.grid
                                        : std::array{known->grid[0], known->grid[1], known->grid[2]};
    for (const int64_t n : found_.grid) {
      require(n <= config_.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
              io::join(found_.grid, "x"), config_.rope_max);
    }
    found_.steps = options.steps > 0 ? options.steps : known != nullptr ? known->steps : noted ? notes.steps : 50;
    found_.branches = config_.embeds_guidance ? 1 : 2;
    found_.compute = checked_compute(context_, options.compute);
    found_.linear_mode = options.linear;
    make_variants();
  }

  // What the command reads.
  void declare(Outputs& outputs) const {
    outputs.reads_model(found_.folder);
    for (const StepsVariant& variant : found_.variants) outputs.reads(variant.settings);
  }

  void run() {
    engine_ = make_engine(context_, found_.compute, found_.linear_mode);
    check_memory();
    used_before_ = engine_->memory().used;
    model_ = video::make_model(found_.config, video::drawn_tensors(options_.seed), *engine_);
    found_.not_quantised = engine_->not_quantised;
    make_inputs();
    print_title(found_, context_);
    const int64_t repeat = options_.repeat, sparse = std::ssize(found_.variants) - 1;
    int64_t passes = 1 + sparse * (1 + repeat);
    for (const StepsVariant& variant : found_.variants) passes += has_own_dense(found_, variant) ? repeat : 0;
    progress_ = std::make_unique<Progress>("steps", passes * config_.layers);
    for (const StepsVariant& variant : found_.variants) {
      start_pass(variant);
      if (found_.cases.empty()) warm_up();
      StepsCase made = measure(variant);
      made.output = check_output();
      found_.cases.push_back(made);
      print_case(found_, made);
    }
    progress_.reset();
    pass_.reset();
    time_algorithms();
    print_linear(found_);
  }

  nlohmann::ordered_json json() const { return to_json(found_, context_); }

 private:
  bool runs_sparse(const Settings& settings, int64_t step) const {
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      if (schedule(settings, {layer, step, found_.steps}) == Reason::sparse) return true;
    }
    return false;
  }

  // Dense first, whether it is asked for or not: all others are held against it, and their dense steps are its.
  void make_variants() {
    std::vector<std::string> names = split_methods(options_.variants);
    std::erase(names, "dense");
    names.insert(names.begin(), "dense");
    for (const std::string& name : names) {
      StepsVariant variant{.name = name, .settings = parse_method(name, found_.known)};
      const Settings& settings = variant.settings;
      check_effects(name, found_.known, {}, settings, {.device = options_.machine.on_device()});
      require(settings.density_steps.empty() && settings.reuse_interval == 1, Status::unsupported,
              "--variants: {} does not do the same in every sparse step, and one pass stands for all of them here; "
              "density_steps must be empty and reuse_interval 1",
              name);
      for (int64_t step = 0; step < found_.steps; ++step) {
        if (runs_sparse(settings, step)) {
          if (variant.sparse++ == 0) variant.first_sparse = step;
        } else if (clusters_in_prefix(settings, schedule(settings, {config_.layers - 1, step, found_.steps}))) {
          ++variant.clustering;
        } else {
          ++variant.dense;
        }
      }
      require(settings.dense || variant.sparse > 0, Status::invalid_argument,
              "--variants: {} is dense in all of {} steps and {} layers, as dense is", name, found_.steps, config_.layers);
      require(name == "dense" || !settings.dense, Status::invalid_argument, "--variants: got {}, and dense is there once",
              name);
      found_.variants.push_back(variant);
    }
  }

  void check_memory() const {
    int64_t most = 0;
    for (const StepsVariant& variant : found_.variants) {
      most = std::max(most, video::SelfAttention::bytes(*engine_, config_, variant.settings, found_.grid, found_.branches));
    }
    const int64_t model = video::model_bytes(found_.config, *engine_, found_.grid, false), free = engine_->memory().free;
    require(model + most <= free, Status::out_of_memory,
            "memory: {} at {} needs {}, {} of it for weights and what goes through them, and {} are free; --layers and "
            "--grid make it smaller",
            options_.model, io::join(found_.grid, "x"), gigabytes(model + most), gigabytes(model), gigabytes(free));
  }

  void make_inputs() {
    const auto size = video::latent_size(config_, found_.grid);
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
    pass_ = model_->start(found_.grid, morton);
    const auto noise = [&](int64_t tokens, int64_t columns) { return video::make_noise(options_.seed, tokens * columns); };
    video::Prompt prompt{noise(found_.text_tokens, config_.text_dim), {}, noise(1, config_.pooled_dim), 6};
    if (config_.image_dim > 0) {
      prompt.image = noise(config_.image_tokens > 0 ? config_.image_tokens : kImageTokens, config_.image_dim);
    }
    pass_->add_prompt(prompt);
    pass_->set_timesteps(video::noise_timesteps(video::Sampler::euler, found_.steps, video::Notes{}.shift));
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
      for (const StepsVariant& variant : found_.variants) {
        if (layer > 0) break;
        Settings settings = variant.settings;
        settings.dense_layers = 0;
        video::SelfAttention attention(*engine_, one_layer, settings, found_.grid, 1);
        for (int i = 0; i < (settings.dense ? 1 : 2); ++i) {
          attention.run({0, variant.first_sparse, found_.steps}, 0, q, k, v, out, text);
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
      attention.run({layer, step, found_.steps}, 0, q, k, v, out, text);
      if (context_.host()) take_reports();
    });
    take_reports();  // of a device
    time.total = now_seconds() - start;
    engine_->time_linear(false);
    if (sparse > 0) time.density /= static_cast<double>(sparse);
    const video::LinearTimes linears = engine_->take_linear_times();
    for (const auto& item : linears) time.linear += item.second.seconds;
    if (found_.cases.empty()) found_.linears = linears;  // of a dense pass
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
    if (has_own_dense(found_, variant)) {
      Settings settings = variant.settings;
      settings.warm_prefix = false;  // K-means is added where the schedule has it
      video::SelfAttention attention(*engine_, config_, settings, found_.grid, found_.branches);
      made.dense = median_of(attention, [](int64_t) { return 0; });
    } else {
      made.dense = found_.cases[0].dense;
    }
    if (!variant.settings.dense) {
      video::SelfAttention attention(*engine_, config_, variant.settings, found_.grid, found_.branches);
      const int64_t first = variant.first_sparse, last = first + variant.sparse - 1;
      made.first = time_pass(attention, first, variant.name);
      made.warm = median_of(attention, [&](int64_t i) { return std::min(first + 1 + i, last); });
    }
    made.run = run_seconds(found_, made);
    return made;
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
    for (const auto& [shape, time] : found_.linears) {
      const std::vector<double> seconds = engine_->time_algorithms(shape);
      if (!seconds.empty()) found_.algorithms[shape] = seconds;
    }
  }

  static float* floats(const video::Buffer& memory) { return static_cast<float*>(memory.get()); }

  const StepsOptions& options_;
  const Context context_;
  StepTimes found_;
  video::ModelConfig config_;
  std::unique_ptr<video::Engine> engine_;
  std::unique_ptr<video::Model> model_;
  std::unique_ptr<video::Pass> pass_;
  bool morton_ = false;
  video::Buffer latent_, condition_, velocity_;
  int64_t numbers_ = 0;      // of a latent
  int64_t used_before_ = 0;  // of the engine's memory
  std::unique_ptr<Progress> progress_;
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
  command
      ->add_option(
          "--linear", options->linear,
          "plain, fp8 or fp8-fast: what linear layers of the blocks (q, k, v, output, feed-forward) multiply. fp8 is "
          "e4m3 with a scale for each output channel and each token, on sm_90; its sums are f32, those of fp8-fast "
          "have about 13 bits. Embeddings, modulation and the last projection stay bf16, and layers whose sizes "
          "are no multiples of 16. For timing: scope generate does not take it")
      ->capture_default_str()
      ->check(CLI::IsMember({"plain", "fp8", "fp8-fast"}));
  CLI::Option* json = command->add_option("--json", options->json, "write the figures here");
  command
      ->add_option("--commit", options->commit,
                   "recorded in the JSON; by default the commit that this command was built from")
      ->needs(json);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
