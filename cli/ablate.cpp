// scope ablate: whole videos by variants of a method against the dense ones of the same seeds, at matched density.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ablation.h"
#include "bounds.h"
#include "commands.h"
#include "core/built_from.h"
#include "json.h"
#include "machine.h"
#include "measure/video_quality.h"
#include "method.h"
#include "methods/methods.h"
#include "outputs.h"
#include "parse.h"
#include "statistics.h"
#include "target_notes.h"
#include "terminal.h"
#include "video/media.h"
#include "video_run.h"

namespace scope::cli {

namespace ablation {

namespace {

namespace fs = std::filesystem;

struct AblateOptions : VideoInputs {
  std::string model = "tiny-wan", variants, suite, grid, clips, images, compute, profile, resume, output, csv, plot,
              commit = scope::built_from();
  PointFlags at{.set = {}, .density = "0.2", .rho = ""};
  int64_t seeds = 8, first_seed = 0, steps = 0;    // 0: the model's
  double shift = 0, guidance = 0, guidance_2 = 0;  // 0: the model's
  bool no_control = false;
  Match match = Match::call;
  std::string choose;
  MachineFlags machine;
};

constexpr int64_t kChoosingSeed = int64_t{1} << 32;  // noise of the first choosing video, which no report video has
constexpr size_t kChoosingVideos = 2;

// The ablations of the paper, which meet a density by the mean of the heads and let these differ, as the rows of SCOPE do,
// the methods side by side, and what may stand in the place of a dense prefix.
const Table kPaper[] = {
    {"Key partitions",
     "scope-paper,scope-paper:partition=even:1,scope-paper:partition=even:2,scope-paper:partition=random:3,"
     "scope-paper:partition=even:4,scope-paper:partition=even:8",
     "0.1,0.2"},
    {"Rules", "scope-paper,scope-paper:rule=hybrid,scope-paper:rule=top_p", "0.1,0.2"},
    {"Where a density is met", "scope-paper:target_scope=head,scope-paper,scope:target_scope=head,scope",
     "0.05,0.1,0.2,0.4"},
    {"Proxy and tail",
     "scope,scope-paper,scope-exact,scope:tail=first_order,scope-exact:tail=first_order,scope:tail=mean,"
     "scope-exact:tail=mean",
     "0.1,0.2"},
    {"Methods", "scope,scope-paper,scope-exact,scope-mean,svg2,svg2:first_sample=0.1,svg2-ear,svoo,sparge,sol",
     "0.05,0.1,0.2,0.3"},
    {"Schedules", "scope-paper,scope,scope-mean,scope-mean:dense_steps=0+dense_layers=0,fast,quality", "0.2"},
};

std::string duration(double seconds) {
  return seconds < 120    ? fmt::format("{:.0f} s", seconds)
         : seconds < 7200 ? fmt::format("{:.0f} min", seconds / 60)
                          : fmt::format("{:.1f} h", seconds / 3600);
}

class Ablation {
 public:
  explicit Ablation(const AblateOptions& options)
      : options_(options),
        folder_(find_model_folder(options.model)),
        pipeline_(video::read_folder(folder_)),
        notes_(video::read_notes(pipeline_.transformers[0])),
        config_(video::read_model_config(pipeline_.transformers[0])),
        context_(options.machine.context()) {
    require(options.first_seed <= std::numeric_limits<int64_t>::max() - options.seeds, Status::invalid_argument,
            "--first-seed: got {}, and {} seeds from there on go past 2^63 - 1", options.first_seed, options.seeds);
    require(two_experts() || options.guidance_2 == 0, Status::invalid_argument,
            "--guidance-2: {} has one transformer, and --guidance is its", folder_);
    found_.model = options.model;
    found_.at = options.at;
    found_.match = options.match;
    require(options.match == Match::call || !options.at.at_rho(), Status::invalid_argument,
            "--match: --rho says what each variant runs at; leave one of the two out");
    require(options.match == Match::run || options.choose.empty(), Status::invalid_argument,
            "--choose: the threshold of --match run is found on these clips; nothing else reads them");
    found_.seeds = options.seeds;
    found_.rgb = notes_.rgb;
    found_.steps = options.steps == 0 ? notes_.steps : options.steps;
    takes_f32_ = finest_dtype(context_) == DType::f32;
    found_.compute = checked_compute(context_, options.compute);
    require(notes_.grid[0] > 0 || !options.grid.empty(), Status::invalid_argument,
            "--grid: this model needs one, as TxHxW in tokens");
    found_.grid = options.grid.empty() ? notes_.grid : parse_grid(options.grid);
    for (const int64_t n : found_.grid) {
      require(n <= config_.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
              io::join(found_.grid, "x"), config_.rope_max);
    }
    found_.given_frames = notes_.rgb || config_.condition_channels > 0 || config_.needs_first_frame ? 1 : 0;
    check_frames();
    size_ = video::latent_size(config_, found_.grid);
    inputs_ = options;
    const std::string held_out = pipeline_.transformers[0] + "/held_out.safetensors";
    if (inputs_.condition.empty() && io::exists(held_out)) inputs_.condition = held_out;
    if (notes_.rgb) {
      require(options.guidance == 0, Status::invalid_argument, "--guidance: this model was trained without");
    } else {
      check_latents();
    }
    make_rows();
  }

  // What the model and the variants read.
  void declare(Outputs& outputs) const {
    for (const std::string& transformer : pipeline_.transformers) outputs.reads_model(transformer);
    outputs.reads("--model", folder_ + "/scheduler/scheduler_config.json");
    for (const Row& row : found_.rows) outputs.reads(row.settings);
  }

  // `done` is called after each seed.
  void run(const std::function<void()>& done) {
    find_clips();
    for (int64_t seed = 0; seed < std::min(options_.seeds, std::ssize(clips_)); ++seed) {  // refused before any work
      make_request(seed, parse_method("dense", ""));
    }
    for (size_t i = 0; i < choosing_.size(); ++i) make_choosing_request(i, parse_method("dense", ""));
    found_.clips = std::min(options_.seeds, std::ssize(clips_));
    if (!options_.resume.empty()) take_seeds(found_, options_.resume, about(), context_);
    if (found_.finished()) return;
    const auto engine = make_engine(context_, found_.compute);
    Transformers model(pipeline_, *engine);
    std::unique_ptr<video::Engine> other_engine;
    std::optional<Transformers> other_model;
    if (!options_.no_control && takes_f32_) {
      other_engine = make_engine(context_, other_compute());
      other_model.emplace(pipeline_, *other_engine);
    }
    video::Request request = make_request(0, parse_method("dense", ""));
    model.keep(request);
    if (other_model) other_model->keep(request);
    const int64_t passes = count_passes(request);
    // Libraries and kernels load with their first use.
    request.steps = 1;
    video::generate(model.opener(), request);
    if (options_.match == Match::run) find_thresholds(model, passes);

    const int64_t begin = std::ssize(found_.dense), runs = (options_.seeds - begin) * (1 + std::ssize(found_.rows));
    progress_ = std::make_unique<Progress>("ablate", runs * passes * config_.layers);
    for (int64_t seed = begin; seed < options_.seeds; ++seed) {  // counted from the first
      const Video dense = make_video(model, seed, "dense", parse_method("dense", ""));
      if (seed == begin && runs > 1) {
        tell("{}{} videos; the first dense one took {:.1f} s, which makes {} at its pace\n", over_progress(), runs,
             dense.sample.seconds, duration(dense.sample.seconds * static_cast<double>(runs)));
      }
      found_.dense.push_back(compare(dense, dense));
      for (Row& row : found_.rows) {
        if (row.left_out) continue;
        const Video clip = make_video(row.control && takes_f32_ ? *other_model : model, seed, row.variant, row.settings);
        row.results.push_back(compare(dense, clip));
        if (seed == 0 && !row.control) check_first(row, clip.sample);
      }
      std::erase_if(found_.rows, [](const Row& row) { return row.left_out; });
      done();
      if (isatty(STDERR_FILENO) == 0 && options_.seeds > 1) {  // where there is no progress bar
        tell("seed {} of {} done\n", seed + 1, options_.seeds);
      }
    }
    progress_.reset();
  }

  const Findings& found() const { return found_; }
  const Context& context() const { return context_; }
  nlohmann::ordered_json json() const { return to_json(found_, about(), context_); }

 private:
  struct Video {
    video::Sample sample;
    std::vector<io::Image> frames;  // of a model that gives them
  };

  bool two_experts() const { return pipeline_.transformers.size() == 2; }

  void check_frames() const {
    require(found_.grid[0] > found_.given_frames, Status::shape,
            "--grid: got {}, one frame, which is given to the model; expected at least two", io::join(found_.grid, "x"));
  }

  void check_latents() const {
    require(
        !inputs_.condition.empty(), Status::invalid_argument,
        "--condition: this model needs a .safetensors file with prompt_embeds and what else scope generate --help lists");
    require(options_.images.empty(), Status::invalid_argument,
            "--image: this model's latents are a VAE's; put the encoded image into --condition");
    require(size_[1] >= kSsimWindow && size_[2] >= kSsimWindow, Status::shape,
            "--grid: got {}, latents of {} x {} in a frame, and SSIM's window is {} x {}", io::join(found_.grid, "x"),
            size_[1], size_[2], kSsimWindow, kSsimWindow);
  }

  std::string other_compute() const { return found_.compute == "bf16" ? "f32" : "bf16"; }

  Plan make_plan(const Settings& settings) const {
    return {context_, settings,
            video::attention_shape(config_, found_.grid, found_.compute == "bf16" ? DType::bf16 : DType::f32)};
  }

  // Every variant and point of the tables once; what cannot run is refused or, in a suite, said.
  void make_rows() {
    if (options_.suite.empty()) {
      found_.tables = {{"Variants", options_.variants.empty() ? "scope" : options_.variants,
                        options_.at.at_rho() ? options_.at.rho : options_.at.density}};
    } else {
      found_.tables.assign(std::begin(kPaper), std::end(kPaper));
    }
    if (!options_.no_control) {
      Row row{.variant = takes_f32_ ? "dense in " + other_compute() : "dense:kernel=portable",
              .settings = parse_method(takes_f32_ ? "dense" : "dense:kernel=portable", ""),
              .control = true,
              .threshold = {},
              .results = {},
              .notes = {}};
      found_.rows.push_back(std::move(row));
    }
    bool profiled = false;
    for (const Table& table : found_.tables) {
      for (const std::string& variant : split_methods(table.variants)) {
        for (const double point : found_.points(table)) {
          if (found_.find_row(variant, point) != nullptr) continue;
          Settings settings = parse_method(variant, "", options_.at.set);
          require(!settings.dense, Status::invalid_argument,
                  "--variants: dense is what the others are compared with, and runs anyway");
          const bool own = options_.match == Match::own ||
                           ((!settings.density_steps.empty() || settings.target_density > 0) && !options_.at.at_rho());
          if (!own && options_.match == Match::run) control_of(settings, variant);  // refuses
          if (!own && options_.match == Match::call) settings = options_.at.at(settings, point, variant);
          if (settings.method->profiled && !options_.profile.empty()) {
            set_setting(settings, "profile", options_.profile);
            profiled = true;
          }
          check_effects(variant, "", {}, settings, {.device = options_.machine.on_device()});
          try {
            make_plan(settings);  // refuses what cannot run
            found_.rows.push_back({variant, own ? std::nan("") : point, settings, false, false, {}, {}, {}});
          } catch (const Error& error) {
            leave_out(variant, error);
          }
        }
      }
    }
    if (!options_.profile.empty() && !profiled) refuse_profile(found_.tables.front().variants);
  }

  void leave_out(const std::string& variant, const Error& error) {
    if (options_.suite.empty() || error.status() != Status::unsupported) throw error;
    const std::pair<std::string, std::string> entry{variant, error.what()};
    if (std::find(found_.skipped.begin(), found_.skipped.end(), entry) == found_.skipped.end())
      found_.skipped.push_back(entry);
  }

  // Seed s takes clip s modulo how many there are: samples of the condition, each with each image where some are given.
  void find_clips() {
    const auto files = [](const char* flag, const std::string& list) {
      std::vector<std::string> names = split(list, ',');
      for (const std::string& name : names) {
        require(!name.empty(), Status::invalid_argument, "{}: got \"{}\", expected names of files separated by commas", flag,
                list);
      }
      return names;
    };
    const bool given = !options_.images.empty();
    const std::vector<std::string> images = given ? files("--image", options_.images) : std::vector<std::string>{""};
    int64_t samples = 1;
    if (notes_.prompts || options_.images.empty()) {
      const std::string path =
          inputs_.condition.empty() ? pipeline_.transformers[0] + "/examples.safetensors" : inputs_.condition;
      const io::SafeTensors file = io::read_safetensors(path);
      const char* name = notes_.prompts ? "prompt_embeds" : "truth";
      const auto found = file.tensors.find(name);
      require(found != file.tensors.end(), Status::format, "{}: there is no tensor \"{}\"", path, name);
      const auto& shape = found->second.shape;
      samples = notes_.prompts && shape.size() < 3 ? 1 : shape[0];
      require(samples > 0, Status::shape, "{}: {} holds no samples", path, name);
    }
    for (const int64_t sample : parse_set("--clips", options_.clips, samples)) {
      for (const std::string& image : images) clips_.push_back({image, inputs_.condition, sample});
    }
    if (options_.match != Match::run) return;
    if (given) {
      require(!options_.choose.empty(), Status::invalid_argument,
              "--choose: with --image, name the PNG files of other first frames, on which thresholds are found");
      for (const std::string& image : files("--choose", options_.choose)) {
        choosing_.push_back({image, inputs_.condition, clips_[0].example});
      }
    } else {
      for (const int64_t sample : parse_set("--choose", options_.choose, samples)) {
        choosing_.push_back({"", inputs_.condition, sample});
      }
    }
    choosing_.resize(std::min(choosing_.size(), kChoosingVideos));
    while (choosing_.size() < kChoosingVideos) choosing_.push_back(choosing_[0]);  // with other noise
  }
  std::vector<std::string> clip_names() const {
    std::vector<std::string> names;
    for (const VideoInputs& clip : clips_) {
      names.push_back(clip.image.empty() ? std::to_string(clip.example)
                                         : fmt::format("{} of {}", fs::path(clip.image).filename().string(), clip.example));
    }
    return names;
  }

  // One threshold for each row, on the choosing videos; a row starts from the one before of its variant.
  void find_thresholds(const Transformers& model, int64_t passes) {
    const auto searched = [](const Row& row) { return !row.control && !std::isnan(row.point) && !row.threshold; };
    const auto rows = std::count_if(found_.rows.begin(), found_.rows.end(), searched);
    if (rows == 0) return;
    tell("{} thresholds to find, each by 2 to 12 tries on {} videos\n", rows, choosing_.size());
    const Row* before = nullptr;
    for (Row& row : found_.rows) {
      if (!searched(row)) continue;
      const Settings own = row.settings;
      int64_t tries = 0;
      const auto density = [&](const Settings& settings) {
        Progress progress(fmt::format("{} at {}, try {}", row.variant, row.point, ++tries),
                          passes * config_.layers * std::ssize(choosing_));
        std::vector<double> densities;
        for (size_t i = 0; i < choosing_.size(); ++i) {
          video::Request request = make_choosing_request(i, settings);
          request.done = [&](const video::CallReport&) { progress.step(); };
          densities.push_back(mean_density(video::generate(model.opener(), request)));
        }
        return mean(densities);
      };
      const double start = before != nullptr && before->variant == row.variant ? before->threshold->value
                           : control_of(own, row.variant) == "rho"             ? own.rho
                                                                               : own.density;
      row.threshold = find_threshold(own, row.variant, row.point, start, density);
      row.settings = row.threshold->apply(own);
      tell("{} at {}: {} {}, density {:.4f} after {} tries\n", row.variant, row.point, row.threshold->control,
           row.threshold->value, row.threshold->density, row.threshold->runs);
      before = &row;
    }
  }

  video::Request make_choosing_request(size_t i, const Settings& settings) {
    return make_request(choosing_[i], kChoosingSeed + static_cast<int64_t>(i), settings);
  }
  video::Request make_request(int64_t seed, const Settings& settings) {
    return make_request(clips_[static_cast<size_t>(seed) % clips_.size()], options_.first_seed + seed, settings);
  }

  video::Request make_request(const VideoInputs& clip, int64_t noise, const Settings& settings) {
    video::Request request;
    request.grid = found_.grid;
    request.steps = found_.steps;
    request.sampler = sampler();
    request.shift = shift();
    request.boundary = pipeline_.boundary;
    request.settings = settings;
    if (notes_.rgb) {
      read_rgb_inputs(clip, pipeline_.transformers[0], notes_, config_, size_, request);
    } else {
      read_latent_inputs(clip, options_.guidance, options_.guidance_2, pipeline_, config_, size_, request);
      guidance_ = request.guidance;
      guidance_2_ = request.guidance_2;
      if (!request.first_frame.empty()) found_.given_frames = 1;
      check_frames();
    }
    request.noise =
        video::make_noise(static_cast<uint64_t>(noise), config_.latent_channels * size_[0] * size_[1] * size_[2]);
    return request;
  }

  Video make_video(const Transformers& model, int64_t seed, const std::string& name, const Settings& settings) {
    video::Request request = make_request(seed, settings);
    const std::string note = fmt::format("seed {} of {}, {}", seed + 1, options_.seeds, name);
    request.done = [&](const video::CallReport&) { progress_->step(note); };
    Video out{video::generate(model.opener(), request), {}};
    if (notes_.rgb) out.frames = video::to_frames(out.sample.latent, size_);
    return out;
  }

  Result compare(const Video& dense, const Video& clip) const {
    std::vector<FrameQuality> frames(static_cast<size_t>(size_[0]));
    const LatentScale scale(dense.sample.latent, config_.latent_channels);
    context_.exec().pool->run(std::ssize(frames), [&](int64_t i, int) {
      const auto at = static_cast<size_t>(i);
      frames[at] = notes_.rgb ? compare_frames(dense.frames[at], clip.frames[at])
                              : compare_latents(dense.sample.latent, clip.sample.latent, size_, scale, i);
    });
    const VideoQuality quality = summarise(std::move(frames), found_.given_frames);
    const auto seconds = seconds_json(clip.sample);
    Result out{.psnr = quality.mean_psnr,
               .pooled_psnr = quality.pooled_psnr,
               .ssim = quality.ssim,
               .worst_psnr = quality.frames[static_cast<size_t>(quality.worst)].psnr,
               .density = mean_density(clip.sample),
               .total = seconds["total"],
               .dense_calls = seconds["dense_prefix"],
               .attend = seconds["sparse_attention"],
               .selection = seconds["selection"],
               .rest = seconds["rest"],
               .dense_total = dense.sample.seconds};
    for (size_t i = 0; i < clip.sample.calls.size(); ++i) {
      if (clip.sample.calls[i].stats.reason != Reason::sparse) continue;
      out.same_calls_dense += dense.sample.calls[i].stats.total;
      ++out.sparse_count;
    }
    out.dense_count = std::ssize(clip.sample.calls) - out.sparse_count;
    return out;
  }

  // What the target density took; one that cannot be reached is refused or, in a suite, said.
  void check_first(Row& row, const video::Sample& sample) {
    struct Met {
      std::vector<double> densities;  // of calls
      std::vector<HeadStats> heads;
    };
    std::map<double, Met> targets;
    for (const auto& call : sample.calls) {
      if (call.stats.reason != Reason::sparse) continue;
      const double target = std::isnan(row.point) ? row.settings.target_density : row.point;
      Met& met = targets[density_at(row.settings, {call.layer, call.step, found_.steps}, target)];
      met.densities.push_back(call.stats.density);
      met.heads.insert(met.heads.end(), call.heads.begin(), call.heads.end());
    }
    require(!targets.empty(), Status::invalid_argument, "--steps: with {} of them, every call of {} is a dense one",
            found_.steps, row.variant);
    if (options_.at.at_rho() || options_.match != Match::call) return;
    try {
      const Settings settings = make_plan(row.settings).settings;
      for (const auto& [target, met] : targets) {
        const auto notes = target_notes(settings, mean(met.densities), met.heads, target, row.variant);
        row.notes.insert(row.notes.end(), notes.begin(), notes.end());
      }
    } catch (const Error& error) {
      leave_out(row.variant, error);
      row.left_out = true;
    }
  }

  // What the videos are of, the same for all that go into one result.
  nlohmann::ordered_json about() const {
    nlohmann::ordered_json out{{"version", SCOPE_VERSION},
                               {"commit", options_.commit},
                               {"suite", options_.suite},
                               {"model", fs::path(folder_).filename().string()},
                               {"grid", found_.grid},
                               {"steps", found_.steps},
                               {"first_seed", options_.first_seed},
                               {"clips", clips_.size()},
                               {"clip_names", clip_names()},
                               {"condition", fs::path(inputs_.condition).filename().string()},
                               {"match", found_.match_name()},
                               {"shift", shift()},
                               {"compute", found_.compute}};
    if (!notes_.rgb) out.update({{"compared", "latents"}, {"guidance", guidance_}});
    if (sampler() == video::Sampler::unipc) out["sampler"] = "unipc";
    if (two_experts()) out.update({{"guidance_2", guidance_2_}, {"boundary", pipeline_.boundary}});
    return out;
  }
  double shift() const { return options_.shift == 0 ? schedule_of(pipeline_, notes_).shift : options_.shift; }
  video::Sampler sampler() const { return schedule_of(pipeline_, notes_).sampler; }

  const AblateOptions& options_;
  std::string folder_;
  video::Folder pipeline_;  // its transformers: of a folder that is one, itself
  video::Notes notes_;
  video::ModelConfig config_;
  Context context_;
  bool takes_f32_ = true;  // so that the control is the other type, and else another kernel
  std::array<int64_t, 3> size_ = {};
  double guidance_ = 1, guidance_2_ = 1;
  VideoInputs inputs_;
  std::vector<VideoInputs> clips_, choosing_;
  Findings found_;
  std::unique_ptr<Progress> progress_;
};

void run(const AblateOptions& options) {
  Outputs outputs;
  outputs.reads_model(find_model_folder(options.model));
  outputs.reads("--condition", options.condition);
  outputs.reads("--resume", options.resume);
  if (!options.images.empty()) {
    for (const std::string& image : split(options.images, ',')) outputs.reads("--image", image);
    if (!options.choose.empty()) {
      for (const std::string& image : split(options.choose, ',')) outputs.reads("--choose", image);
    }
  }
  outputs.writes("--output", options.output);
  outputs.writes("--csv", options.csv);
  outputs.writes("--plot", options.plot);
  Ablation ablation(options);
  ablation.declare(outputs);
  // A long run that is stopped leaves its finished seeds.
  ablation.run([&] {
    if (!options.output.empty() && !ablation.found().finished()) outputs.keep_unfinished(options.output, ablation.json());
  });
  if (!options.output.empty()) write_json(outputs.open(options.output), ablation.json());
  if (!options.csv.empty()) write_text(outputs.open(options.csv), csv(ablation.found()));
  if (!options.plot.empty()) write_text(outputs.open(options.plot), svg(chart(ablation.found())));
  outputs.place();
  print(ablation.found(), ablation.context());
}

}  // namespace

}  // namespace ablation

void add_ablate(CLI::App& app) {
  using ablation::Match;
  auto options = std::make_shared<ablation::AblateOptions>();
  CLI::App* command = app.add_subcommand(
      "ablate",
      "Generate the same videos densely and by variants of a method at matched density, and judge them by paired seeds.\n"
      "Seed s is noise s and clip s (modulo how many there are). A density is solved in every call, or with --match run met "
      "by\n"
      "one threshold for the run, found on other videos (--choose);\n"
      "with --rho each variant runs at that rho, and its density is what it keeps there.\n"
      "A control shows what rounding does to a video: dense again in the other type (CPU) or by the other kernel (GPU).\n"
      "A model that gives no frames is judged by its latents, and what is printed and written says so: --condition is that "
      "of\n"
      "scope generate, each of its prompts a clip. Of a pipeline's folder the scheduler says sampler and shift, and both\n"
      "experts of Wan2.2 stay in memory.\n\n"
      "  scope ablate --variants scope,scope:partition=even:8,svg2 --density 0.1,0.2 -o result.json\n"
      "  scope ablate --suite paper --backend cuda -o result.json --plot psnr.svg\n"
      "  scope ablate --variants scope,svg2 --set target_scope=head    # every head meets the density by itself\n"
      "  scope ablate --variants scope,scope:rule=top_p --rho 0.8,0.9\n"
      "  scope ablate --variants scope,scope:density_steps=0.2:0.3,1:0.1,fast    # densities of their own, beside every "
      "one\n"
      "  scope ablate --grid 21x45x80 --condition 720p.safetensors --seeds 3 --backend cuda\n"
      "  scope ablate --model Wan2.1-T2V-1.3B-Diffusers/transformer --grid 21x30x52 --condition prompts.safetensors");
  CLI::Option* variants =
      command->add_option("--variants", options->variants,
                          "rows of `scope methods`, with settings as name:setting=value+setting=value; otherwise scope");
  options->at.add(*command);
  command
      ->add_option(
          "--suite", options->suite,
          "paper: partitions, rules, target scopes, proxy and tail, methods, and schedules, each table with its densities")
      ->check(CLI::IsMember({"paper"}))
      ->excludes(variants)
      ->excludes(command->get_option("--density"))
      ->excludes(command->get_option("--rho"));
  command->add_option("--seeds", options->seeds, "how many")->check(whole(1, 10000))->capture_default_str();
  command->add_option("--first-seed", options->first_seed, "noise of the first")
      ->check(whole(0, kMostSeed))
      ->capture_default_str();
  command->add_option("--clips", options->clips, "which samples of the condition, as 0,2; otherwise all");
  command
      ->add_option("--match", options->match,
                   "how a density is met. call: solved again in every call; run: by one threshold for the whole run, as the "
                   "paper does; own: not at all, each method runs once at its own settings")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Match>{{"call", Match::call}, {"run", Match::run}, {"own", Match::own}}))
      ->default_str("call");
  command->add_option("--choose", options->choose,
                      "with --match run: clips whose first two give the thresholds, with noise of their own: samples of the "
                      "condition as --clips takes them (otherwise all), or with --image PNG files");
  command->add_option("--steps", options->steps, "sampling steps; otherwise the model's, or 20")
      ->check(whole(1, kMostSamplerSteps));
  command->add_option("--model", options->model, "model folder, or the name of a bundled one")->capture_default_str();
  command->add_option("--grid", options->grid, "tokens along T, H and W, as 13x20x32; the model's default");
  command->add_option("--condition", options->condition,
                      "prompt embeddings and first frames; otherwise the model's held_out.safetensors or examples");
  command->add_option("--image", options->images, "first frames as PNG, a.png,b.png; otherwise the condition's");
  command->add_option("--shift", options->shift, "of the noise levels; the scheduler's or the model's own, or 5")
      ->check(above(0, 1000));
  command->add_option("--guidance", options->guidance, "classifier-free guidance; 5 where there is a negative prompt")
      ->check(above(0, 1000));
  command->add_option("--guidance-2", options->guidance_2, "of the second expert of Wan2.2; otherwise that of the first")
      ->check(above(0, 1000));
  command->add_option("--compute", options->compute, "f32 or bf16; f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--profile", options->profile,
                      "the setting `profile` for svoo: a CSV of `scope generate --profile-out`");
  command->add_flag("--no-control", options->no_control, "leave the control out");
  CLI::Option* output = command->add_option(
      "-o,--output", options->output,
      "write every figure of every seed as JSON; an infinite PSNR is null. What is done before the last seed is kept in a "
      "file beside it, which says \"finished\": false");
  command->add_option(
      "--resume", options->resume,
      "a result of the same videos and variants that is not finished, or has fewer seeds: go on after its last");
  command->add_option("--csv", options->csv, "write a line for each variant, density and seed");
  command->add_option("--plot", options->plot, "write PSNR by density as SVG");
  command
      ->add_option("--commit", options->commit,
                   "recorded in the JSON; by default the commit that this command was built from")
      ->needs(output);
  options->machine.add(*command);
  command->callback([options] { ablation::run(*options); });
}

}  // namespace scope::cli
