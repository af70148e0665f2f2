// scope ablate: whole videos by variants of a method against the dense ones of the same seeds, at matched density.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "common.h"
#include "measure/video_quality.h"
#include "methods/methods.h"
#include "outputs.h"
#include "plot.h"
#include "video/fields.h"
#include "video/media.h"
#include "video_run.h"

namespace scope::cli {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostResult = int64_t{64} << 20;  // bytes of a result to go on from

struct AblateOptions : VideoInputs {
  std::string model = "tiny-wan", variants, suite, grid, clips, images, compute, profile, resume, output, csv, plot, commit;
  PointFlags at{.set = {}, .density = "0.2", .rho = ""};
  int64_t seeds = 8, first_seed = 0, steps = 0;    // 0: the model's
  double shift = 0, guidance = 0, guidance_2 = 0;  // 0: the model's
  bool no_control = false;
  MachineFlags machine;
};

// One table: its variants at each of its densities (or values of rho), judged against the first.
struct Table {
  std::string title, variants, points;
};

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

// One video of a variant beside the dense one of its seed. Seconds.
struct Result {
  double psnr = 0, pooled_psnr = 0, ssim = 0, worst_psnr = 0, density = 1;
  double total = 0, dense_calls = 0, attend = 0, selection = 0, rest = 0;
  double same_calls_dense = 0;  // the calls that ran sparse here, in the dense run
  double dense_total = 0;
  int64_t dense_count = 0, sparse_count = 0;  // calls

  double sparse_calls() const { return attend + selection; }
};

// A variant at a density, or at a rho; results by seed.
struct Row {
  std::string variant;
  double point = 1;  // NaN: it has densities of its own, and stands beside every point
  Settings settings;
  bool control = false, left_out = false;
  std::vector<Result> results;
  std::vector<std::string> notes;
};

template <class F>
std::vector<double> each(const std::vector<Result>& results, F value) {
  std::vector<double> out;
  out.reserve(results.size());
  for (const Result& result : results) out.push_back(std::invoke(value, result));
  return out;
}

// Of the seeds, as a sample: n - 1. NaN for one seed.
double deviation(const std::vector<double>& x) {
  const double centre = mean(x);
  double sum = 0;
  for (const double value : x) sum += (value - centre) * (value - centre);
  return std::sqrt(sum / static_cast<double>(x.size() - 1));
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

// How many times faster than dense, seed by seed: self-attention of the calls that ran sparse, and the whole run.
double call_speedup(const Row& row) {
  return median(each(row.results, [](const Result& r) { return r.same_calls_dense / r.sparse_calls(); }));
}
double run_speedup(const Row& row) {
  return median(each(row.results, [](const Result& r) { return r.dense_total / r.total; }));
}

struct Paired {
  double difference = 0, deviation = 0;  // dB
  int64_t wins = 0;
};
Paired paired(const Row& row, const Row& against) {
  std::vector<double> differences;
  Paired out;
  for (size_t i = 0; i < row.results.size(); ++i) {
    differences.push_back(row.results[i].psnr - against.results[i].psnr);
    out.wins += differences.back() > 0 ? 1 : 0;
  }
  out.difference = mean(differences);
  out.deviation = deviation(differences);
  return out;
}

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
    steps_ = options.steps == 0 ? notes_.steps : options.steps;
    takes_f32_ = finest_dtype(context_) == DType::f32;
    compute_ = checked_compute(context_, options.compute);
    require(notes_.grid[0] > 0 || !options.grid.empty(), Status::invalid_argument,
            "--grid: this model needs one, as TxHxW in tokens");
    grid_ = options.grid.empty() ? notes_.grid : parse_grid(options.grid);
    for (const int64_t n : grid_) {
      require(n <= config_.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
              io::join(grid_, "x"), config_.rope_max);
    }
    given_frames_ = notes_.rgb || config_.condition_channels > 0 || config_.needs_first_frame ? 1 : 0;
    check_frames();
    size_ = video::latent_size(config_, grid_);
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
    for (const Row& row : rows_) outputs.reads(row.settings);
  }

  // `done` is called after each seed.
  void run(const std::function<void()>& done) {
    find_clips();
    for (int64_t seed = 0; seed < std::min(options_.seeds, std::ssize(clips_)); ++seed) {  // refused before any work
      make_request(seed, parse_method("dense", ""));
    }
    if (!options_.resume.empty()) take_seeds();
    if (finished()) return;
    const auto engine = make_engine(context_, compute_);
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

    const int64_t begin = std::ssize(dense_), runs = (options_.seeds - begin) * (1 + std::ssize(rows_));
    progress_ = std::make_unique<Progress>("ablate", runs * passes * config_.layers);
    for (int64_t seed = begin; seed < options_.seeds; ++seed) {  // counted from the first
      const Video dense = make_video(model, seed, "dense", parse_method("dense", ""));
      if (seed == begin && runs > 1) {
        tell("{}{} videos; the first dense one took {:.1f} s, which makes {} at its pace\n",
             isatty(STDERR_FILENO) == 1 ? "\r\x1b[K" : "", runs, dense.sample.seconds,
             duration(dense.sample.seconds * static_cast<double>(runs)));
      }
      dense_.push_back(compare(dense, dense));
      for (Row& row : rows_) {
        if (row.left_out) continue;
        const Video clip = make_video(row.control && takes_f32_ ? *other_model : model, seed, row.variant, row.settings);
        row.results.push_back(compare(dense, clip));
        if (seed == 0 && !row.control) check_first(row, clip.sample);
      }
      std::erase_if(rows_, [](const Row& row) { return row.left_out; });
      done();
      if (isatty(STDERR_FILENO) == 0 && options_.seeds > 1) {  // where there is no progress bar
        tell("seed {} of {} done\n", seed + 1, options_.seeds);
      }
    }
    progress_.reset();
  }

  void print() const {
    fmt::print("{}\n",
               bold(fmt::format("{} at {}, {} steps, {} seeds of {} clips, {}; {} threads, {}", options_.model,
                                io::join(grid_, "x"), steps_, options_.seeds, clips_.size(), compute_, context_.threads(),
                                context_.device().empty() ? context_.instruction_set() : context_.device())));
    fmt::print("dense: {:.2f} s a video (median)\n", median(each(dense_, [](const Result& r) { return r.total; })));
    for (const Row& row : rows_) {
      if (!row.control) continue;
      fmt::print("control, {}: {}{} (pooled {}), SSIM {:.4f}; what is near it cannot be told from rounding\n", row.variant,
                 notes_.rgb ? "" : "latents ", psnr_text(row), decibel_text(mean(each(row.results, &Result::pooled_psnr))),
                 mean(each(row.results, &Result::ssim)));
    }
    for (const Table& table : tables_) {
      size_t width = 8;
      for (const double point : points(table)) {
        for (const Row* row : table_rows(table, point)) width = std::max(width, label(*row).size());
      }
      fmt::print("\n{}\n{:<{}}  {:>7}  {:>13}  {:>6}  {:>6}  {:>15}  {:>6}  {:>7}  {:>7}\n",
                 bold(notes_.rgb ? table.title : table.title + ", by latents"), "", width, "density", "PSNR ± sd", "pooled",
                 "SSIM", "paired ± sd", "wins", "calls", "run");
      for (const double point : points(table)) {
        const Row* first = nullptr;
        for (const Row* row : table_rows(table, point)) {
          if (first == nullptr) first = row;
          const Paired pair = paired(*row, *first);
          fmt::print("{:<{}}  {:>7.4f}  {:>13}  {:>6.2f}  {:>6.4f}  {:>15}  {:>6}  {:>6.2f}x  {:>6.2f}x\n", label(*row),
                     width, mean(each(row->results, &Result::density)), psnr_text(*row),
                     mean(each(row->results, &Result::pooled_psnr)), mean(each(row->results, &Result::ssim)),
                     row == first ? "" : fmt::format("{:+.2f}{}", pair.difference, spread(pair.deviation)),
                     row == first ? "" : fmt::format("{}/{}", pair.wins, row->results.size()), call_speedup(*row),
                     run_speedup(*row));
        }
      }
    }
    fmt::print("\n");
    for (const auto& [variant, why] : skipped_) fmt::print("not run: {}: {}\n", variant, why);
    print_notes();
    print_first_calls();
    if (!notes_.rgb) {
      fmt::print(
          "PSNR and SSIM are of latents, each channel in [0, 1] by the dense video's least and greatest: they rank\n"
          "variants of this model, and are no figures of frames.\n");
    }
    fmt::print(
        "PSNR in dB and SSIM against the dense video of the same seed{}: mean and standard\n"
        "deviation over seeds; paired: difference from the first line of the density or rho, seed by seed, and how many of "
        "them "
        "are\n"
        "ahead; calls: self-attention of the calls that ran sparse, selection included, dense ÷ variant; run: whole video, "
        "dense ÷\n"
        "variant; both medians over seeds.\n",
        given_frames_ > 0 ? ", without frame 0, which is given" : "");
  }

  bool finished() const { return std::ssize(dense_) == options_.seeds; }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json out = about();
    out.update({{"finished", finished()},
                {"seeds", dense_.size()},
                {"machine", machine_json(context_)},
                {"dense", {{"calls", {{"dense", dense_[0].dense_count}}}, {"seconds", seconds_columns(dense_)}}},
                {"rows", nlohmann::ordered_json::array()},
                {"tables", nlohmann::ordered_json::array()},
                {"skipped", nlohmann::ordered_json::array()}});
    for (const Row& row : rows_) out["rows"].push_back(row_json(row));
    for (const Table& table : tables_) out["tables"].push_back(table_json(table));
    for (const auto& [variant, why] : skipped_) out["skipped"].push_back({{"variant", variant}, {"why", why}});
    return out;
  }

  std::string csv() const {
    std::string out = fmt::format(
        "variant,{0},seed,density,{1}psnr,{1}pooled_psnr,{1}ssim,"
        "seconds,sparse_seconds,dense_seconds,same_calls_dense_seconds\n",
        point_name(), notes_.rgb ? "" : "latents_");
    for (const Row& row : rows_) {
      for (size_t i = 0; i < row.results.size(); ++i) {
        const Result& r = row.results[i];
        out += fmt::format("\"{}\",{},{},{:.6f},{:.6f},{:.6f},{:.8f},{:.6f},{:.6f},{:.6f},{:.6f}\n", row.variant, row.point,
                           i, r.density, r.psnr, r.pooled_psnr, r.ssim, r.total, r.sparse_calls(), r.dense_total,
                           r.same_calls_dense);
      }
    }
    return out;
  }

  // Of the table with the most densities.
  Chart chart() const {
    const Table& table = *std::max_element(tables_.begin(), tables_.end(), [](const Table& a, const Table& b) {
      return split(a.points, ',').size() < split(b.points, ',').size();
    });
    Chart chart{.title = notes_.rgb ? "PSNR against dense, by density" : "PSNR of latents against dense, by density",
                .x_label = "density of the sparse calls",
                .y_label = "dB, mean over seeds",
                .note = fmt::format("{} at {}, {} steps, {} seeds, {}", options_.model, io::join(grid_, "x"), steps_,
                                    options_.seeds, compute_),
                .series = {}};
    for (const std::string& variant : split_methods(table.variants)) {
      Series series{variant, {}};
      for (const Row& row : rows_) {
        if (row.variant != variant || row.control) continue;
        const double psnr = mean(each(row.results, &Result::psnr));
        if (std::isfinite(psnr)) series.points.emplace_back(mean(each(row.results, &Result::density)), psnr);
      }
      std::sort(series.points.begin(), series.points.end());
      if (!series.points.empty()) chart.series.push_back(series);
    }
    return chart;
  }

 private:
  // What K-means costs in the first sparse call of a layer, which calls, run and selection hold.
  void print_first_calls() const {
    std::map<std::pair<double, int>, std::set<std::string>> variants;
    for (const Row& row : rows_) {
      const GroupingRow& group = scope::row(row.settings.group);
      if (row.control || !group.iterates || !group.warm) continue;
      variants[{row.settings.first_sample, row.settings.first_iterations}].insert(row.variant);
    }
    for (const auto& [at, names] : variants) {
      fmt::print(
          "first call of a layer: {} iterations of K-means, all but the last 2 over the share {} of the tokens, at least 8 "
          "a cluster: {}\n",
          at.second, at.first, fmt::join(names, ", "));
    }
  }

  // Notes that say the same of several variants are one line.
  void print_notes() const {
    std::map<std::string, std::set<std::string>> variants;
    for (const Row& row : rows_) {
      for (const std::string& note : row.notes) variants[note.substr(row.variant.size() + 2)].insert(row.variant);
    }
    for (const auto& [note, names] : variants) fmt::print("{}: {}\n", note, fmt::join(names, ", "));
  }

  struct Video {
    video::Sample sample;
    std::vector<io::Image> frames;  // of a model that gives them
  };

  bool two_experts() const { return pipeline_.transformers.size() == 2; }

  void check_frames() const {
    require(grid_[0] > given_frames_, Status::shape,
            "--grid: got {}, one frame, which is given to the model; expected at least two", io::join(grid_, "x"));
  }

  void check_latents() const {
    require(
        !inputs_.condition.empty(), Status::invalid_argument,
        "--condition: this model needs a .safetensors file with prompt_embeds and what else scope generate --help lists");
    require(options_.images.empty(), Status::invalid_argument,
            "--image: this model's latents are a VAE's; put the encoded image into --condition");
    require(size_[1] >= kSsimWindow && size_[2] >= kSsimWindow, Status::shape,
            "--grid: got {}, latents of {} x {} in a frame, and SSIM's window is {} x {}", io::join(grid_, "x"), size_[1],
            size_[2], kSsimWindow, kSsimWindow);
  }

  std::string other_compute() const { return compute_ == "bf16" ? "f32" : "bf16"; }

  Plan make_plan(const Settings& settings) const {
    return {context_, settings, video::attention_shape(config_, grid_, compute_ == "bf16" ? DType::bf16 : DType::f32)};
  }

  // What a row's point is of: a target density, or rho.
  const char* point_name() const { return options_.at.at_rho() ? "rho" : "target"; }
  // A density is in the table anyway.
  std::string label(const Row& row) const {
    return options_.at.at_rho() ? fmt::format("{} at rho {}", row.variant, row.point) : row.variant;
  }
  std::vector<double> points(const Table& table) const {
    return options_.at.at_rho() ? options_.at.points() : parse_densities(table.points);
  }

  // Every variant and point of the tables once; what cannot run is refused or, in a suite, said.
  void make_rows() {
    if (options_.suite.empty()) {
      tables_ = {{"Variants", options_.variants.empty() ? "scope" : options_.variants,
                  options_.at.at_rho() ? options_.at.rho : options_.at.density}};
    } else {
      tables_.assign(std::begin(kPaper), std::end(kPaper));
    }
    if (!options_.no_control) {
      Row row{.variant = takes_f32_ ? "dense in " + other_compute() : "dense:kernel=portable",
              .settings = parse_method(takes_f32_ ? "dense" : "dense:kernel=portable", ""),
              .control = true,
              .results = {},
              .notes = {}};
      rows_.push_back(std::move(row));
    }
    bool profiled = false;
    for (const Table& table : tables_) {
      for (const std::string& variant : split_methods(table.variants)) {
        for (const double point : points(table)) {
          if (find_row(variant, point) != nullptr) continue;
          Settings settings = parse_method(variant, "", options_.at.set);
          require(!settings.dense, Status::invalid_argument,
                  "--variants: dense is what the others are compared with, and runs anyway");
          const bool own = (!settings.density_steps.empty() || settings.target_density > 0) && !options_.at.at_rho();
          if (!own) settings = options_.at.at(settings, point, variant);
          if (settings.method->profiled && !options_.profile.empty()) {
            set_setting(settings, "profile", options_.profile);
            profiled = true;
          }
          check_effects(variant, "", {}, settings, {.device = options_.machine.on_device()});
          try {
            make_plan(settings);  // refuses what cannot run
            rows_.push_back({variant, own ? std::nan("") : point, settings, false, false, {}, {}});
          } catch (const Error& error) {
            leave_out(variant, error);
          }
        }
      }
    }
    if (!options_.profile.empty() && !profiled) refuse_profile(tables_.front().variants);
  }

  void leave_out(const std::string& variant, const Error& error) {
    if (options_.suite.empty() || error.status() != Status::unsupported) throw error;
    const std::pair<std::string, std::string> entry{variant, error.what()};
    if (std::find(skipped_.begin(), skipped_.end(), entry) == skipped_.end()) skipped_.push_back(entry);
  }

  const Row* find_row(const std::string& variant, double point) const {
    for (const Row& row : rows_) {
      if (!row.control && row.variant == variant && (row.point == point || std::isnan(row.point))) return &row;
    }
    return nullptr;
  }

  std::vector<const Row*> table_rows(const Table& table, double point) const {
    std::vector<const Row*> out;
    for (const std::string& variant : split_methods(table.variants)) {
      if (const Row* row = find_row(variant, point); row != nullptr) out.push_back(row);
    }
    return out;
  }

  // Seed s takes clip s modulo how many there are: samples of the condition, each with each image where some are given.
  void find_clips() {
    const std::vector<std::string> images =
        options_.images.empty() ? std::vector<std::string>{""} : split(options_.images, ',');
    for (const std::string& image : images) {
      require(options_.images.empty() || !image.empty(), Status::invalid_argument,
              "--image: got \"{}\", expected names of files separated by commas", options_.images);
    }
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
  }
  std::vector<std::string> clip_names() const {
    std::vector<std::string> names;
    for (const VideoInputs& clip : clips_) {
      names.push_back(clip.image.empty() ? std::to_string(clip.example)
                                         : fmt::format("{} of {}", fs::path(clip.image).filename().string(), clip.example));
    }
    return names;
  }

  video::Request make_request(int64_t seed, const Settings& settings) {
    video::Request request;
    request.grid = grid_;
    request.steps = steps_;
    request.sampler = sampler();
    request.shift = shift();
    request.boundary = pipeline_.boundary;
    request.settings = settings;
    const VideoInputs& clip = clips_[static_cast<size_t>(seed) % clips_.size()];
    if (notes_.rgb) {
      read_rgb_inputs(clip, pipeline_.transformers[0], notes_, config_, size_, request);
    } else {
      read_latent_inputs(clip, options_.guidance, options_.guidance_2, pipeline_, config_, size_, request);
      guidance_ = request.guidance;
      guidance_2_ = request.guidance_2;
      if (!request.first_frame.empty()) given_frames_ = 1;
      check_frames();
    }
    request.noise = video::make_noise(static_cast<uint64_t>(options_.first_seed + seed),
                                      config_.latent_channels * size_[0] * size_[1] * size_[2]);
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
    const VideoQuality quality = summarise(std::move(frames), given_frames_);
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
      Met& met = targets[density_at(row.settings, {call.layer, call.step, steps_}, target)];
      met.densities.push_back(call.stats.density);
      met.heads.insert(met.heads.end(), call.heads.begin(), call.heads.end());
    }
    require(!targets.empty(), Status::invalid_argument, "--steps: with {} of them, every call of {} is a dense one", steps_,
            row.variant);
    if (options_.at.at_rho()) return;
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
                               {"grid", grid_},
                               {"steps", steps_},
                               {"first_seed", options_.first_seed},
                               {"clips", clips_.size()},
                               {"clip_names", clip_names()},
                               {"condition", fs::path(inputs_.condition).filename().string()},
                               {"shift", shift()},
                               {"compute", compute_}};
    if (!notes_.rgb) out.update({{"compared", "latents"}, {"guidance", guidance_}});
    if (sampler() == video::Sampler::unipc) out["sampler"] = "unipc";
    if (two_experts()) out.update({{"guidance_2", guidance_2_}, {"boundary", pipeline_.boundary}});
    return out;
  }
  double shift() const { return options_.shift == 0 ? schedule_of(pipeline_, notes_).shift : options_.shift; }
  video::Sampler sampler() const { return schedule_of(pipeline_, notes_).sampler; }

  // The seeds of another run of these videos, from its JSON, which is not trusted.
  void take_seeds() {
    const std::string& path = options_.resume;
    const auto bytes = io::read_file(path, kMostResult);
    const auto saved = video::parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    try {
      const nlohmann::json mine = about(), machine = machine_json(context_);
      for (const auto& [name, value] : mine.items()) {
        require(saved.at(name) == value, Status::invalid_argument, "--resume: {} has {} {}, and this run {}", path, name,
                video::shown(saved.at(name)), video::shown(value));
      }
      for (const char* name : {"gpu", "instruction_set"}) {
        const std::string theirs = saved.at("machine").value(name, ""), own = machine.value(name, "");
        require(theirs == own, Status::invalid_argument, "--resume: {} was made with {} \"{}\", and this run has \"{}\"",
                path, name, theirs, own);
      }
      const auto seeds = saved.at("seeds").get<int64_t>();
      require(seeds >= 1 && seeds <= options_.seeds, Status::invalid_argument,
              "--resume: {} has {} seeds, expected at most those of --seeds, {}", path, seeds, options_.seeds);
      dense_ = read_results(saved.at("dense"), seeds);
      for (const auto& each : saved.at("skipped")) skipped_.emplace_back(each.at("variant"), each.at("why"));
      for (Row& row : rows_) take_row(row, saved.at("rows"), seeds);
      std::erase_if(rows_, [](const Row& row) { return row.left_out; });
    } catch (const nlohmann::json::exception& error) {
      fail(Status::format, "{}: this is no result of scope ablate: {}", path, error.what());
    }
  }

  void take_row(Row& row, const nlohmann::json& all, int64_t seeds) {
    const auto same = [&](const nlohmann::json& each) {
      return each.at("variant") == row.variant && each.at("control") == row.control &&
             (std::isnan(row.point) ? each.at(point_name()).is_null() : each.at(point_name()) == row.point);
    };
    const auto found = std::find_if(all.begin(), all.end(), same);
    if (found == all.end()) {
      row.left_out =
          std::any_of(skipped_.begin(), skipped_.end(), [&](const auto& each) { return each.first == row.variant; });
      require(row.left_out, Status::invalid_argument, "--resume: {} has no {} at {}", options_.resume, row.variant,
              row.point);
      return;
    }
    require(found->at("settings") == nlohmann::json(settings_json(row.settings)), Status::invalid_argument,
            "--resume: {} has {} at {} with other settings", options_.resume, row.variant, row.point);
    row.results = read_results(*found, seeds);
    row.notes = found->at("notes");
    for (const std::string& note : row.notes) {
      require(note.starts_with(row.variant + ": "), Status::format, "{}: a note of {} is about another variant: {}",
              options_.resume, row.variant, note);
    }
  }

  // The columns of `row_json`, or of the dense videos.
  std::vector<Result> read_results(const nlohmann::json& row, int64_t seeds) const {
    std::vector<Result> out(static_cast<size_t>(seeds));
    const auto fill = [&](const nlohmann::json& columns, const char* name, double Result::*value) {
      const auto& column = columns.at(name);
      require(column.is_array() && std::ssize(column) == seeds, Status::format, "{}: {} has not {} values", options_.resume,
              name, seeds);
      for (size_t i = 0; i < out.size(); ++i) out[i].*value = column[i].is_null() ? INFINITY : column[i].get<double>();
    };
    const auto& seconds = row.at("seconds");
    fill(seconds, "total", &Result::total);
    fill(seconds, "dense_calls", &Result::dense_calls);
    fill(seconds, "sparse_attention", &Result::attend);
    fill(seconds, "selection", &Result::selection);
    fill(seconds, "rest", &Result::rest);
    for (Result& result : out) {
      result.dense_count = row.at("calls").at("dense");
      result.sparse_count = row.at("calls").value("sparse", int64_t{0});
    }
    if (!row.contains("psnr")) return out;  // the dense videos
    fill(row, "psnr", &Result::psnr);
    fill(row, "pooled_psnr", &Result::pooled_psnr);
    fill(row, "ssim", &Result::ssim);
    fill(row, "worst_psnr", &Result::worst_psnr);
    fill(row, "density", &Result::density);
    fill(row, "same_calls_dense_seconds", &Result::same_calls_dense);
    for (size_t i = 0; i < out.size(); ++i) out[i].dense_total = dense_[i].total;
    return out;
  }

  static std::string decibel_text(double psnr) { return std::isinf(psnr) ? "equal" : fmt::format("{:.2f}", psnr); }
  static std::string spread(double deviation) { return std::isfinite(deviation) ? fmt::format(" ± {:.2f}", deviation) : ""; }
  static std::string psnr_text(const Row& row) {
    const auto psnr = each(row.results, &Result::psnr);
    return decibel_text(mean(psnr)) + spread(deviation(psnr));
  }

  static nlohmann::ordered_json seconds_columns(const std::vector<Result>& results) {
    return {{"total", each(results, &Result::total)},
            {"dense_calls", each(results, &Result::dense_calls)},
            {"sparse_attention", each(results, &Result::attend)},
            {"selection", each(results, &Result::selection)},
            {"rest", each(results, &Result::rest)}};
  }

  nlohmann::ordered_json row_json(const Row& row) const {
    nlohmann::ordered_json out{{"variant", row.variant},
                               {point_name(), row.point},
                               {"control", row.control},
                               {"settings", settings_json(row.settings)},
                               {"psnr", each(row.results, &Result::psnr)},
                               {"pooled_psnr", each(row.results, &Result::pooled_psnr)},
                               {"ssim", each(row.results, &Result::ssim)},
                               {"worst_psnr", each(row.results, &Result::worst_psnr)},
                               {"density", each(row.results, &Result::density)},
                               {"calls", {{"dense", row.results[0].dense_count}, {"sparse", row.results[0].sparse_count}}},
                               {"seconds", seconds_columns(row.results)},
                               {"same_calls_dense_seconds", each(row.results, &Result::same_calls_dense)},
                               {"notes", row.notes}};
    return out;
  }

  nlohmann::ordered_json table_json(const Table& table) const {
    nlohmann::ordered_json out{{"title", table.title}, {"lines", nlohmann::ordered_json::array()}};
    for (const double point : points(table)) {
      const Row* first = nullptr;
      for (const Row* row : table_rows(table, point)) {
        if (first == nullptr) first = row;
        const Paired pair = paired(*row, *first);
        const auto psnr = each(row->results, &Result::psnr);
        out["lines"].push_back({{"variant", row->variant},
                                {point_name(), row->point},
                                {"density", mean(each(row->results, &Result::density))},
                                {"psnr", mean(psnr)},
                                {"psnr_deviation", deviation(psnr)},
                                {"psnr_least", *std::min_element(psnr.begin(), psnr.end())},
                                {"pooled_psnr", mean(each(row->results, &Result::pooled_psnr))},
                                {"ssim", mean(each(row->results, &Result::ssim))},
                                {"against", first->variant},
                                {"paired_difference", pair.difference},
                                {"paired_deviation", pair.deviation},
                                {"wins", pair.wins},
                                {"call_speedup", call_speedup(*row)},
                                {"run_speedup", run_speedup(*row)}});
      }
    }
    return out;
  }

  const AblateOptions& options_;
  std::string folder_;
  video::Folder pipeline_;  // its transformers: of a folder that is one, itself
  video::Notes notes_;
  video::ModelConfig config_;
  Context context_;
  bool takes_f32_ = true;  // so that the control is the other type, and else another kernel
  std::string compute_;
  std::array<int64_t, 3> grid_ = {}, size_ = {};
  int64_t given_frames_ = 1;  // the first, which do not count
  double guidance_ = 1, guidance_2_ = 1;
  VideoInputs inputs_;
  int64_t steps_ = 0;
  std::vector<VideoInputs> clips_;
  std::vector<Table> tables_;
  std::vector<Row> rows_;
  std::vector<std::pair<std::string, std::string>> skipped_;
  std::vector<Result> dense_;
  std::unique_ptr<Progress> progress_;
};

void run(const AblateOptions& options) {
  Outputs outputs;
  outputs.reads_model(find_model_folder(options.model));
  outputs.reads("--condition", options.condition);
  outputs.reads("--resume", options.resume);
  if (!options.images.empty()) {
    for (const std::string& image : split(options.images, ',')) outputs.reads("--image", image);
  }
  outputs.writes("--output", options.output);
  outputs.writes("--csv", options.csv);
  outputs.writes("--plot", options.plot);
  Ablation ablation(options);
  ablation.declare(outputs);
  // A long run that is stopped leaves its finished seeds.
  ablation.run([&] {
    if (!options.output.empty() && !ablation.finished()) outputs.keep_unfinished(options.output, ablation.json());
  });
  if (!options.output.empty()) write_json(outputs.open(options.output), ablation.json());
  if (!options.csv.empty()) write_text(outputs.open(options.csv), ablation.csv());
  if (!options.plot.empty()) write_text(outputs.open(options.plot), svg(ablation.chart()));
  outputs.place();
  ablation.print();
}

}  // namespace

void add_ablate(CLI::App& app) {
  auto options = std::make_shared<AblateOptions>();
  CLI::App* command = app.add_subcommand(
      "ablate",
      "Generate the same videos densely and by variants of a method at matched density, and judge them by paired seeds.\n"
      "Seed s is noise s and clip s (modulo how many there are). Every density is solved in the calls;\n"
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
  command->add_option("--commit", options->commit, "recorded in the JSON")->needs(output);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
