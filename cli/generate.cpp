// scope generate: a video from noise with the native runner, dense or sparse, into a folder of frames.
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
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
#include "outputs.h"
#include "parse.h"
#include "run_profile.h"
#include "terminal.h"
#include "video/folder.h"
#include "video/media.h"
#include "video/weights.h"
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

void read_inputs(const GenerateOptions& options, const std::string& path, const video::ModelConfig& config,
                 bool keeps_first_frame, const std::array<int64_t, 3>& size, video::Request& request) {
  require(!path.empty(), Status::invalid_argument,
          "--condition: this model needs a .safetensors file with prompt_embeds and what else --help lists");
  require(options.image.empty(), Status::invalid_argument,
          "--image: this model's latents are a VAE's; put the encoded image into --condition");
  const io::SafeTensors file = io::read_safetensors(path);
  check_example(path, file, options.example);
  const auto prompt = [&](const std::string& name) {
    const std::string sign = name.starts_with("negative_") ? "negative_" : "";
    video::Prompt out;
    out.text = take_floats(path, file, name, {-1, config.text_dim}, options.example);
    if (config.text_tokens > 0) {
      const int64_t tokens = std::ssize(out.text) / config.text_dim;
      const int64_t length = prompt_length(path, file, sign + "prompt_attention_mask", tokens, options.example);
      out.text.resize(static_cast<size_t>(length * config.text_dim));
    }
    if (config.pooled_dim > 0) {
      out.pooled = take_floats(path, file, sign + "pooled_prompt_embeds", {config.pooled_dim}, options.example);
    }
    if (config.image_dim > 0) {
      // Two images may stand one after the other, as diffusers gives them.
      const auto& shape =
          file.tensors.contains("image_embeds") ? file.tensors.at("image_embeds").shape : std::vector<int64_t>{};
      const bool pair = shape.size() == 3 && shape[0] * shape[1] == config.image_tokens;
      out.image = pair ? video::to_f32(file.tensors.at("image_embeds"))
                       : take_floats(path, file, "image_embeds", {-1, config.image_dim}, options.example);
    }
    io::with_path(path, [&] { video::check_prompt(config, out); });
    return out;
  };
  request.prompt = prompt("prompt_embeds");
  const bool image = config.condition_channels > 0 || config.needs_first_frame;
  if (config.embeds_guidance) {
    request.prompt.guidance = options.guidance > 0 ? options.guidance : image ? 1.0 : 6.0;
    request.guidance = 1;
  }
  const bool negative = !config.embeds_guidance && file.tensors.contains("negative_prompt_embeds");
  if (options.guidance == 0) request.guidance = negative ? 5.0 : 1.0;
  request.guidance_2 = options.guidance_2 == 0 ? request.guidance : options.guidance_2;
  const bool guided = request.guidance != 1 || (request.boundary > 0 && request.guidance_2 != 1);
  if (guided) request.negative = prompt("negative_prompt_embeds");
  if (config.condition_channels > 0) {
    request.condition =
        take_floats(path, file, "condition", {config.condition_channels, size[0], size[1], size[2]}, options.example);
  }
  if (config.needs_first_frame || (keeps_first_frame && file.tensors.contains("condition"))) {
    request.first_frame =
        take_floats(path, file, "condition", {config.latent_channels, 1, size[1], size[2]}, options.example);
  }
}

nlohmann::ordered_json calls_json(const video::Sample& sample, int64_t steps) {
  auto out = nlohmann::ordered_json::array();
  for (int64_t i = 0; i < steps; ++i) out.push_back(nlohmann::ordered_json::array());
  for (const auto& call : sample.calls) {
    const CallStats& s = call.stats;
    std::vector<int64_t> budgets;
    std::vector<double> densities;
    for (const HeadStats& head : call.heads) {
      budgets.push_back(head.head_budget);
      densities.push_back(head.density);
    }
    nlohmann::ordered_json entry{{"density", s.density},
                                 {"head_density", densities},
                                 {"k_head", budgets},
                                 {"dense", s.reason != Reason::sparse},
                                 {"attention_seconds", s.attend},
                                 {"selection_seconds", s.total - s.attend}};
    if (call.branch > 0) entry["branch"] = call.branch;
    out[static_cast<size_t>(call.step)].push_back(entry);
  }
  return out;
}

// False where ffmpeg is there and made no clip.mp4. Where it is not installed, nothing is missing.
bool write_mp4(const std::string& folder, int64_t width) {
  const int64_t zoom = std::max<int64_t>(1, 512 / width);
  const std::string frames = folder + "/frame_%03d.png", clip = folder + "/clip.mp4";
  const std::string scale = fmt::format("scale=iw*{}:ih*{}:flags=neighbor", zoom, zoom);
  const char* arguments[] = {"ffmpeg",       "-nostdin", "-loglevel",   "error",    "-framerate", "8",          "-i",
                             frames.c_str(), "-vf",      scale.c_str(), "-pix_fmt", "yuv420p",    clip.c_str(), nullptr};
  // Interrupts are blocked here, for the thread that takes them, and must end ffmpeg; so must a broken pipe.
  sigset_t none, ignored_here;
  sigemptyset(&none);
  sigemptyset(&ignored_here);
  for (const int number : {SIGPIPE, SIGXFSZ}) sigaddset(&ignored_here, number);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &ignored_here);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, "ffmpeg", nullptr, &attributes, const_cast<char* const*>(arguments), environ);
  posix_spawnattr_destroy(&attributes);
  if (failed == ENOENT || failed == ENOTDIR || failed == EACCES) return true;
  int status = failed;
  while (failed == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::error_code ignored;
  if (status == 0 && fs::exists(clip, ignored)) return true;
  fs::remove(clip, ignored);
  return false;
}

io::Array float_array(const std::vector<float>& values, std::vector<int64_t> shape) {
  io::Array array{io::ElementType::f32, std::move(shape), std::vector<std::byte>(values.size() * sizeof(float))};
  std::memcpy(array.data.data(), values.data(), array.data.size());
  return array;
}

// q, k, v of a call as [heads, tokens, dim], with the metadata that the other commands read.
void write_qkv(const std::string& path, const video::ModelConfig& config, const std::array<int64_t, 3>& grid, DType dtype,
               std::initializer_list<std::pair<const char*, const std::vector<std::byte>*>> parts) {
  const int64_t row = config.head_dim * dtype_bytes(dtype);
  io::SafeTensors file;
  for (const auto& [name, bytes] : parts) {
    const int64_t tokens = std::ssize(*bytes) / (config.heads * row);  // text and all
    io::Array& array = file.tensors[name];
    array.type = dtype == DType::f32 ? io::ElementType::f32 : io::ElementType::bf16;
    array.shape = {config.heads, tokens, config.head_dim};
    array.data.resize(bytes->size());
    for (int64_t h = 0; h < config.heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(array.data.data() + (h * tokens + t) * row, bytes->data() + (t * config.heads + h) * row,
                    static_cast<size_t>(row));
      }
    }
  }
  file.metadata["grid"] = io::join(grid, "x");
  file.metadata["rope"] = io::join(config.rope, ",");
  io::write_safetensors(path, file);
}

void run(const GenerateOptions& options) {
  const std::string model_folder = find_model_folder(options.model);
  const video::Folder folder = video::read_folder(model_folder);
  const std::string& first_transformer = folder.transformers[0];
  const video::Notes notes = video::read_notes(first_transformer);
  const video::ModelConfig config = video::read_model_config(first_transformer);
  const bool two_experts = folder.transformers.size() == 2;
  require(two_experts || options.guidance_2 == 0, Status::invalid_argument,
          "--guidance-2: {} has one transformer, and --guidance is its", model_folder);
  const Model* known = find_known(options.known, config, two_experts);
  const MethodFlags flags{options.method, known == nullptr ? "" : known->name, options.set};
  const Settings settings = flags.settings({.device = options.machine.on_device()}, options.target_density);
  if (known != nullptr) fmt::print("{}\n", known_text(*known, !options.known.empty(), config, settings));
  const bool has_grid = notes.grid[0] > 0;
  require(has_grid || !options.grid.empty(), Status::invalid_argument, "--grid: this model needs one, as TxHxW in tokens");

  video::Request request;
  request.grid = options.grid.empty() ? notes.grid : parse_grid(options.grid);
  for (const int64_t n : request.grid) {
    require(n <= config.rope_max, Status::shape, "--grid: got {}, this model takes up to {} tokens along an axis",
            io::join(request.grid, "x"), config.rope_max);
  }
  const auto size = video::latent_size(config, request.grid);
  request.steps = options.steps == 0 ? notes.steps : options.steps;
  const video::Schedule own = schedule_of(folder, notes);
  request.sampler = own.sampler;
  if (!options.sampler.empty()) {
    request.sampler = options.sampler == "unipc" ? video::Sampler::unipc : video::Sampler::euler;
  }
  request.shift = options.shift == 0 ? own.shift : options.shift;
  request.boundary = folder.boundary;
  request.guidance = options.guidance == 0 ? 1 : options.guidance;
  request.settings = settings;
  Outputs outputs;
  outputs.reads_model(model_folder);
  for (const std::string& transformer : folder.transformers) outputs.reads_model(transformer);
  outputs.reads("--model", model_folder + "/scheduler/scheduler_config.json");
  outputs.reads("--condition", options.condition);
  outputs.reads("--image", options.image);
  outputs.reads("--noise", options.noise);
  outputs.reads(settings);
  outputs.writes_run("--output", options.output);
  outputs.writes("--profile-out", options.profile_out);
  outputs.writes_checkpoint("--checkpoint", options.checkpoint);
  if (!options.dump.empty()) {
    const std::string middle = std::to_string(request.steps / 2);
    const auto steps = parse_set("--dump-steps", options.dump_steps.empty() ? middle : options.dump_steps, request.steps);
    const auto layers = parse_set("--dump-layers", options.dump_layers, config.layers);
    const auto name = [](int64_t step, int64_t layer) {
      return fmt::format("step_{:03}_layer_{:02}.safetensors", step, layer);
    };
    for (const int64_t step : steps) {
      for (const int64_t layer : layers) outputs.writes_into("--dump-qkv", options.dump, name(step, layer));
    }
    request.wanted = [steps, layers](int64_t step, int64_t layer, int64_t branch) {
      return branch == 0 && steps.contains(step) && layers.contains(layer);
    };
    request.watch = [&, name](int64_t step, int64_t layer, int64_t, DType dtype, const std::vector<std::byte>& q,
                              const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
      write_qkv(outputs.open(options.dump + "/" + name(step, layer)), config, request.grid, dtype,
                {{"q", &q}, {"k", &k}, {"v", &v}});
    };
  }
  if (notes.rgb) {
    read_rgb_inputs(options, first_transformer, notes, config, size, request);
    require(request.guidance == 1, Status::invalid_argument, "--guidance: this model was trained without");
  } else {
    read_inputs(options, options.condition, config, folder.keeps_first_frame, size, request);
  }
  const std::vector<int64_t> latent_shape{config.latent_channels, size[0], size[1], size[2]};
  if (options.noise.empty()) {
    request.noise = video::make_noise(options.seed, config.latent_channels * size[0] * size[1] * size[2]);
  } else {
    request.noise = take_floats(options.noise, io::read_safetensors(options.noise), "noise", latent_shape, 0);
  }

  const Context context = options.machine.context();
  const std::string compute = checked_compute(context, options.compute);
  std::optional<RunProfile> profile;
  if (!options.profile_out.empty()) {
    profile.emplace(options.profile_out, options.profile_samples, settings, config, request.steps);
    request.watch = [&, dumped = request.wanted, dump = request.watch](
                        int64_t step, int64_t layer, int64_t branch, DType dtype, const std::vector<std::byte>& q,
                        const std::vector<std::byte>& k, const std::vector<std::byte>& v) {
      profile->add(*context.exec().pool, step, layer, dtype, q, k);
      if (dumped && dumped(step, layer, branch)) dump(step, layer, branch, dtype, q, k, v);
    };
    request.wanted = [](int64_t, int64_t, int64_t branch) { return branch == 0; };
  }
  std::optional<video::Snapshot> stopped;
  if (!options.checkpoint.empty()) {
    const std::string seed = options.noise.empty() ? std::to_string(options.seed) : "";
    const RunIdentity identity = identify_run(folder, request, seed, context, compute);
    stopped = read_checkpoint(options.checkpoint, identity, request.steps);
    if (stopped) {
      fmt::print("{}: {} of {} steps are done; it goes on from there\n", options.checkpoint, stopped->steps_done,
                 request.steps);
      request.resume = &*stopped;
    }
    request.snapshot_every = options.checkpoint_every;
    request.snapshot = [&outputs, identity](video::Snapshot snapshot) {
      outputs.replace_checkpoint([&](const std::string& name) { write_checkpoint(name, identity, std::move(snapshot)); });
    };
  }
  const auto engine = make_engine(context, compute);
  Transformers transformers(folder, *engine);
  const int64_t first_step = stopped ? stopped->steps_done : 0;
  const bool both = two_experts && keeps_both(options.experts, folder, request, *engine);
  if (both) transformers.keep(request, first_step);
  auto progress =
      std::make_unique<Progress>("generate " + options.method, count_passes(request, first_step) * config.layers);
  request.done = [&](const video::CallReport& call) {
    progress->step(fmt::format("step {} of {}", call.step + 1, request.steps));
  };
  const video::Sample sample = video::generate(transformers.opener(), request);
  progress.reset();

  const double density = mean_density(sample);
  auto seconds = seconds_json(sample);
  nlohmann::ordered_json json{{"version", SCOPE_VERSION},
                              {"commit", built_from()},
                              {"model", fs::path(model_folder).filename().string()},
                              {"method", options.method},
                              {"settings", settings_json(settings)},
                              {"known", known_json(known, settings)},
                              {"grid", request.grid},
                              {"steps", request.steps},
                              {"seed", options.seed},
                              {"noise", options.noise.empty() ? "seed" : options.noise},
                              {"example", options.example},
                              {"sampler", request.sampler == video::Sampler::unipc ? "unipc" : "euler"},
                              {"shift", request.shift},
                              {"guidance", config.embeds_guidance ? request.prompt.guidance : request.guidance},
                              {"compute", compute},
                              {"machine", machine_json(context)},
                              {"density", density},
                              {"seconds", seconds},
                              {"layers", calls_json(sample, request.steps)}};
  if (two_experts) {
    const std::vector<int64_t> experts = video::experts_of(request);
    json["experts"] = both ? "both" : "one";
    json["guidance_2"] = request.guidance_2;
    json["boundary"] = request.boundary;
    json["expert_steps"] = {std::count(experts.begin(), experts.end(), 0), std::count(experts.begin(), experts.end(), 1)};
  }
  const std::string out = outputs.open(options.output);
  bool has_clip = true;
  if (notes.rgb) {
    const auto frames = video::to_frames(sample.latent, size);
    for (size_t i = 0; i < frames.size(); ++i) io::write_png(fmt::format("{}/frame_{:03}.png", out, i), frames[i]);
    has_clip = write_mp4(out, frames[0].width);
  }
  if (!notes.rgb || options.latents) {
    io::SafeTensors file;
    file.tensors["latents"] = float_array(sample.latent, latent_shape);
    io::write_safetensors(out + "/latents.safetensors", file);
  }
  if (profile) {
    json["profile"] = profile->json();
    write_text(outputs.open(options.profile_out), profile->csv());
  }
  write_json(out + "/run.json", json);
  outputs.place();
  fmt::print(
      "{}: {} at {}, {} steps, density {:.4f}, {:.2f} s (dense calls {:.2f}, sparse attention {:.2f}, selection {:.2f}, "
      "rest "
      "{:.2f}; {}, {} threads, {})\n",
      options.output, options.method, io::join(request.grid, "x"), request.steps, density, sample.seconds,
      seconds["dense_prefix"].get<double>(), seconds["sparse_attention"].get<double>(), seconds["selection"].get<double>(),
      seconds["rest"].get<double>(), compute, context.threads(), context.instruction_set());
  require(has_clip, Status::io, "{}: ffmpeg failed, and there is no clip.mp4; the frames and run.json are there",
          options.output);
}

}  // namespace

void read_latent_inputs(const VideoInputs& inputs, double guidance, double guidance_2, const video::Folder& folder,
                        const video::ModelConfig& config, const std::array<int64_t, 3>& size, video::Request& request) {
  GenerateOptions options;
  static_cast<VideoInputs&>(options) = inputs;
  options.guidance = request.guidance = guidance;
  options.guidance_2 = guidance_2;
  read_inputs(options, inputs.condition, config, folder.keeps_first_frame, size, request);
}

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
  command
      ->add_option("-o,--output", options->output,
                   "folder to write; an earlier run there is replaced, and one that holds anything else is refused")
      ->required();
  command->add_option("--model", options->model, "model folder, or the name of a bundled one")->capture_default_str();
  command->add_option("--method", options->method, "a row of `scope methods`; settings may follow, as scope:rho=0.8")
      ->capture_default_str();
  command->add_option("--set", options->set, "one setting, as name=value; repeat for more")->allow_extra_args(false);
  command->add_option(
      "--known", options->known,
      "take rho, schedule, profile bounds and reuse of a known model (see `scope methods`) for the method, or "
      "none; otherwise those of the first whose layers, heads and RoPE config.json has");
  command->add_option(
      "--target-density", options->target_density,
      "share of keys that sparse calls keep: the mean of their heads, or with target_scope=head each of them");
  command->add_option("--steps", options->steps, "sampling steps; otherwise the model's, or 20")
      ->check(whole(1, kMostSamplerSteps));
  command
      ->add_option("--sampler", options->sampler,
                   "euler, or unipc as diffusers runs it for Wan; otherwise that of the pipeline's scheduler, or euler")
      ->check(CLI::IsMember({"euler", "unipc"}));
  CLI::Option* seed = command->add_option("--seed", options->seed, "names the noise; the same for every method")
                          ->check(whole(0, kMostSeed))
                          ->capture_default_str();
  command->add_option("--grid", options->grid, "tokens along T, H and W, as 13x20x32; the bundled model's default");
  command->add_option("--example", options->example, "which sample of the condition file, from 0")
      ->check(whole(0, kMostSamples))
      ->capture_default_str();
  command->add_option("--image", options->image, "first frame as PNG (bundled model); otherwise the example's");
  command->add_option("--condition", options->condition, "prompt embeddings; otherwise the bundled examples.safetensors");
  command->add_option("--noise", options->noise, "take the tensor `noise` of this .safetensors file instead of a seed's")
      ->excludes(seed);
  command->add_option("--shift", options->shift, "of the noise levels; the scheduler's or the model's own, or 5")
      ->check(above(0, 1000));
  command
      ->add_option("--guidance", options->guidance,
                   "classifier-free guidance; 5 where there is a negative prompt. HunyuanVideo embeds it: 6, or 1 "
                   "with an image")
      ->check(above(0, 1000));
  command->add_option("--guidance-2", options->guidance_2, "of the second expert of Wan2.2; otherwise that of the first")
      ->check(above(0, 1000));
  command
      ->add_option("--experts", options->experts,
                   "in memory of two transformers: one, the second when its steps come, or both from the start; auto: both "
                   "on a GPU that has room for them, otherwise one")
      ->check(CLI::IsMember({"auto", "one", "both"}))
      ->capture_default_str();
  command
      ->add_option("--compute", options->compute,
                   "f32 or bf16, for linear layers and attention; f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_flag("--latents", options->latents, "write latents.safetensors beside the frames");
  CLI::Option* dump = command->add_option(
      "--dump-qkv", options->dump,
      "write q, k, v of every layer into this folder, for scope compare and attend; it must not lie in the run's");
  command->add_option("--dump-steps", options->dump_steps, "the steps to dump, as 4,10; otherwise the middle one")
      ->needs(dump);
  command->add_option("--dump-layers", options->dump_layers, "the layers to dump, as 0,2; otherwise all")->needs(dump);
  CLI::Option* profile = command->add_option("--profile-out", options->profile_out,
                                             "write how dense the prompt's attention is at each step, layer and head, as "
                                             "CSV (--method dense): see `scope profile`; "
                                             "a profile that is there keeps what is higher");
  command->add_option("--profile-samples", options->profile_samples, "queries of each head that it looks at, or all")
      ->capture_default_str()
      ->needs(profile);
  CLI::Option* checkpoint =
      command
          ->add_option("--checkpoint", options->checkpoint,
                       "a file that holds what is done, so that the same command goes on from there after it was stopped; "
                       "removed when the run is whole")
          ->excludes(dump)
          ->excludes(profile);
  command->add_option("--checkpoint-every", options->checkpoint_every, "steps between two writings of it")
      ->check(whole(1, kMostSamplerSteps))
      ->capture_default_str()
      ->needs(checkpoint);
  options->machine.add(*command);
  command->callback([options] { run(*options); });
}

}  // namespace scope::cli
