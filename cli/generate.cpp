// scope generate: a video from noise with the native runner, dense or sparse, into a folder of frames.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bounds.h"
#include "checkpoint.h"
#include "commands.h"
#include "core/built_from.h"
#include "io/png.h"
#include "io/safetensors.h"
#include "json.h"
#include "machine.h"
#include "method.h"
#include "mp4.h"
#include "outputs.h"
#include "parse.h"
#include "qkv_dump.h"
#include "run_profile.h"
#include "terminal.h"
#include "video/folder.h"
#include "video/media.h"
#include "video_inputs.h"
#include "video_run.h"

namespace scope::cli {

namespace {

namespace fs = std::filesystem;

struct GenerateOptions : VideoInputs {
  std::string output, model = "tiny-wan", method = "scope", target_density, grid, noise, dump, dump_steps, dump_layers,
                      compute, known, sampler, experts = "auto", checkpoint, profile_out, profile_samples = "256";
  std::vector<std::string> set;
  int64_t steps = 0;  // 0: the model's
  int64_t checkpoint_every = 1;
  uint64_t seed = 0;
  double shift = 0, guidance = 0, guidance_2 = 0;
  bool latents = false;
  MachineFlags machine;
};

io::Array float_array(const std::vector<float>& values, std::vector<int64_t> shape) {
  io::Array array{io::ElementType::f32, std::move(shape), std::vector<std::byte>(values.size() * sizeof(float))};
  std::memcpy(array.data.data(), values.data(), array.data.size());
  return array;
}

class Generation {
 public:
  // Reads all that goes in, and refuses what does not fit.
  explicit Generation(const GenerateOptions& options)
      : options_(options),
        model_folder_(find_model_folder(options.model)),
        folder_(video::read_folder(model_folder_)),
        notes_(video::read_notes(folder_.transformers[0])),
        config_(video::read_model_config(folder_.transformers[0])) {
    require(two_experts() || options.guidance_2 == 0, Status::invalid_argument,
            "--guidance-2: {} has one transformer, and --guidance is its", model_folder_);
    known_ = find_known(options.known, config_, two_experts());
    const MethodFlags flags{options.method, known_ == nullptr ? "" : known_->name, options.set};
    request_.settings = flags.settings({.device = options.machine.on_device()}, options.target_density);
    if (known_ != nullptr) fmt::print("{}\n", known_text(*known_, !options.known.empty(), config_, request_.settings));
    take_schedule();
    declare();
    if (!options.dump.empty()) dump_calls();
    read_inputs();
  }

  void run() {
    const Context context = options_.machine.context();
    compute_ = checked_compute(context, options_.compute);
    if (!options_.profile_out.empty()) profile_calls(context);
    if (!options_.checkpoint.empty()) keep_checkpoint(context);
    const auto engine = make_engine(context, compute_);
    Transformers transformers(folder_, *engine);
    const int64_t first_step = stopped_ ? stopped_->steps_done : 0;
    both_experts_ = two_experts() && keeps_both(options_.experts, folder_, request_, *engine);
    if (both_experts_) transformers.keep(request_, first_step);
    auto progress =
        std::make_unique<Progress>("generate " + options_.method, count_passes(request_, first_step) * config_.layers);
    request_.done = [&](const video::CallReport& call) {
      progress->step(fmt::format("step {} of {}", call.step + 1, request_.steps));
    };
    const video::Sample sample = video::generate(transformers.opener(), request_);
    progress.reset();
    write(sample, context);
  }

 private:
  bool two_experts() const { return folder_.transformers.size() == 2; }
  std::vector<int64_t> latent_shape() const { return {config_.latent_channels, size_[0], size_[1], size_[2]}; }

  // Grid, steps and noise levels: those of the options, the scheduler or the model.
  void take_schedule() {
    require(notes_.grid[0] > 0 || !options_.grid.empty(), Status::invalid_argument,
            "--grid: this model needs one, as TxHxW in tokens");
    request_.grid = options_.grid.empty() ? notes_.grid : parse_grid(options_.grid);
    for (const int64_t n : request_.grid) {
      require(n <= config_.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
              io::join(request_.grid, "x"), config_.rope_max);
    }
    size_ = video::latent_size(config_, request_.grid);
    request_.steps = options_.steps == 0 ? notes_.steps : options_.steps;
    const video::Schedule own = schedule_of(folder_, notes_);
    request_.sampler = own.sampler;
    if (!options_.sampler.empty()) {
      request_.sampler = options_.sampler == "unipc" ? video::Sampler::unipc : video::Sampler::euler;
    }
    request_.shift = options_.shift == 0 ? own.shift : options_.shift;
    request_.boundary = folder_.boundary;
    request_.guidance = options_.guidance == 0 ? 1 : options_.guidance;
  }

  void declare() {
    outputs_.reads_model(model_folder_);
    for (const std::string& transformer : folder_.transformers) outputs_.reads_model(transformer);
    outputs_.reads("--model", model_folder_ + "/scheduler/scheduler_config.json");
    outputs_.reads("--condition", options_.condition);
    outputs_.reads("--image", options_.image);
    outputs_.reads("--noise", options_.noise);
    outputs_.reads(request_.settings);
    outputs_.writes_run("--output", options_.output);
    outputs_.writes("--profile-out", options_.profile_out);
    outputs_.writes_checkpoint("--checkpoint", options_.checkpoint);
  }

  void dump_calls() {
    const std::string middle = std::to_string(request_.steps / 2);
    const auto steps = parse_set("--dump-steps", options_.dump_steps.empty() ? middle : options_.dump_steps, request_.steps);
    const auto layers = parse_set("--dump-layers", options_.dump_layers, config_.layers);
    const auto name = [](int64_t step, int64_t layer) {
      return fmt::format("step_{:03}_layer_{:02}.safetensors", step, layer);
    };
    for (const int64_t step : steps) {
      for (const int64_t layer : layers) outputs_.writes_into("--dump-qkv", options_.dump, name(step, layer));
    }
    request_.wanted = [steps, layers](int64_t step, int64_t layer, int64_t branch) {
      return branch == 0 && steps.contains(step) && layers.contains(layer);
    };
    request_.watch = [this, name](int64_t step, int64_t layer, int64_t, DType dtype, const std::vector<std::byte>& q,
                                  const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
      write_qkv(outputs_.open(options_.dump + "/" + name(step, layer)), config_, request_.grid, dtype,
                {{"q", &q}, {"k", &k}, {"v", &v}});
    };
  }

  void read_inputs() {
    if (notes_.rgb) {
      read_rgb_inputs(options_, folder_.transformers[0], notes_, config_, size_, request_);
      require(request_.guidance == 1, Status::invalid_argument, "--guidance: this model was trained without");
    } else {
      read_latent_inputs(options_, options_.guidance, options_.guidance_2, folder_, config_, size_, request_);
    }
    if (options_.noise.empty()) {
      request_.noise = video::make_noise(options_.seed, config_.latent_channels * size_[0] * size_[1] * size_[2]);
    } else {
      request_.noise = take_floats(options_.noise, io::read_safetensors(options_.noise), "noise", latent_shape(), 0);
    }
  }

  // Beside a dump, if there is one.
  void profile_calls(const Context& context) {
    profile_.emplace(options_.profile_out, options_.profile_samples, request_.settings, config_, request_.steps);
    request_.watch = [this, &context, dumped = request_.wanted, dump = request_.watch](
                         int64_t step, int64_t layer, int64_t branch, DType dtype, const std::vector<std::byte>& q,
                         const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
      profile_->add(*context.exec().pool, step, layer, dtype, q, k);
      if (dumped && dumped(step, layer, branch)) dump(step, layer, branch, dtype, q, k, v);
    };
    request_.wanted = [](int64_t, int64_t, int64_t branch) { return branch == 0; };
  }

  // Goes on from the checkpoint where there is one, and replaces it as steps are done.
  void keep_checkpoint(const Context& context) {
    const std::string seed = options_.noise.empty() ? std::to_string(options_.seed) : "";
    const RunIdentity identity = identify_run(folder_, request_, seed, context, compute_);
    stopped_ = read_checkpoint(options_.checkpoint, identity, request_.steps);
    if (stopped_) {
      fmt::print("{}: {} of {} steps are done; it goes on from there\n", options_.checkpoint, stopped_->steps_done,
                 request_.steps);
      request_.resume = &*stopped_;
    }
    request_.snapshot_every = options_.checkpoint_every;
    request_.snapshot = [this, identity](video::Snapshot snapshot) {
      outputs_.replace_checkpoint([&](const std::string& name) { write_checkpoint(name, identity, std::move(snapshot)); });
    };
  }

  nlohmann::ordered_json json(const video::Sample& sample, const Context& context) const {
    nlohmann::ordered_json json{{"version", SCOPE_VERSION},
                                {"commit", built_from()},
                                {"model", fs::path(model_folder_).filename().string()},
                                {"method", options_.method},
                                {"settings", settings_json(request_.settings)},
                                {"known", known_json(known_, request_.settings)},
                                {"grid", request_.grid},
                                {"steps", request_.steps},
                                {"seed", options_.seed},
                                {"noise", options_.noise.empty() ? "seed" : options_.noise},
                                {"example", options_.example},
                                {"sampler", request_.sampler == video::Sampler::unipc ? "unipc" : "euler"},
                                {"shift", request_.shift},
                                {"guidance", config_.embeds_guidance ? request_.prompt.guidance : request_.guidance},
                                {"compute", compute_},
                                {"machine", machine_json(context)},
                                {"density", mean_density(sample)},
                                {"seconds", seconds_json(sample)},
                                {"layers", calls_json(sample, request_.steps)}};
    if (two_experts()) {
      const std::vector<int64_t> experts = video::experts_of(request_);
      json["experts"] = both_experts_ ? "both" : "one";
      json["guidance_2"] = request_.guidance_2;
      json["boundary"] = request_.boundary;
      json["expert_steps"] = {std::count(experts.begin(), experts.end(), 0), std::count(experts.begin(), experts.end(), 1)};
    }
    if (profile_) json["profile"] = profile_->json();
    return json;
  }

  void write(const video::Sample& sample, const Context& context) {
    const auto run = json(sample, context);
    const std::string out = outputs_.open(options_.output);
    bool has_clip = true;
    if (notes_.rgb) {
      const auto frames = video::to_frames(sample.latent, size_);
      for (size_t i = 0; i < frames.size(); ++i) io::write_png(fmt::format("{}/frame_{:03}.png", out, i), frames[i]);
      has_clip = write_mp4(out, frames[0].width);
    }
    if (!notes_.rgb || options_.latents) {
      io::SafeTensors file;
      file.tensors["latents"] = float_array(sample.latent, latent_shape());
      io::write_safetensors(out + "/latents.safetensors", file);
    }
    if (profile_) write_text(outputs_.open(options_.profile_out), profile_->csv());
    write_json(out + "/run.json", run);
    outputs_.place();
    const auto& seconds = run["seconds"];
    fmt::print(
        "{}: {} at {}, {} steps, density {:.4f}, {:.2f} s (dense calls {:.2f}, sparse attention {:.2f}, selection {:.2f}, "
        "rest "
        "{:.2f}; {}, {} threads, {})\n",
        options_.output, options_.method, io::join(request_.grid, "x"), request_.steps, mean_density(sample), sample.seconds,
        seconds["dense_prefix"].get<double>(), seconds["sparse_attention"].get<double>(), seconds["selection"].get<double>(),
        seconds["rest"].get<double>(), compute_, context.threads(), context.instruction_set());
    require(has_clip, Status::io, "{}: ffmpeg failed, and there is no clip.mp4; the frames and run.json are there",
            options_.output);
  }

  const GenerateOptions& options_;
  std::string model_folder_;
  video::Folder folder_;
  video::Notes notes_;
  video::ModelConfig config_;
  const Model* known_ = nullptr;
  video::Request request_;
  std::array<int64_t, 3> size_ = {};
  Outputs outputs_;
  std::string compute_;
  std::optional<RunProfile> profile_;
  std::optional<video::Snapshot> stopped_;
  bool both_experts_ = false;  // in memory
};

// What generates, and where to.
void add_method(CLI::App& command, GenerateOptions& options) {
  command
      .add_option("-o,--output", options.output,
                  "folder to write; an earlier run there is replaced, and one that holds anything else is refused")
      ->required();
  command.add_option("--model", options.model, "model folder, or the name of a bundled one")->capture_default_str();
  command.add_option("--method", options.method, "a row of `scope methods`; settings may follow, as scope:rho=0.8")
      ->capture_default_str();
  command.add_option("--set", options.set, "one setting, as name=value; repeat for more")->allow_extra_args(false);
  command.add_option(
      "--known", options.known,
      "take rho, schedule, profile bounds and reuse of a known model (see `scope methods`) for the method, or "
      "none; otherwise those of the first whose layers, heads and RoPE config.json has");
  command.add_option(
      "--target-density", options.target_density,
      "share of keys that sparse calls keep: the mean of their heads, or with target_scope=head each of them");
}

// What the video is of, and how it is sampled.
void add_video(CLI::App& command, GenerateOptions& options) {
  command.add_option("--steps", options.steps, "sampling steps; otherwise the model's, or 20")
      ->check(whole(1, kMostSamplerSteps));
  command
      .add_option("--sampler", options.sampler,
                  "euler, or unipc as diffusers runs it for Wan; otherwise that of the pipeline's scheduler, or euler")
      ->check(CLI::IsMember({"euler", "unipc"}));
  CLI::Option* seed = command.add_option("--seed", options.seed, "names the noise; the same for every method")
                          ->check(whole(0, kMostSeed))
                          ->capture_default_str();
  command.add_option("--grid", options.grid, "tokens along T, H and W, as 13x20x32; the bundled model's default");
  command.add_option("--example", options.example, "which sample of the condition file, from 0")
      ->check(whole(0, kMostSamples))
      ->capture_default_str();
  command.add_option("--image", options.image, "first frame as PNG (bundled model); otherwise the example's");
  command.add_option("--condition", options.condition, "prompt embeddings; otherwise the bundled examples.safetensors");
  command.add_option("--noise", options.noise, "take the tensor `noise` of this .safetensors file instead of a seed's")
      ->excludes(seed);
  command.add_option("--shift", options.shift, "of the noise levels; the scheduler's or the model's own, or 5")
      ->check(above(0, 1000));
  command
      .add_option("--guidance", options.guidance,
                  "classifier-free guidance; 5 where there is a negative prompt. HunyuanVideo embeds it: 6, or 1 "
                  "with an image")
      ->check(above(0, 1000));
  command.add_option("--guidance-2", options.guidance_2, "of the second expert of Wan2.2; otherwise that of the first")
      ->check(above(0, 1000));
  command
      .add_option("--experts", options.experts,
                  "in memory of two transformers: one, the second when its steps come, or both from the start; auto: both "
                  "on a GPU that has room for them, otherwise one")
      ->check(CLI::IsMember({"auto", "one", "both"}))
      ->capture_default_str();
  command
      .add_option("--compute", options.compute,
                  "f32 or bf16, for linear layers and attention; f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

// What else is written.
void add_records(CLI::App& command, GenerateOptions& options) {
  command.add_flag("--latents", options.latents, "write latents.safetensors beside the frames");
  CLI::Option* dump = command.add_option(
      "--dump-qkv", options.dump,
      "write q, k, v of every layer into this folder, for scope compare and attend; it must not lie in the run's");
  command.add_option("--dump-steps", options.dump_steps, "the steps to dump, as 4,10; otherwise the middle one")
      ->needs(dump);
  command.add_option("--dump-layers", options.dump_layers, "the layers to dump, as 0,2; otherwise all")->needs(dump);
  CLI::Option* profile = command.add_option("--profile-out", options.profile_out,
                                            "write how dense the prompt's attention is at each step, layer and head, as "
                                            "CSV (--method dense): see `scope profile`; "
                                            "a profile that is there keeps what is higher");
  command.add_option("--profile-samples", options.profile_samples, "queries of each head that it looks at, or all")
      ->capture_default_str()
      ->needs(profile);
  CLI::Option* checkpoint =
      command
          .add_option("--checkpoint", options.checkpoint,
                      "a file that holds what is done, so that the same command goes on from there after it was stopped; "
                      "removed when the run is whole")
          ->excludes(dump)
          ->excludes(profile);
  command.add_option("--checkpoint-every", options.checkpoint_every, "steps between two writings of it")
      ->check(whole(1, kMostSamplerSteps))
      ->capture_default_str()
      ->needs(checkpoint);
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand(
      "generate",
      "Generate a video with a Wan or HunyuanVideo transformer, every self-attention through the chosen method.\n"
      "The bundled model gives frames as PNG (and clip.mp4 where ffmpeg is installed). Other models take what a text "
      "encoder "
      "and\n"
      "a VAE made: --condition holds prompt_embeds [tokens, text_dim] and, where the model needs them,\n"
      "negative_prompt_embeds, image_embeds [tokens, image_dim] and condition [channels, T, H, W], the latents that are\n"
      "concatenated to the noise or, [channels, 1, H, W], the first frame's (TI2V, HunyuanVideo); for HunyuanVideo\n"
      "pooled_prompt_embeds too and, where tokens are padding, prompt_attention_mask [tokens]; latents.safetensors comes\n"
      "out. The folder also gets run.json: settings, times and densities of every call.\n"
      "A model is a folder in diffusers' format, of a transformer or of a pipeline with transformers and scheduler (of\n"
      "Wan2.2's two experts the second takes over at the boundary), or a name that is looked up in $SCOPE_MODELS, in\n"
      "share/scope/models of the installation, and in models/ of the source tree.\n\n"
      "  scope generate -o runs/dense --method dense\n"
      "  scope generate -o runs/scope --target-density 0.2 --seed 3 --example 1\n"
      "  scope generate -o runs/dense --method dense --profile-out profile.csv\n"
      "  scope generate --model Wan2.1-T2V-1.3B-Diffusers/transformer --grid 21x30x52 --condition prompt.safetensors -o "
      "out\n"
      "  scope generate --model Wan2.2-T2V-A14B-Diffusers --grid 21x45x80 --condition prompt.safetensors --guidance 4 "
      "--guidance-2 3 -o out");
  add_method(*command, *options);
  add_video(*command, *options);
  add_records(*command, *options);
  options->machine.add(*command);
  command->callback([options] { Generation(*options).run(); });
}

}  // namespace scope::cli
