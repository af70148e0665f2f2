// Generates an ablation's videos, and judges each by the dense one of its seed.
#include "ablation_run.h"

#include <fmt/format.h>
#include <unistd.h>

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

#include "ablation_clips.h"
#include "ablation_rows.h"
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

namespace scope::cli::ablation {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kChoosingSeed = int64_t{1} << 32;  // noise of the first choosing video, which no report video has

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
    make_rows(options, config_, context_, found_);
  }

  // What the model and the variants read.
  void declare(Outputs& outputs) const {
    for (const std::string& transformer : pipeline_.transformers) outputs.reads_model(transformer);
    outputs.reads("--model", folder_ + "/scheduler/scheduler_config.json");
    for (const Row& row : found_.rows) outputs.reads(row.settings);
  }

  // `done` is called after each seed.
  void run(const std::function<void()>& done) {
    clips_ = find_clips(options_, inputs_.condition, pipeline_.transformers[0], notes_.prompts);
    for (int64_t seed = 0; seed < std::min(options_.seeds, std::ssize(clips_.shown)); ++seed) {  // refused before any work
      make_request(seed, parse_method("dense", ""));
    }
    for (size_t i = 0; i < clips_.choosing.size(); ++i) make_choosing_request(i, parse_method("dense", ""));
    found_.clips = std::min(options_.seeds, std::ssize(clips_.shown));
    if (!options_.resume.empty()) take_seeds(found_, options_.resume, about(), context_);
    if (found_.finished()) return;
    const auto engine = make_engine(context_, found_.compute);
    Transformers model(pipeline_, *engine);
    std::unique_ptr<video::Engine> other_engine;
    std::optional<Transformers> other_model;
    if (!options_.no_control && takes_f32_) {
      other_engine = make_engine(context_, other_compute(found_));
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

  // One threshold for each row, on the choosing videos; a row starts from the one before of its variant.
  void find_thresholds(const Transformers& model, int64_t passes) {
    const auto searched = [](const Row& row) { return !row.control && !std::isnan(row.point) && !row.threshold; };
    const auto rows = std::count_if(found_.rows.begin(), found_.rows.end(), searched);
    if (rows == 0) return;
    tell("{} thresholds to find, each by 2 to 12 tries on {} videos\n", rows, clips_.choosing.size());
    const Row* before = nullptr;
    for (Row& row : found_.rows) {
      if (!searched(row)) continue;
      const Settings own = row.settings;
      int64_t tries = 0;
      const auto density = [&](const Settings& settings) {
        Progress progress(fmt::format("{} at {}, try {}", row.variant, row.point, ++tries),
                          passes * config_.layers * std::ssize(clips_.choosing));
        std::vector<double> densities;
        for (size_t i = 0; i < clips_.choosing.size(); ++i) {
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
    return make_request(clips_.choosing[i], kChoosingSeed + static_cast<int64_t>(i), settings);
  }
  video::Request make_request(int64_t seed, const Settings& settings) {
    return make_request(clips_.shown[static_cast<size_t>(seed) % clips_.shown.size()], options_.first_seed + seed, settings);
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
      const Settings settings = make_plan(config_, context_, found_, row.settings).settings;
      for (const auto& [target, met] : targets) {
        const auto notes = target_notes(settings, mean(met.densities), met.heads, target, row.variant);
        row.notes.insert(row.notes.end(), notes.begin(), notes.end());
      }
    } catch (const Error& error) {
      leave_out(options_, found_, row.variant, error);
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
                               {"clips", clips_.shown.size()},
                               {"clip_names", clips_.names()},
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
  Clips clips_;
  Findings found_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace

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

}  // namespace scope::cli::ablation
